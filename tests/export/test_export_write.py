"""Files of more than protobuf holds: two of them, in place at once, and nothing where the disk is full."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantizer.errors import ExportError
from quantizer.export import onnx_storage
from quantizer.export.onnx_storage import write_onnx

onnx = pytest.importorskip("onnx", reason="exporting needs enginequant[onnx]")
ir = pytest.importorskip("onnx_ir", reason="exporting needs enginequant[onnx]")

X = np.random.default_rng(1).normal(size=(2, 64)).astype(np.float32)


def model(seed: int = 0) -> Any:
    """x [2, 64] times two weights [64, 64] of 16 KiB each, plus a constant of 4 bytes."""
    nodes = "a = MatMul (x, w) b = MatMul (a, v) y = Add (b, c)"
    text = f'<ir_version: 10, opset_import: ["" : 20]> g (float[2,64] x) => (float[2,64] y) {{ {nodes} }}'
    proto = onnx.parser.parse_model(text)
    random = np.random.default_rng(seed)
    for name, shape in {"w": (64, 64), "v": (64, 64), "c": ()}.items():
        array = np.asarray(random.normal(size=shape), np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return ir.from_proto(proto)


def computed(path: Path) -> np.ndarray:
    onnxruntime = pytest.importorskip("onnxruntime", reason="running ONNX needs enginequant[onnxruntime]")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    result: np.ndarray = session.run(None, {"x": X})[0]
    return result


@pytest.fixture
def two_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protobuf's limit, as if it were 20 KiB."""
    monkeypatch.setattr(onnx_storage, "_ONE_FILE", 20 * 1024)


def test_what_fits_is_one_file(tmp_path: Path) -> None:
    whole = ir.to_proto(model())
    write_onnx(model(), tmp_path / "m.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]
    # The message that protobuf itself would write, but for the order of the tensors, whose types it says twice.
    written = onnx.load(tmp_path / "m.onnx")
    for proto in (whole, written):
        proto.graph.initializer.sort(key=lambda tensor: tensor.name)
        del proto.graph.value_info[:]
    assert written == whole


@pytest.mark.usefixtures("two_files")
def test_what_does_not_fit_is_two_files_that_compute_the_same(tmp_path: Path) -> None:
    onnx.save(ir.to_proto(model()), tmp_path / "whole.onnx")
    expected = computed(tmp_path / "whole.onnx")
    (tmp_path / "two").mkdir()
    write_onnx(model(), tmp_path / "two" / "m.onnx")
    first, second = sorted((tmp_path / "two").iterdir())
    assert first.name == "m.onnx"
    assert first.stat().st_size < 2000
    assert second.stat().st_size == 2 * 64 * 64 * 4
    tensors = onnx.load(first, load_external_data=False).graph.initializer
    places = {item.name: {entry.key: entry.value for entry in item.external_data} for item in tensors}
    assert {place["location"] for name, place in places.items() if name != "c"} == {second.name}
    assert {int(place["offset"]) % 4096 for name, place in places.items() if name != "c"} == {0}
    assert not places["c"]
    assert np.array_equal(computed(first), expected)


@pytest.mark.usefixtures("two_files")
def test_the_tensors_of_a_former_file_go_with_it(tmp_path: Path) -> None:
    other = tmp_path / "m.onnx.data"
    other.write_text("not ours")
    for seed in (0, 1, 1):
        write_onnx(model(seed), tmp_path / "m.onnx")
        assert len(list(tmp_path.iterdir())) == 3
        computed(tmp_path / "m.onnx")
    assert other.read_text() == "not ours"


@pytest.mark.usefixtures("two_files")
@pytest.mark.parametrize("at", [1, 2])
def test_a_file_that_stood_there_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    write_onnx(model(0), tmp_path / "m.onnx")
    expected = computed(tmp_path / "m.onnx")
    replace, calls = os.replace, []

    def fail(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == at:
            raise OSError(5, "Input/output error")
        replace(*arguments)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ExportError, match=r"m\.onnx cannot be written: Input/output error"):
        write_onnx(model(1), tmp_path / "m.onnx")
    assert np.array_equal(computed(tmp_path / "m.onnx"), expected)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("limit", [20 * 1024, 2**30], ids=["two files", "one file"])
def test_no_room_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(onnx_storage, "_ONE_FILE", limit)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The system itself refuses to write more than this to one file, as it does where a disk is full.
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(ExportError, match=r"m\.onnx cannot be written: File too large"):
            write_onnx(model(), tmp_path / "m.onnx")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())
