"""A damaged engine runs, and gives other outputs: so its file has a checksum, which loading compares."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantizer.engines import BuildOptions, build_engine, detect_backend, inspect_engine, load_engine
from quantizer.engines.engine_file import built_on, read_engine, sign_onnx, write_engine
from quantizer.errors import EngineError
from quantizer.export.qdq.onnx_file import checked_onnx
from quantizer.utils.cpu import cpu_instructions

backends_file = importlib.import_module("quantizer.engines.backends")
openvino_engine = importlib.import_module("quantizer.engines.openvino.engine")
onnxruntime_engine = importlib.import_module("quantizer.engines.onnxruntime")


@pytest.fixture(params=["openvino", "onnxruntime"])
def built(request: pytest.FixtureRequest, qdq: Any, tmp_path: Path) -> tuple[str, Path]:
    name = str(request.param)
    pytest.importorskip(name)
    build_engine(name, qdq.path, tmp_path / "model.engine", BuildOptions())
    return name, tmp_path / "model.engine"


def _damaged(path: Path) -> bytes:
    """A file of which one bit of a weight is another, where the library does not see it."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    return bytes(content)


def test_a_flipped_bit_is_refused(built: tuple[str, Path]) -> None:
    name, path = built
    _damaged(path)
    with pytest.raises(EngineError, match=r"model\.engine is damaged: .*SHA-256 differs.*build it again"):
        load_engine(name, path)
    with pytest.raises(EngineError, match=r"model\.engine is damaged: .*SHA-256 differs"):
        inspect_engine(name, path)


def test_an_engine_that_is_whole_loads_with_and_without_a_look(built: tuple[str, Path], qdq: Any) -> None:
    name, path = built
    checked, trusted = load_engine(name, path), load_engine(name, path, verify=False)
    inputs = {spec.name: np.ones([size or 2 for size in spec.shape], spec.dtype) for spec in checked.inputs}
    for key, value in checked(inputs).items():
        assert np.array_equal(value, trusted(inputs)[key])


def test_an_engine_of_onnxruntime_is_still_an_onnx_file(qdq: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    build_engine("onnxruntime", qdq.path, tmp_path / "model.engine", BuildOptions())
    model = onnx.load(str(tmp_path / "model.engine"))
    assert [entry.key for entry in model.metadata_props][-1] == "quantizer.engine"
    onnx.checker.check_model(model, full_check=False)


@pytest.mark.parametrize("note", [{}, {"precision": "float32", "dimensions": {"ä": ["the cpu x"]}}])
def test_what_is_written_is_read_with_its_note(note: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "model.engine"
    write_engine(path, memoryview(b"what a library built"), note)
    assert read_engine(path) == (b"what a library built", note)
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)
    with pytest.raises(EngineError, match="SHA-256 differs"):
        read_engine(path)
    assert read_engine(path, verify=False)[1] == note


@pytest.mark.parametrize("note", [{}, {"precision": "float32", "dimensions": {"a": ["the cpu x"]}}])
def test_the_instructions_of_the_cpu_are_beside_the_note(note: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "model.engine"
    write_engine(path, memoryview(b"what a library built"), note, ("avx2", "avx512_vnni"))
    assert read_engine(path) == (b"what a library built", note)
    assert built_on(path) == ("avx2", "avx512_vnni")
    path.write_bytes(path.read_bytes().replace(b'"avx2', b'"sse2'))
    with pytest.raises(EngineError, match="SHA-256 differs"):
        read_engine(path)
    write_engine(path, memoryview(b"what a library built"), note)
    assert built_on(path) == ()
    path.write_bytes(b"quantizer.engine\x12")
    assert built_on(path) == ()


def test_an_engine_on_a_cpu_without_its_instructions(
    built: tuple[str, Path], qdq: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, path = built
    here = cpu_instructions()
    assert built_on(path) == here
    backend_file = {"openvino": openvino_engine, "onnxruntime": onnxruntime_engine}[name]
    monkeypatch.setattr(backend_file, "cpu_instructions", lambda: (*here, "amx_int8"))
    build_engine(name, qdq.path, path, BuildOptions())
    assert built_on(path) == (*here, "amx_int8")
    monkeypatch.setattr(backends_file, "cpu_instructions", lambda: ("avx2",))
    with pytest.warns(UserWarning, match=r"model\.engine was built on a CPU with .*amx_int8, which this CPU lacks"):
        load_engine(name, path)
    # A system that tells nothing, and a CPU that has more, are no reason to warn.
    for told in ((), (*here, "amx_int8", "amx_bf16")):
        monkeypatch.setattr(backends_file, "cpu_instructions", lambda told=told: told)
        load_engine(name, path)


def test_a_footer_that_is_not_whole_is_none(tmp_path: Path) -> None:
    path = tmp_path / "model.engine"
    write_engine(path, memoryview(b"what a library built"), {"precision": "float32"})
    whole = path.read_bytes()
    for cut in (1, 2, 40, len(whole) - 30):
        path.write_bytes(whole[:-cut])
        assert read_engine(path) == (whole[:-cut], {})
    path.write_bytes(b"what a library built\nquantizer engine: [1]\n")
    assert read_engine(path)[1] == {}


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Permission bits do not stop root, who often runs tests.
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "model.engine"
    path.write_bytes(b"anything")
    monkeypatch.setattr(Path, "open", refuse)
    for read in (detect_backend, checked_onnx):
        with pytest.raises(EngineError, match=r"model\.engine cannot be read: Permission denied"):
            read(path)


def _sign_again(path: Path, change: Callable[[bytes], bytes], **note: Any) -> None:
    """Change what a library built, and the note after it, and make the checksum right again."""
    whole, told = read_engine(path, verify=False)
    if told:
        write_engine(path, memoryview(change(bytes(whole))), told | note)
    else:
        path.write_bytes(change(bytes(whole)))
        sign_onnx(path)


def _refused_by_us(name: str, path: Path) -> None:
    """Load and inspect an engine: it may be refused, by an error of ours alone."""
    for read in (load_engine, inspect_engine):
        with suppress(EngineError):
            read(name, path)


@pytest.mark.parametrize("text", [b"\xff\xff\xff\xff", b"\xed\xa0\x80\x80", b"\0\0\0\0"])
def test_text_in_an_engine_that_is_no_unicode(built: tuple[str, Path], text: bytes) -> None:
    """A library hands it on, in a profile or in the message of its own error."""
    name, path = built
    word = {"onnxruntime": b"ayer", "openvino": b"isa="}[name]
    assert word in path.read_bytes()
    _sign_again(path, lambda whole: whole.replace(word, text))
    _refused_by_us(name, path)


@pytest.mark.parametrize("at", range(0, 100, 5))
def test_damage_with_a_right_checksum(built: tuple[str, Path], at: int) -> None:
    """At any place of what the library wrote, a byte less and a byte that is another."""
    name, path = built
    good = path.read_bytes()
    for change in (lambda whole, place: whole[:place] + whole[place + 1 :], _flipped):
        path.write_bytes(good)
        _sign_again(path, lambda whole, change=change: change(whole, len(whole) * at // 100))  # type: ignore[misc]
        _refused_by_us(name, path)


def _flipped(whole: bytes, place: int) -> bytes:
    return whole[:place] + bytes([whole[place] ^ 0x90]) + whole[place + 1 :]


@pytest.mark.parametrize(
    ("note", "message"),
    [
        ({"precision": "float64"}, "footer is invalid .*note.precision: expected one of float32, bfloat16, got 'float"),
        ({"group": 10**30}, "cannot load here|is not an engine"),
        ({"group": None}, r"footer is invalid .*note\.group: expected a whole number"),
        ({"models": [[[0, 9]]] * 100}, "footer is invalid .*100 models are listed"),
        ({"models": [[[0, 999]] * 10**5]}, "footer is invalid .*much larger"),
        ({"dimensions": {"ids": "batch"}}, r"footer is invalid .*note\.dimensions"),
    ],
    ids=["precision", "group", "no group", "models", "size of a model", "names of dimensions"],
)
def test_a_note_that_says_what_cannot_be(note: dict[str, Any], message: str, qdq: Any, tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    build_engine("openvino", qdq.path, tmp_path / "model.engine", BuildOptions())
    _sign_again(tmp_path / "model.engine", bytes, **note)
    with pytest.raises(EngineError, match=message):
        load_engine("openvino", tmp_path / "model.engine")
