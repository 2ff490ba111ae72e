"""A model that a function returns, from YAML and from the command line: runs, conversions, sweeps, and what is refused.

The functions are written into a folder, as a user has them, and imported by name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import nn

for _package in ("onnx", "onnxscript", "onnxruntime", "jinja2"):
    pytest.importorskip(_package, reason="a run needs enginequant[onnx,onnxruntime,report]")

from user_package import DATA, NETS

from quantizer.algorithms.sensitivity import fingerprint
from quantizer.cli.main import main
from quantizer.config import load_run
from quantizer.engines import load_engine
from quantizer.engines.for_this_cpu import cpu_candidates
from quantizer.pipeline import function_source
from quantizer.pipeline.scores import FunctionMetric, FunctionScorer
from quantizer.pipeline.search_max_drop import EngineBudget
from quantizer.report import RunRecord, read_record

ONNXRUNTIME = next(name for name in cpu_candidates()[0] if name.startswith("onnxruntime"))

pytestmark = pytest.mark.usefixtures("exact_byte_products")


FUNCTIONS = {"source": "my_pkg.nets:build", "inputs": "my_pkg.data:calibration", "metric": "my_pkg.data:score"}
CONVERT = ("convert", "-m", FUNCTIONS["source"], "--inputs", FUNCTIONS["inputs"], "--quantization", "-o", "out")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with the user's package and a file of a run; modules and paths are as before at the end."""
    _written(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "my_pkg"]:
        del sys.modules[name]


def _written(folder: Path) -> None:
    (folder / "my_pkg").mkdir()
    (folder / "my_pkg/nets.py").write_text(NETS)
    (folder / "my_pkg/data.py").write_text(DATA)
    run = {"model": FUNCTIONS, "quantizer": {"backend": ONNXRUNTIME, "preset": "plain"}}
    (folder / "run.yaml").write_text(yaml.safe_dump(run))


def _net() -> nn.Module:
    """The module that ``build`` returns, made here."""
    names: dict[str, object] = {}
    exec(compile(NETS, "nets", "exec"), names)
    made = names["build"]()  # type: ignore[operator]
    assert isinstance(made, nn.Module)
    return made.eval()


def _record(folder: str = "out") -> RunRecord:
    return read_record(Path(folder) / "report.json")


# -- from end to end -----------------------------------------------------------------------------------------------


def test_a_module_with_weights_of_a_file() -> None:
    """What is written and printed of functions: tests/goldens."""
    weights = {name: value + 0.5 for name, value in _net().state_dict().items()}
    save_file(weights, "w.safetensors")
    words = [*CONVERT, "--score", FUNCTIONS["metric"], "--backend", ONNXRUNTIME, "--batch-size", "1", "2", "8"]
    assert main([*words, "--set", "model.weights=w.safetensors", "quantizer.preset=plain"]) == 0
    # The float engine is the module in eval mode, with the weights of the file.
    model = _net()
    model.load_state_dict(weights)
    image = torch.randn(4, 3, 8, 8)
    (given,) = load_engine(ONNXRUNTIME, Path("out/float.engine"))({"image": image.numpy()}).values()
    with torch.no_grad():
        torch.testing.assert_close(torch.as_tensor(given), model(image), rtol=1e-4, atol=1e-5)
    # The file in the folder makes the same run again.
    config = load_run("out/config.yaml")
    assert config.export.dynamic.batch == (1, 2, 8)
    assert config.model.weights == str(Path("w.safetensors").absolute())
    assert main(["validate", "out/config.yaml"]) == 0


def test_a_budget_by_the_function() -> None:
    budget = ["amp={batches: 1}", "fallback={max_drop: 0.5}"]
    assert main(["run", "run.yaml", *budget, "--output", "out"]) == 0
    record = _record()
    assert record.fallback.max_drop == 0.5
    (check,) = record.fallback.checks
    assert check.samples is None
    assert check.drop == pytest.approx(-(record.scores[1].difference or 0.0))
    assert record.fallback.outcome.verdict == "met"
    # No score is kept beside a complete run.
    assert not Path("out.search").exists()


@pytest.mark.nightly
def test_a_sweep_of_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    built, make = [], function_source.returned_module
    monkeypatch.setattr(function_source, "returned_module", lambda model: built.append(model.source) or make(model))
    assert main(["run", "run.yaml", "quantizer.activations.calibrator=max,mse", "--output", "out"]) == 0
    runs = sorted(path.name for path in Path("out").iterdir() if (path / "report.json").is_file())
    assert runs == ["calibrator=max", "calibrator=mse"]
    # Both are of one module, with one score of it.
    assert built == [FUNCTIONS["source"]]
    first, second = (_record(f"out/{name}") for name in runs)
    assert first.scores[0].value == second.scores[0].value
    page = Path("out/comparison.html").read_text()
    assert "not compared" not in page


def test_validate_and_inspect(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "run.yaml"]) == 0
    assert main(["inspect", "run.yaml"]) == 0
    assert "first._conv_forward.conv2d" in capsys.readouterr().out
    assert main(["validate", "run.yaml", "out.yaml"]) == 1


# -- scores and budgets by a function ------------------------------------------------------------------------------


class _Scorer(FunctionScorer):
    """Gives engines the drops that it was made with, one after the other."""

    def __init__(self, drops: list[float]) -> None:
        self._drops = iter(drops)
        self._metric = FunctionMetric(lambda _: 1.0, higher_is_better=True)

    def difference(self, which: str, engine: object) -> float | None:
        return -next(self._drops)


def test_an_engine_that_loses_more_by_the_function_narrows_the_search(folder: Path) -> None:
    from io import StringIO

    from rich.console import Console

    from quantizer.pipeline.context import RunContext
    from quantizer.pipeline.module_feed import ModuleFeed
    from quantizer.pipeline.progress import StageTimer
    from quantizer.pipeline.resume import ResumeFiles
    from quantizer.utils.files import NO_STORE

    timer = StageTimer(Console(file=StringIO()))
    feed, kept = ModuleFeed([{"image": torch.ones(2, 3)}]), ResumeFiles(NO_STORE, folder, NO_STORE, NO_STORE)
    context = RunContext(timer=timer, resume=kept, model=_net(), processor=None, feed=feed)
    budget = EngineBudget(context, 0.1, [], checked=True, function=_Scorer([0.15, 0.05]))
    budget.warn("fallback.max_drop")
    engine = object()
    assert budget.next_drop(engine, 1) == pytest.approx(0.05)  # type: ignore[arg-type]
    assert budget.next_drop(engine, 2) is None  # type: ignore[arg-type]
    assert [(check.samples, check.groups) for check in budget.checks] == [(None, 1), (None, 2)]
    unchecked = EngineBudget(context, 0.1, [], checked=False, function=_Scorer([0.15]))
    assert unchecked.next_drop(engine, 1) is None  # type: ignore[arg-type]


def test_kept_scores_are_those_of_the_code_of_a_function() -> None:
    from quantizer.utils.fingerprint import Fingerprint

    def first(_: nn.Module) -> float:
        return 1.0

    def second(_: nn.Module) -> float:
        return 2.0

    weights = Fingerprint.of(_net())
    known = [fingerprint({}, FunctionMetric(one, higher_is_better=True), weights) for one in (first, first, second)]
    assert known[0] == known[1] != known[2]
