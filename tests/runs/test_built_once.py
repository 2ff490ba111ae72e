"""Engines that are kept: found again only where the same would be built."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest

from quantizer.engines import BuildOptions, BuildResult, InputSizes
from quantizer.pipeline.run_engines import built_once
from quantizer.utils import cpu as trust
from quantizer.utils.files import Store


@pytest.fixture
def built() -> list[str]:
    """Return the names of the files that were really built."""
    return []


def _build(folder: Path, built: list[str], engine: str, precision: str | None = None, threads: int = 1) -> BuildResult:
    def build(backend: str, onnx: Path, engine: Path, options: BuildOptions, **size: Any) -> BuildResult:
        built.append(engine.name)
        engine.write_bytes(b"engine of " + onnx.read_bytes())
        return BuildResult(engine, engine.stat().st_size, 1.5, ("a warning",))

    options = BuildOptions(inference_precision=precision)
    return built_once(
        Store(folder / "kept"),
        build,
        "openvino",
        folder / "a.onnx",
        folder / engine,
        options,
        threads=threads,
        sizes=InputSizes(2, 4),
    )


def test_an_equal_build_is_found_again(tmp_path: Path, built: list[str]) -> None:
    (tmp_path / "a.onnx").write_bytes(b"one")
    first = _build(tmp_path, built, "first")
    again = _build(tmp_path, built, "again")
    assert built == ["first"]
    assert again == BuildResult(tmp_path / "again", first.size_bytes, 1.5, ("a warning",))
    assert (tmp_path / "again").read_bytes() == b"engine of one"
    _build(tmp_path, built, "other options", "bfloat16")
    _build(tmp_path, built, "other threads", threads=2)
    (tmp_path / "a.onnx").write_bytes(b"two")
    _build(tmp_path, built, "other weights")
    assert built == ["first", "other options", "other threads", "other weights"]
    assert (tmp_path / "other weights").read_bytes() == b"engine of two"


def test_native_code_of_an_earlier_process_is_built_again(
    tmp_path: Path, built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever could write into the folder could have put it there."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("compiled.pt2", b"a library")
    (tmp_path / "a.onnx").write_bytes(packed.getvalue())
    monkeypatch.setattr(trust, "_BUILT_DIGESTS", {trust.hashlib.sha256(b"a library").hexdigest()})
    _build(tmp_path, built, "first")
    monkeypatch.setattr(trust, "_BUILT_DIGESTS", set())
    _build(tmp_path, built, "again")
    trust.note_built(b"a library")
    _build(tmp_path, built, "built here")
    assert built == ["first", "again"]
