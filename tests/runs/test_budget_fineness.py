"""A budget that rows cannot tell, and what is said of it in the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from quantizer.algorithms.fallback import budget_outcome
from quantizer.algorithms.sensitivity import Evaluation, Fallback
from quantizer.cli.main import main
from quantizer.pipeline.search_max_drop import budget_warnings
from quantizer.report import Score
from quantizer.report.terminal import budget_line
from quantizer.utils.records import EngineCheck

for _package in ("transformers", "sklearn", "jinja2", "openvino"):
    pytest.importorskip(_package, reason="a run needs enginequant[hf,report,openvino]")

from tiny_run import tiny_run


@pytest.mark.parametrize(
    ("asked", "rows", "metric", "said"),
    [
        (0.002, 200, "accuracy", "below one of the 200 tuning samples of the search, which is 0.0050"),
        (0.002, 600, "accuracy", "within the noise of the 600 tuning samples of the search: if"),
        (0.02, 600, "accuracy", None),
        # Nothing lost is a budget that any rows can tell; and a rank correlation has no step.
        (0.0, 200, "accuracy", None),
        (0.002, 200, "spearman", None),
    ],
)
def test_what_rows_can_tell(asked: float, rows: int, metric: str, said: str | None) -> None:
    found = list(budget_warnings(asked, rows, rows, metric, "--max-drop"))
    assert len(found) == (said is not None)
    if said is not None:
        assert f"--max-drop: {asked:g} is {said}" in found[0]


def test_samples_that_check_the_engine_are_named() -> None:
    for asked, said in ((0.005, "is within the noise of"), (0.001, "is below one of")):
        (line,) = budget_warnings(asked, 400, 600, "accuracy", "--max-drop")
        expected = "the 400 tuning samples of the search (of 600; the others check the engine)"
        assert line.startswith(f"--max-drop: {asked} {said} {expected}")


@pytest.mark.parametrize("rows", [None, 15])
def test_validate_warns(tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: int | None) -> None:
    run: dict[str, Any] = tiny_run(tmp_path)
    run["data"]["tuning"] = {"name": "text-csv", "path": str(tmp_path / "calibration.csv")}
    if rows is not None:
        run["data"]["tuning"]["samples"] = rows
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**run, "amp": {}, "fallback": {"max_drop": 0.002}}))
    assert main(["validate", str(file)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"ok: {file}" in out
    assert (out.count("time:"), out.count("memory:")) == (1, 1)
    # A third of the 16, or 15, checks the engine.
    assert f"warning: fallback.max_drop: 0.002 is below one of the {11 if rows is None else 10} tuning" in out
    del run["data"]["tuning"]
    file.write_text(yaml.safe_dump({**run, "amp": {}, "fallback": {"num": 1}}))
    assert main(["validate", str(file)]) == 0
    assert "warning" not in capsys.readouterr().out


FOUND = Fallback(
    groups=("a",),
    asked="max_drop=0.002",
    evaluations=(Evaluation(groups=("a",), score=0.9, drop=0.0, cost=1.0),),
    float_score=0.9,
    max_drop=0.002,
)


@pytest.mark.parametrize(
    ("difference", "interval", "higher", "verdict"),
    [
        (-0.0045, (-0.0135, 0.0025), True, "not met, within noise"),
        (-0.0045, (-0.0080, -0.0030), True, "not met"),
        (-0.0010, (-0.0040, 0.0020), True, "met, within noise"),
        (0.0010, (-0.0010, 0.0030), True, "met"),
        (0.0045, (0.0030, 0.0080), False, "not met"),
        (-0.0045, None, True, "not met"),
    ],
)
def test_the_end_says_whether_the_budget_is_met(
    difference: float, interval: tuple[float, float] | None, higher: bool, verdict: str
) -> None:
    common: dict[str, Any] = {"metric": "m", "higher_is_better": higher}
    engine = Score(form="engine", value=0.9, difference=difference, interval=interval, **common)
    outcome = budget_outcome(FOUND, 0.002, (), [Score(form="float", value=0.9, **common), engine])
    assert outcome.verdict == verdict
    assert outcome.evaluation_drop == pytest.approx(-difference if higher else difference)
    line = budget_line(outcome)
    assert line.startswith(f"{verdict}: max_drop 0.002; drop of the engine on the evaluation samples ")
    assert line.endswith("; drop of the plan on the tuning samples 0.0000")
    if interval is not None:
        assert outcome.interval[0] <= outcome.evaluation_drop <= outcome.interval[1]


def test_without_an_evaluation_the_engine_tells_and_without_it_the_search() -> None:
    check = EngineCheck(groups=1, drop=0.01, samples=100)
    assert budget_outcome(FOUND, None, (check,), ()).verdict == "not met"  # type: ignore[union-attr]
    assert budget_outcome(FOUND, None, (), ()).verdict == "met"  # type: ignore[union-attr]
    assert budget_outcome(Fallback(groups=("a",), asked="num=1"), None, (), ()) is None
