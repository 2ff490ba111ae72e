"""Engines that are kept for a command that goes on: found again only where the same would be built, and whole."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest

from quantizer.common import native_code as trust
from quantizer.engines import BuildOptions, BuildResult, InputSizes
from quantizer.pipeline import kept_engines
from quantizer.pipeline.kept_engines import KeptEngines, remove_engines


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the files that were really built."""
    names: list[str] = []

    def build(name: str, onnx: Path, engine: Path, options: BuildOptions, **size: Any) -> BuildResult:
        names.append(engine.name)
        engine.write_bytes(b"engine of " + onnx.read_bytes())
        return BuildResult(engine, engine.stat().st_size, 1.5, ("a warning",))

    monkeypatch.setattr(kept_engines, "tried_build", build)
    return names


def _build(folder: Path, engine: str, precision: str | None = None, rows: str | None = "rows") -> Any:
    kept = KeptEngines(folder / "kept", rows)
    options = BuildOptions(inference_precision=precision)
    made = kept.build("openvino", folder / "a.onnx", folder / engine, options, threads=1, sizes=InputSizes(2, 4))
    return kept, made


def test_an_equal_build_is_found_again(tmp_path: Path, built: list[str]) -> None:
    (tmp_path / "a.onnx").write_bytes(b"one")
    _, first = _build(tmp_path, "first")
    _, again = _build(tmp_path, "again")
    assert built == ["first"]
    assert again == BuildResult(tmp_path / "again", first.size_bytes, 1.5, ("a warning",))
    assert (tmp_path / "again").read_bytes() == b"engine of one"
    _build(tmp_path, "other options", "bfloat16")
    (tmp_path / "a.onnx").write_bytes(b"two")
    _build(tmp_path, "other weights")
    assert built == ["first", "other options", "other weights"]
    assert (tmp_path / "other weights").read_bytes() == b"engine of two"


def test_native_code_of_an_earlier_process_is_built_again(
    tmp_path: Path, built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever could write into the folder could have put it there."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("compiled.pt2", b"a library")
    (tmp_path / "a.onnx").write_bytes(packed.getvalue())
    monkeypatch.setattr(trust, "_BUILT", set())
    _build(tmp_path, "first")
    _build(tmp_path, "again")
    trust.note_built(b"a library")
    _build(tmp_path, "built here")
    assert built == ["first", "again"]


@pytest.mark.parametrize("ending", ["engine", "json"])
def test_what_is_damaged_is_built_again(tmp_path: Path, built: list[str], ending: str) -> None:
    (tmp_path / "a.onnx").write_bytes(b"one")
    _build(tmp_path, "first")
    (only,) = (tmp_path / "kept").glob(f"*.{ending}")
    only.write_bytes(b"{}")
    _build(tmp_path, "again")
    assert built == ["first", "again"]
    assert (tmp_path / "again").read_bytes() == b"engine of one"


@pytest.mark.parametrize(("rows", "taken"), [("rows", 1), ("others", 2), (None, 2)])
def test_a_score_is_kept_for_the_same_rows(tmp_path: Path, built: list[str], rows: str | None, taken: int) -> None:
    (tmp_path / "a.onnx").write_bytes(b"one")
    scores = iter([0.25, 0.5])
    kept, made = _build(tmp_path, "first")
    assert kept.difference(made.path, lambda: next(scores)) == 0.25
    kept, made = _build(tmp_path, "again", rows=rows)
    assert kept.difference(made.path, lambda: next(scores)) == (0.25 if taken == 1 else 0.5)
    assert built == ["first"]


def test_only_engines_are_removed(tmp_path: Path, built: list[str]) -> None:
    (tmp_path / "a.onnx").write_bytes(b"one")
    _build(tmp_path, "first")
    (tmp_path / "kept" / "notes").touch()
    remove_engines(tmp_path / "kept")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["notes"]
    (tmp_path / "kept" / "notes").unlink()
    remove_engines(tmp_path / "kept")
    assert not (tmp_path / "kept").exists()
    remove_engines(tmp_path / "kept")
