"""Paths from users that no file can have."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import quantizer
from quantizer import Quantizer, from_onnx
from quantizer.check import check_file
from quantizer.engines import inspect_file, load_engine
from quantizer.errors import QuantizerError
from quantizer.tasks import load_model
from quantizer.utils.files import write_folder
from quantizer.utils.files.writable import real_place
from quantizer.utils.paths import expanded

DEEP = "/".join("a" * 2000)
PATHS = {
    "deep": DEEP,
    "long": "/".join(["a" * 200] * 30),
    "nul": "a\0b",
    "nobody": "~nosuchuser/x",
    "surrogate": "a\udcff",
    "empty": "",
}
READERS: dict[str, Callable[[str], object]] = {
    "load": quantizer.load,
    "Quantizer.load": Quantizer.load,
    "from_onnx": from_onnx,
    "check_file": lambda path: check_file(path, "openvino"),
    "inspect_file": lambda path: inspect_file(Path(path)),
    "load_engine": lambda path: load_engine("torch", path),
    "load_model": lambda path: load_model(path, "sequence-classification"),
    "compare_runs": lambda path: quantizer.compare_runs(path),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_nothing_can_have_is_an_error_of_ours(reader: str, path: str) -> None:
    pytest.importorskip("onnx", reason="install enginequant[onnx]")
    with pytest.raises(QuantizerError, match=r"\S"):
        READERS[reader](PATHS[path])


def test_folders_in_one_another_have_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(QuantizerError, match="cannot be written: File name too long"):
        real_place(DEEP)
    with pytest.raises(QuantizerError, match="cannot be written: File name too long"):
        write_folder(DEEP, lambda folder: None, kind="quantizer")
    assert not list(tmp_path.iterdir())


def test_the_home_of_nobody_stays_as_it_is() -> None:
    assert expanded("~nosuchuser/x") == Path("~nosuchuser/x")
    assert expanded("~/x") == Path.home() / "x"


def test_a_batch_without_values() -> None:
    import torch

    net = nn.Linear(16, 16)
    nothing = torch.empty(2, 16, device="meta")
    for batches in ([nothing], [torch.zeros(2, 16), (nothing,)], [{"input": nothing}]):
        with pytest.raises(QuantizerError, match="contains a tensor on the device meta, which has no values"):
            Quantizer().calibrate(net, batches)


def test_weights_that_may_not_be_read_are_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save_file

    from quantizer.pipeline.function_source import load_weights
    from quantizer.utils.batches import array_batches

    net, path = nn.Linear(2, 2), tmp_path / "weights.safetensors"
    save_file(dict(net.state_dict()), path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    for read in (lambda: load_weights(net, path), lambda: list(array_batches(path, 2, None))):
        with pytest.raises(QuantizerError, match=r"weights\.safetensors cannot be read: Permission denied"):
            read()
