"""A folder from elsewhere may hold links to devices and pipes, which have no end: none is read."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import quantizer
from quantizer import Quantizer
from quantizer.config import load_run
from quantizer.engines import load_engine
from quantizer.errors import QuantizerError, TaskError
from quantizer.pipeline.load import load_converted
from quantizer.report import read_record
from quantizer.tasks import read_checkpoint, resolve_source
from quantizer.utils.files import write_folder

pytestmark = pytest.mark.skipif(not Path("/dev/zero").exists(), reason="this system has no such devices")


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    """What would be read without an end ends with a MemoryError soon."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    q = Quantizer(preset="plain", backend="torch")
    q.calibrate(model, [torch.randn(32, 4)])
    folder = tmp_path_factory.mktemp("saved") / "q"
    q.save(folder)
    return folder


def _link(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def _pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


@pytest.mark.parametrize("make", [_link, _pipe])
@pytest.mark.parametrize("name", ["quantizer.yaml", "ranges.safetensors", "observed.safetensors"])
def test_in_a_saved_quantizer(saved: Path, tmp_path: Path, make: Callable[[Path], None], name: str) -> None:
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    make(tmp_path / name)
    with pytest.raises(QuantizerError, match="it is a device or a pipe; expected a regular file"):
        Quantizer.load(tmp_path)


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "report": ("report.json", lambda folder: read_record(folder / "report.json")),
    "configuration of a run": ("config.yaml", quantizer.load),
    "configuration of a conversion": ("config.json", load_converted),
    "engine of openvino": ("model.engine", lambda folder: load_engine("openvino", folder / "model.engine")),
    "engine of onnxruntime": ("model.engine", lambda folder: load_engine("onnxruntime", folder / "model.engine")),
    "engine of torch": ("model.engine", lambda folder: load_engine("torch", folder / "model.engine")),
    "onnx file": ("model.onnx", lambda folder: quantizer.from_onnx(folder / "model.onnx")),
    "run file": ("run.yaml", lambda folder: load_run(folder / "run.yaml")),
    "marker": (".quantizer.json", lambda folder: write_folder(folder, lambda new: None, kind="a run", replace=True)),
}


@pytest.mark.parametrize("what", [*READERS])
def test_elsewhere(what: str, tmp_path: Path) -> None:
    name, read = READERS[what]
    _link(tmp_path / name)
    with pytest.raises(QuantizerError, match=name.replace(".", r"\.") if what != "marker" else str(tmp_path)):
        read(tmp_path)


@pytest.mark.parametrize("make", [_link, _pipe])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "1_Pooling/config.json"])
def test_in_the_folder_of_a_model(tmp_path: Path, make: Callable[[Path], None], name: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "1_Pooling").mkdir()
    # A link to a regular file, as in the hub's cache, and a link to nothing are no reason to refuse the folder.
    (tmp_path / "vocab.txt").symlink_to(tmp_path / "tokenizer_config.json")
    (tmp_path / "left.json").symlink_to(tmp_path / "none")
    assert resolve_source(str(tmp_path)) == tmp_path
    make(tmp_path / name)
    with pytest.raises(TaskError, match=f"{name} is a device, a pipe or a socket, expected a regular file: remove it"):
        read_checkpoint(str(tmp_path))


def test_a_configuration_of_a_model_that_is_far_too_large(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as stream:
        stream.truncate(2**35)
    with pytest.raises(TaskError, match=r"config\.json has 32,768 MiB, more than the limit of 256 MiB"):
        read_checkpoint(str(tmp_path))


def test_a_configuration_may_come_through_a_pipe() -> None:
    """As of  quantizer run <(make_config)."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        stream.write("model: {source: a:b, inputs: a:c}\nquantizer: {backend: torch}\n")
    assert load_run(f"/dev/fd/{reading}").model.source == "a:b"
    os.close(reading)
