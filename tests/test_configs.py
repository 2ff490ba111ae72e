"""Every file in configs/ is right and says how it is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantizer.cli.main import main
from quantizer.config import load_run
from quantizer.tasks import datasets, tasks

REPOSITORY = Path(__file__).parents[1]
CONFIGS = sorted(path for path in (REPOSITORY / "configs").rglob("*") if path.is_file())


def test_there_are_some() -> None:
    assert {path.name for path in CONFIGS} >= {
        "minilm-sentiment-int8.yaml",
        "minilm-sst2-int8.yaml",
        "minilm-stsb-int8.yaml",
        "minilm-stsb-int8-budget.yaml",
    }
    assert {path.suffix for path in CONFIGS} == {".yaml"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_validate(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(REPOSITORY)
    name = path.relative_to(REPOSITORY).as_posix()
    assert main(["validate", "--file-only", name]) == 0
    assert capsys.readouterr() == (f"ok: {name}\n", "")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_header_holds_the_exact_command(path: Path) -> None:
    header = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        header.append(line)
    assert f"# quantizer run {path.relative_to(REPOSITORY).as_posix()}" in header


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_names_that_are_registered_elsewhere(path: Path) -> None:
    run = load_run(path)
    assert run.model.task in tasks.names()
    for part in (run.data.calibration, run.data.evaluation, run.data.tuning, run.data.head):
        assert part is None or part.name in datasets.names()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_output_is_named_for_the_file(path: Path) -> None:
    assert load_run(path).output == f"runs/{path.stem}"
