"""Every file in configs/ is right, names what there is, and says in its first comment lines how it is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantizer.cli.main import main
from quantizer.config import load_run
from quantizer.tasks import datasets, tasks

REPOSITORY = Path(__file__).parents[2]
FILES = sorted(path.relative_to(REPOSITORY) for path in (REPOSITORY / "configs").rglob("*") if path.is_file())


def test_there_are_some() -> None:
    assert {"minilm-sst2-int8", "minilm-stsb-int8", "minilm-stsb-int8-budget"} <= {path.stem for path in FILES}
    assert {path.suffix for path in FILES} == {".yaml"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_config_file(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert main(["validate", "--file-only", str(path)]) == 0
    assert capsys.readouterr() == (f"ok: {path}\n", "")
    run = load_run(path)
    assert run.output == f"runs/{path.stem}"
    header = path.read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    assert f"# quantizer run {path.as_posix()}" in header
    assert run.model.task in tasks.names()
    for part in (run.data.calibration, run.data.evaluation, run.data.tuning, run.data.head):
        assert part is None or part.name in datasets.names()
