"""Runs whose plan goes by measured time: what falls back, what stays quantized, and a speed that is not reached."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import yaml

import quantizer.pipeline.time_groups as place_groups
from quantizer.algorithms.sensitivity.latency_costs import GroupLatency, LatencyCosts
from quantizer.cli.main import main
from quantizer.engines import InputSizes
from quantizer.model_session import ModelSession
from quantizer.pipeline.latency_fallback import RunLatencyFallback
from quantizer.pipeline.time_groups import EngineFiles, GroupTimer, Timing
from quantizer.report import RunRecord, read_record

for _package in ("transformers", "sklearn", "jinja2", "openvino"):
    pytest.importorskip(_package, reason="a run needs enginequant[hf,report,openvino]")

from tiny_run import tiny_run

pytestmark = pytest.mark.usefixtures("exact_byte_products")


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A run in the current folder, whose times are given: 100 us of 1,000 for each group, in float 300."""
    monkeypatch.chdir(tmp_path)
    run = tiny_run(tmp_path)
    run["report"] |= {"formats": ["json"]}
    monkeypatch.setattr("quantizer.pipeline.stages.measure_memory", lambda *_: ())

    def given(plan: Any, *_: Any, **__: Any) -> LatencyCosts:
        names = {operand.group for site in plan.values() for operand in site.operands if operand.quantized}
        groups = {
            name: GroupLatency(group=name, low_us=100.0, float_us=60.0 if "value" in name else 300.0)
            for name in sorted(names)
        }
        return LatencyCosts(groups=groups, low_us=1000.0, float_us=4000.0, where="openvino, 2 x 16, 1 thread")

    monkeypatch.setattr(place_groups, "time_groups_of", given)
    return run


def _run(run: dict[str, Any], code: int = 0) -> RunRecord:
    Path("tiny.yaml").write_text(yaml.safe_dump(run))
    assert main(["run", "tiny.yaml", "--output", "out", "--force"]) == code
    return read_record(Path("out/report.json"))


def _engines(monkeypatch: pytest.MonkeyPatch, **microseconds: float) -> None:
    """Give the latencies of engines by their names, in microseconds."""
    monkeypatch.setattr(
        Timing, "seconds", lambda self, paths, *_, **__: {name: [1e-6 * microseconds[name]] * 15 for name in paths}
    )


@pytest.mark.parametrize(("placed", "back"), [(900.0, 1), (995.0, 0)], ids=["faster", "not faster"])
def test_slower_groups_fall_back_where_the_engine_is_faster(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, placed: float, back: int
) -> None:
    """Biases are corrected again, by a plan of these groups, only if groups stay in float."""
    _engines(monkeypatch, placed=placed, low=1000.0)
    planned: list[Any] = []
    plan = ModelSession.plan

    def counted(self: ModelSession, groups: Any = None, correction: Any = None) -> Any:
        planned.append(groups)
        return plan(self, groups, correction)

    monkeypatch.setattr(ModelSession, "plan", counted)
    record = _run(asked)
    assert any(planned) is (back > 0)
    assert record.latency_fallback is not None
    slower = [group for group in record.latency_fallback.groups if group.slower_reason is not None]
    assert (len(slower), record.latency_fallback.float_groups) == (back, back)
    assert record.fallback is None or record.fallback.groups == ()
    reasons = [row.reason for row in record.coverage if row.reason.startswith("slower in low precision")]
    # The group is the input of three linears.
    assert len(reasons) == 3 * back


@pytest.mark.parametrize(
    ("ratios", "faster"),
    [
        ([1.03] * 15, True),
        ([1.03] * 12 + [0.97] * 3, True),
        # The median is above the limit, but chance may have made it so.
        ([1.03] * 10 + [0.97] * 5, False),
        ([1.5] * 4, False),
        ([1.015] * 15, False),
    ],
)
def test_only_a_significant_gain_is_one(monkeypatch: pytest.MonkeyPatch, ratios: list[float], faster: bool) -> None:
    seconds = {"placed": [1e-3] * len(ratios), "low": [1e-3 * ratio for ratio in ratios]}
    monkeypatch.setattr(Timing, "seconds", lambda self, paths, **_: seconds)
    files = EngineFiles(onnx=Path("a.onnx"), engine=Path("a.engine"))
    assert place_groups.is_faster(files, files, Timing(backend="openvino", sizes=InputSizes(), threads=1)) is faster


@pytest.mark.parametrize(("placed", "rounds"), [(1.1, 5), (0.9, 15)])
def test_a_comparison_ends_early_without_a_gain(placed: float, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def interleaved(calls: dict[str, Any], rounds: int, **_: Any) -> dict[str, list[float]]:
        taken.append(rounds)
        return {"placed": [placed] * rounds, "low": [1.0] * rounds}

    monkeypatch.setattr(place_groups, "interleaved_latency", interleaved)
    monkeypatch.setattr(place_groups, "working_inputs", lambda *_: None)
    monkeypatch.setattr(Timing, "load", lambda *_: print)
    files = EngineFiles(onnx=Path("a.onnx"), engine=Path("a.engine"))
    timing = Timing(backend="openvino", sizes=InputSizes(), threads=1)
    assert place_groups.is_faster(files, files, timing) is (placed < 1)
    assert sum(taken) == rounds


@pytest.mark.parametrize(("predicted_us", "doubtful"), [(970.0, False), (950.0, True), (900.0, False)])
def test_what_is_clear_is_not_measured_again(predicted_us: float, doubtful: bool) -> None:
    costs: Any = SimpleNamespace(low_us=1000.0, slower=dict, time_us=lambda _: predicted_us)
    assert place_groups._is_doubtful(costs) is doubtful


def test_groups_that_are_hardly_slower_stay(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = place_groups.time_groups_of
    monkeypatch.setattr(place_groups, "time_groups_of", lambda *told: replace(given(*told), low_us=5000.0))
    monkeypatch.setattr(GroupTimer, "_faster", lambda *_: pytest.fail("an engine was built to time it"))
    record = _run(asked)
    assert record.latency_fallback is not None
    assert record.latency_fallback.float_groups == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "1 group is slower in INT8 when timed alone; the difference is too small to keep it in float" in shown
    assert "in float, so it stays in INT8" in shown


@pytest.mark.parametrize(("microseconds", "measures"), [(2e5, True), (3e5, False)])
def test_costs_of_slow_engines_are_measured_for_a_fallback_only(
    microseconds: float, measures: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[dict[str, Any]] = []

    def timer(**given: Any) -> Any:
        asked.append(given)
        return SimpleNamespace(latency_costs=lambda *_: None)

    monkeypatch.setattr("quantizer.pipeline.latency_fallback.GroupTimer", timer)
    context, config = MagicMock(), MagicMock(fallback=None)
    chosen: Any = SimpleNamespace(config=SimpleNamespace(backend="openvino"), quantize=lambda _: None)
    latency_fallback = RunLatencyFallback(context, config, tmp_path, MagicMock(several=False))
    times = {"low": microseconds, "plain": microseconds}
    engines = MagicMock(runs_here=True, usual_us=times, timing=SimpleNamespace(exact=False))
    latency_fallback.measured(chosen, engines)
    assert bool(asked) is measures
    engines = MagicMock(runs_here=True, usual_us=times, timing=SimpleNamespace(exact=True))
    latency_fallback.measured(chosen, engines)
    assert asked[-1]["known_us"] is None
    said = [str(call.args[0]) for call in context.timer.tell.call_args_list]
    assert said == ([] if measures else ["latency costs: not measured, because a call of both engines takes 0.6 s"])


def test_a_trial_is_built_for_the_chosen_backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The run's configuration names the backend from before ``auto`` chose another one."""
    monkeypatch.setattr(
        "quantizer.pipeline.latency_fallback.GroupTimer",
        lambda **given: SimpleNamespace(latency_costs=lambda *_: given["build"](Path("a.onnx"), Path("a.engine"))),
    )
    context, chosen = MagicMock(), SimpleNamespace(config=SimpleNamespace(backend="torch"), quantize=lambda _: None)
    config = MagicMock(fallback=None, quantizer=SimpleNamespace(backend="openvino"))
    latency_fallback = RunLatencyFallback(context, config, tmp_path, MagicMock(several=False))
    latency_fallback.measured(chosen, MagicMock(runs_here=True))  # type: ignore[arg-type]
    assert context.timer.build.call_args.args == ("torch", Path("a.onnx"), Path("a.engine"))


@pytest.mark.nightly
def test_a_speed_that_is_reached_at_the_second_engine(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[float] = []

    def seconds(self: Timing, paths: dict[str, Path], *_: Any, **__: Any) -> dict[str, list[float]]:
        if "placed" in paths:
            return {"placed": [1e-3], "low": [1e-3]}
        taken.append(0)
        return {"engine": [2.4e-3 if len(taken) == 1 else 1.9e-3], "float": [4e-3]}

    monkeypatch.setattr(Timing, "seconds", seconds)
    record = _run({**asked, "amp": {"batches": 1}, "fallback": {"min_speedup": 2.0}})
    assert record.latency_fallback is not None
    assert record.fallback is not None
    first, last = record.latency_fallback.checks
    assert (round(first.speedup, 3), round(last.speedup, 3)) == (1.667, 2.105)
    assert last.groups == len(record.fallback.groups) < first.groups
    assert f"min_speedup={2.0 * 1.01 * 2.0 / (4000 / 2400):g}" in record.fallback.reason
    assert len(record.latency_fallback.frontier) == len(record.latency_fallback.groups) + 1


@pytest.mark.nightly
def test_a_speed_that_no_plan_reaches(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _engines(monkeypatch, placed=1000.0, low=1000.0, engine=1000.0, float=4000.0)
    record = _run({**asked, "amp": {"batches": 1}, "fallback": {"min_speedup": 5.0}}, code=1)
    said = " ".join(capsys.readouterr().err.split())
    assert "fallback.min_speedup: 5 is not reached: the fastest plan found is 4.00 times as fast as in float" in said
    assert "the engine is in " in said
    assert record.latency_fallback is not None
    assert [check.groups for check in record.latency_fallback.checks] == [0]


@pytest.mark.nightly
def test_times_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = tiny_run(tmp_path)
    run["report"] |= {"formats": ["json"]}
    monkeypatch.setattr("quantizer.pipeline.stages.measure_memory", lambda *_: ())
    first = _run(run).latency_fallback
    assert len(list(Path("out.times").rglob("entry.json"))) in (1, 2)

    def measured(*_: Any) -> None:
        pytest.fail("the times were measured again")

    monkeypatch.setattr(Timing, "of_places", measured)
    second = _run(run).latency_fallback
    assert first is not None
    assert second is not None
    assert replace(second, float_groups=first.float_groups, predicted_ms=first.predicted_ms) == first
    Path("out.times/notes").touch()
    assert main(["run", "tiny.yaml", "--output", "out", "--force"]) == 1


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU engines are timed")
def test_a_run_for_a_gpu_that_is_not_here_has_no_times(asked: dict[str, Any]) -> None:
    pytest.importorskip("tensorrt_rtx_bindings", reason="needs enginequant[tensorrt-rtx]")
    asked["quantizer"] = {"backend": "tensorrt-rtx", "preset": "plain"}
    asked |= {"amp": {"batches": 1}, "fallback": {"num": 1}, "engine": {"compute_capability": "sm89"}}
    record = _run(asked)
    assert record.latency_fallback is None
    assert record.fallback is not None
    assert len(record.fallback.groups) == 1
