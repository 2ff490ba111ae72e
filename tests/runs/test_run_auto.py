"""A run for whatever is fastest: the backend is chosen after calibration, by the time of its engines."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

for _package in ("transformers", "sklearn", "onnx", "onnxscript", "openvino", "onnxruntime", "jinja2"):
    pytest.importorskip(_package, reason="a run needs enginequant[hf,onnx,openvino,onnxruntime,report]")

import onnx
from daily import some_daily
from helpers import read_json
from tiny_run import tiny_run

import quantizer.pipeline.benchmark as run_measure
import quantizer.pipeline.choose_engine as pick
import quantizer.pipeline.fastest_engine as rough_plan
import quantizer.pipeline.fastest_engine as run_variants
import quantizer.pipeline.stages
from quantizer import Quantizer
from quantizer.cli.main import main
from quantizer.config import dump_yaml, load_run
from quantizer.engines import BuildOptions, BuildResult, PeakMemory, for_this_cpu
from quantizer.engines.engine_file import read_engine
from quantizer.engines.for_this_cpu import Variant, cpu_candidates, cpu_variants
from quantizer.errors import EngineError
from quantizer.pipeline import load, stages
from quantizer.pipeline.time_groups import Timing
from quantizer.report import read_record
from quantizer.report.record import Candidate

OPENVINO, ONNXRUNTIME, TORCH = sorted(cpu_candidates()[0], key=lambda name: ("torch" in name, "onnx" in name))
TIMES = {f"{OPENVINO} float32": 4.0, f"{OPENVINO} int8": 3.0, f"{ONNXRUNTIME} float32": 5.0, f"{ONNXRUNTIME} int8": 2.0}

pytestmark = pytest.mark.usefixtures("exact_byte_products")


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    settings = tiny_run(tmp_path)
    settings["quantizer"].pop("backend", None)
    # A busy machine may need longer than the default for the engines of one backend.
    settings["engine"] = {"time_budget": None}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({**settings, "output": "done"}))
    monkeypatch.setattr(run_measure, "peak_memory_mib", lambda *_, **__: PeakMemory(peak_mib=3.0, baseline_mib=1.0))
    return tmp_path


def _taking(times: Mapping[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(calls: Mapping[str, Any], **_: int) -> dict[str, list[float]]:
        for call in calls.values():
            call()
        return {name: [times.get(name, 1.0)] for name in calls}

    def variants(*given: Any, **more: Any) -> tuple[Variant, ...]:
        # Each takes seconds to build: those that have a time.
        return tuple(variant for variant in cpu_variants(*given, **more) if variant.name in times)

    for module in (run_measure, rough_plan):
        monkeypatch.setattr(module, "interleaved_latency", taken)
    monkeypatch.setattr(run_variants, "cpu_variants", variants)


def test_the_run_goes_on_with_the_fastest(
    at: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load_run("tiny.yaml").quantizer.backend == "auto"
    _taking(TIMES, monkeypatch)
    assert main(["run", "tiny.yaml"]) == 0
    record = read_record(at / "done" / "report.json")
    assert [one.name for one in record.choice.candidates] == sorted(TIMES, key=lambda name: TIMES[name])
    assert all(one.sqnr_db for one in record.choice.candidates)
    chosen, *_, plain = record.choice.candidates
    # The outputs of a float engine say enough.
    assert plain.score_difference is None
    assert chosen.score_difference == record.scores[-1].difference
    # Outputs are compared at other sizes too, and further from float there.
    timed = next(one for one in record.outputs if f"{one.batch} x {one.sequence}" == record.choice.shapes[0])
    assert chosen.sqnr_db == pytest.approx(timed.sqnr_db)
    assert chosen.sqnr_db > min(one.sqnr_db for one in record.outputs if one.sqnr_db is not None)
    # The latencies of the report are those of the choice.
    assert record.latency is not None
    shown = {entry.name: entry.median_ms for entry in record.latency.engines}
    assert shown == {"engine": 2000, "float": 4000, f"{ONNXRUNTIME} float32": 5000}
    # The chosen engine was scored once, as the rows of the choice.
    assert [stage.name for stage in record.stages].count("score the float") == 1
    assert "score the engine" not in [stage.name for stage in record.stages]
    assert record.engine.backend == ONNXRUNTIME
    assert record.scores[-1].form == "engine"
    assert load_run("done/config.yaml").quantizer.backend == ONNXRUNTIME
    assert Quantizer.load("done/quantizer").config.backend == ONNXRUNTIME
    said = capsys.readouterr().out
    assert record.choice.headline in " ".join(said.split())
    assert said.splitlines()[-1] == f"deploy  {record.choice.deploy}"
    assert record.choice.headline.split(";")[0][1:] in (at / "done" / "report.html").read_text()


def test_float_wins_and_is_named_in_the_end(
    at: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _taking({f"{ONNXRUNTIME} float32": 1.0, f"{ONNXRUNTIME} int8": 2.0}, monkeypatch)

    def last(calls: Mapping[str, Any], **_: int) -> dict[str, list[float]]:
        known = {"float": 1.0, "engine": 2.0, f"{ONNXRUNTIME} float32": 1.0, f"{ONNXRUNTIME} int8": 2.0}
        return {name: [known[name]] for name in calls}

    monkeypatch.setattr(run_measure, "interleaved_latency", last)
    assert main(["run", "tiny.yaml"]) == 0
    said = capsys.readouterr().out
    record = read_record(at / "done" / "report.json")
    assert record.choice.headline.startswith(
        f"no INT8 engine is faster than float on this CPU, so {ONNXRUNTIME} float32 is delivered"
    )
    load = 'quantizer.load("FOLDER", float_engine=True)'
    assert record.choice.deploy == (
        f"float.engine; the quantized model.engine next to it has 0.50x its speed; load it with {load}"
    )
    assert " ".join(said.split()).endswith(f"deploy {record.choice.deploy}")
    assert eval(load.replace("FOLDER", str(at / "done")), {"quantizer": quantizer})
    assert "Deploy float.engine; the quantized" in (at / "done" / "report.html").read_text()
    assert (at / "done" / "float.engine").exists()
    assert (at / "done" / "model.engine").exists()


@pytest.mark.parametrize(("goal", "measured"), [("both", 0), pytest.param("latency", 1, marks=pytest.mark.nightly)])
def test_latency_costs_reuse_the_times_of_the_choice(
    goal: str, measured: int, at: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only those of the usual size, which the times of layers have too."""
    calls: list[object] = []

    def latencies(timing: Timing, paths: Mapping[str, Path]) -> dict[str, float]:
        calls.append(paths)
        return dict.fromkeys(paths, 50.0)

    monkeypatch.setattr(Timing, "latencies", latencies)
    # Costs of slow engines are not measured.
    _taking({name: TIMES[name] / 1000 for name in TIMES if name.startswith(ONNXRUNTIME)}, monkeypatch)
    assert main(["run", "tiny.yaml", f"engine.optimize_for={goal}"]) == 0
    costs = read_record(at / "done" / "report.json").latency_fallback
    assert costs is not None
    assert len(calls) == measured
    assert (costs.low_ms, costs.float_ms) == ((0.05, 0.05) if measured else (2, 5))


def test_a_float_engine_is_compared_while_the_plan_is_made(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came of it, here an error, counts at its turn."""
    _taking({f"{OPENVINO} float32": 4.0, f"{OPENVINO} int8": 3.0}, monkeypatch)
    compared, threads, in_float = threading.Event(), [], []
    check, make_proxy, build = pick.check_engine, pick._CandidateBuilder._proxy, pick.built_once

    def checked(*given: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        if len(threads) == 1:
            compared.set()
            raise EngineError("it computes something else")
        return check(*given)

    def planned(builder: Any, variant: Variant) -> Any:
        assert compared.wait(60)
        return make_proxy(builder, variant)

    def built(*given: Any, **more: Any) -> BuildResult:
        in_float.append(given[4])
        return build(*given, **more)

    # In tests, the build is here.
    monkeypatch.setattr(pick, "has_tried", lambda *_, **__: True)
    monkeypatch.setattr(pick, "check_engine", checked)
    monkeypatch.setattr(pick._CandidateBuilder, "_proxy", planned)
    monkeypatch.setattr(pick, "built_once", built)
    assert main(["run", "tiny.yaml"]) == 0
    assert threads[0] is False
    assert all(threads[1:])
    assert len(in_float) == len(set(in_float))
    verdicts = {one.name: one.verdict for one in read_record(at / "done" / "report.json").choice.candidates}
    assert verdicts == {f"{OPENVINO} int8": "chosen", f"{OPENVINO} float32": "failed: it computes something else"}


def test_only_float_is_right(at: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    built = pick.tried_build

    def crash(name: str, onnx: Path, engine: Path, *more: Any, **options: Any) -> BuildResult:
        if "int8" in engine.parent.name:
            raise EngineError("building it crashed")
        return built(name, onnx, engine, *more, **options)

    monkeypatch.setattr(pick, "tried_build", crash)
    _taking({name: TIMES[name] for name in TIMES if name.startswith(ONNXRUNTIME)}, monkeypatch)
    assert main(["run", "tiny.yaml"]) == 1
    said = capsys.readouterr().err
    assert "no quantized engine is correct and runs on this machine: " in said
    assert f"{ONNXRUNTIME} int8: failed: building it crashed" in said
    assert not (at / "done").exists()


@pytest.mark.nightly
def test_a_stopped_choice_goes_on(
    at: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built, names = pick.tried_build, []

    def stopped(name: str, onnx: Path, engine: Path, *more: Any, **options: Any) -> BuildResult:
        if len(names) == 2:
            raise KeyboardInterrupt
        names.append(engine.parent.name)
        return built(name, onnx, engine, *more, **options)

    monkeypatch.setattr(pick, "tried_build", stopped)
    _taking(TIMES, monkeypatch)
    assert main(["run", "tiny.yaml"]) == 130
    said = capsys.readouterr().err
    assert (
        f"the calibration, plans and engines are kept in {at / 'done.resume'}; run the same command again to resume"
        in said
    )
    first = list(names)
    # Two engines, and an ONNX file for each.
    assert len(list((at / "done.resume").glob("*/file"))) == 4

    def counted(name: str, onnx: Path, engine: Path, *more: Any, **options: Any) -> BuildResult:
        names.append(engine.parent.name)
        return built(name, onnx, engine, *more, **options)

    monkeypatch.setattr(pick, "tried_build", counted)
    assert main(["run", "tiny.yaml"]) == 0
    # None is built twice.
    assert len(names) == len(set(names)) == len(TIMES)
    assert names[:2] == first
    record = read_record(at / "done" / "report.json")
    assert {one.name for one in record.choice.candidates} == set(TIMES)
    assert record.choice.candidates[0].score_difference is not None
    assert not (at / "done.resume").exists()


def test_after_the_time_budget_no_other_backend_begins(
    at: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Too little time: what exists is delivered, with its INT8 engine, and the rest is said."""
    _taking(TIMES, monkeypatch)
    assert main(["run", "tiny.yaml", "engine.time_budget=0"]) == 0
    record = read_record(at / "done/report.json")
    assert record.choice is not None
    verdicts = {one.name: one.verdict for one in record.choice.candidates}
    assert verdicts[f"{OPENVINO} int8"] == "chosen"
    late = "not built: the time budget of 0 s was over"
    assert {name for name, verdict in verdicts.items() if verdict == late} == {
        f"{ONNXRUNTIME} float32",
        f"{ONNXRUNTIME} int8",
    }
    assert late in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("goal", "shapes", "chosen"),
    some_daily(
        [
            ("latency", ["1 x 16"], ONNXRUNTIME),
            ("throughput", ["2 x 16"], OPENVINO),
            ("both", ["2 x 16", "1 x 16"], None),
        ],
        1,
    ),
)
def test_engines_are_compared_at_the_sizes_of_the_goal(
    goal: str, shapes: list[str], chosen: str | None, at: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One backend is faster with one sample, and the other one with a batch."""
    _taking(TIMES, monkeypatch)

    def taken(calls: Mapping[str, Any], **_: int) -> dict[str, list[float]]:
        rows = {len(next(iter(call.args[0].values()))) for call in calls.values() if isinstance(call, partial)}
        faster = OPENVINO if rows == {2} else ONNXRUNTIME
        return {name: [TIMES[name] / (2 if name.startswith(faster) else 1)] for name in calls if name in TIMES} | {
            name: [1.0] for name in calls if name not in TIMES
        }

    for module in (run_measure, rough_plan):
        monkeypatch.setattr(module, "interleaved_latency", taken)
    assert main(["run", "tiny.yaml", f"engine.optimize_for={goal}"]) == 0
    record = read_record(at / "done/report.json")
    assert record.choice is not None
    assert record.latency is not None
    assert [*record.choice.shapes] == shapes
    # The table of speed has both sizes, whatever the goal is.
    assert {record.latency.batch, *(other.batch for other in record.other_latencies)} == {1, 2}
    assert record.latency.batch == int(shapes[0][0])
    if chosen is not None:
        assert record.choice.candidates[0].name == f"{chosen} int8"


@pytest.mark.parametrize(
    ("second", "long", "again", "rounds"),
    [(1.25, 1, {"a int8", "b int8"}, 70), (1.35, 1, {"a int8"}, 100), (1.35, 130, {"a int8"}, 8), (1.35, 400, None, 0)],
)
def test_slow_candidates_are_timed_in_few_rounds(
    second: float, long: float, again: set[str] | None, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rounds are for those that may win, and for the float engine that is delivered beside."""
    times = {"a float32": 2.0, "b float32": 3.1, "a int8": 1.0, "b int8": second, "c int8": 1.4}
    times = {name: long * time for name, time in times.items()}
    asked: list[tuple[int, set[str]]] = []

    def taken(calls: Mapping[str, Any], *, rounds: int, **_: float) -> dict[str, list[float]]:
        asked.append((rounds, {*calls}))
        return {name: [times[name] / 1000] for name in calls}

    monkeypatch.setattr(run_measure, "interleaved_latency", taken)
    correct = {}
    for name in times:
        backend, form = name.split()
        variant = Variant(backend=backend, dtype=None if form == "float32" else form)
        correct[name] = pick._Checked(variant, Candidate(backend=backend, format=form), {}, lambda _: {}, {})
    graphs: Any = SimpleNamespace(timed=lambda _: torch.nn.Identity())
    shapes = pick._time(correct, [], [{"x": torch.zeros(4, 3)}], 1, graphs, pick._Budget(None))
    assert shapes == ["batch 4"]
    # A round of a second needs no warmup. It is enough for "b float32", which takes three times as long as the best.
    first = [(1, {*times}), *([(3, {*times})] if long < 100 else []), (2, {*times} - {"b float32"})]
    # Short calls get more rounds, up to 0.3 s.
    assert asked == first + ([] if again is None else [(rounds, {*again, "a float32"})])
    assert {name: entry.candidate.milliseconds for name, entry in correct.items()} == {
        name: (time,) for name, time in times.items()
    }


@pytest.mark.parametrize(("threads", "shortest"), [(1, 50.0), (2, 100.0)])
def test_other_work_does_not_decide(threads: int, shortest: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The faster engine of one thread waits for another process in all rounds, which is no processor time."""
    turns = count()

    def taken(calls: Mapping[str, Any], *, rounds: int, clock: Any, **_: float) -> dict[str, list[float]]:
        waits = 0.0 if clock is time.process_time else 0.05
        every = {"a int8": [0.05 + waits + waits * (next(turns) % 2) for _ in range(rounds)], "b int8": [0.06] * rounds}
        return {name: every[name] for name in calls}

    monkeypatch.setattr(run_measure, "interleaved_latency", taken)
    correct = {
        name: pick._Checked(
            Variant(backend=name[0], dtype="int8"), Candidate(backend=name[0], format="int8"), {}, lambda _: {}, {}
        )
        for name in ("a int8", "b int8")
    }
    graphs: Any = SimpleNamespace(timed=lambda _: torch.nn.Identity())
    pick._time(correct, [], [{"x": torch.zeros(4, 3)}], threads, graphs, pick._Budget(None))
    found = {name: entry.candidate.milliseconds for name, entry in correct.items()}
    assert found == {"a int8": (shortest,), "b int8": (60.0,)}
    # The report has latencies, not processor time.
    assert min(correct["a int8"].times[0]) == 100.0


@pytest.mark.parametrize(("seconds", "timed"), [(None, 3), (0.0, 2), (60.0, 3)])
def test_after_the_time_budget_no_third_size_is_timed(
    seconds: float | None, timed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_measure, "interleaved_latency", lambda calls, **_: {name: [0.002] for name in calls})
    candidate = Candidate(backend="a", format="int8")
    correct = {"a int8": pick._Checked(Variant(backend="a", dtype="int8"), candidate, {}, lambda _: {}, {})}
    graphs: Any = SimpleNamespace(timed=lambda _: torch.nn.Identity())
    batches = [{"x": torch.zeros(rows, 3)} for rows in (4, 1, 9)]
    assert len(pick._time(correct, [], batches, 1, graphs, pick._Budget(seconds))) == timed
    assert len(correct["a int8"].candidate.milliseconds) == timed


@pytest.mark.parametrize(
    ("cores", "before", "among", "inside"),
    [(8, 8, (), 7), (8, 4, (), 4), (1, 1, (), 1), (8, 8, None, 8)],
    ids=["all cores", "the user set fewer", "one core", "no choice"],
)
def test_a_choice_leaves_one_core_to_the_builds(
    cores: int, before: int, among: tuple[str, ...] | None, inside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, set_to = before, list[int]()

    def take(count: int) -> None:
        nonlocal threads
        threads = count

    monkeypatch.setattr(stages.torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(stages.torch, "set_num_threads", take)
    monkeypatch.setattr(stages, "usable_cores", lambda: cores)
    monkeypatch.setattr(stages, "candidates_of", lambda *_: ((), ()))
    monkeypatch.setattr(stages, "trial_process", lambda _: nullcontext())
    one = stages.Stage(lambda _: set_to.append(threads), lambda _: iter(()))
    monkeypatch.setattr(stages, "TOGETHER", (one,))
    monkeypatch.setattr(stages, "ALONE", (one,))
    monkeypatch.setattr(stages, "report", lambda _: None)
    config = SimpleNamespace(quantize=True, quantizer=SimpleNamespace(backend="onnxruntime"))
    job: Any = SimpleNamespace(config=config, among=among)
    stages.carry_out(job)
    assert set_to == [inside, before]
    assert threads == before


def test_in_a_notebook_it_is_an_engine_for_this_cpu() -> None:
    assert Quantizer(backend="auto").config.backend == cpu_candidates()[0][0]


@pytest.mark.parametrize("written", [{"backend": [ONNXRUNTIME]}, {"backend": "auto", "candidates": [ONNXRUNTIME]}])
def test_a_list_narrows_the_choice(written: dict[str, Any], at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = yaml.safe_load(Path("tiny.yaml").read_text())
    settings["quantizer"].update(written)
    Path("tiny.yaml").write_text(yaml.safe_dump(settings))
    config = load_run("tiny.yaml")
    Path("again.yaml").write_text(dump_yaml(config))
    assert load_run("again.yaml") == config
    names: list[tuple[str, ...]] = []

    def picks(*asked: Any, **_: Any) -> None:
        names.append(asked[-1])
        raise EngineError("that is enough")

    monkeypatch.setattr(quantizer.pipeline.stages, "pick_backend", picks)
    assert main(["run", "tiny.yaml"]) == 1
    assert names == [(ONNXRUNTIME,)]
    assert cpu_candidates(names[0])[0] == (ONNXRUNTIME,)
    assert Quantizer("tiny.yaml").config.backend == ONNXRUNTIME


def test_nothing_is_installed(at: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(for_this_cpu, "find_spec", lambda _: None)
    monkeypatch.setattr(torch._C, "_has_mkldnn", False)
    assert main(["run", "tiny.yaml"]) == 1
    said = capsys.readouterr().err
    assert "no engine for a CPU is installed" in said
    assert "onnxruntime: pip install 'enginequant[onnxruntime]'" in said
    assert not (at / "done").exists()


@pytest.mark.nightly
def test_the_run_goes_on_with_the_ranges_that_won(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _taking(
        {f"{ONNXRUNTIME} float32": 3.0, f"{ONNXRUNTIME} int8": 2.0, f"{ONNXRUNTIME} int8 dynamic": 1.0}, monkeypatch
    )
    settings = yaml.safe_load(Path("tiny.yaml").read_text())
    settings |= {"amp": {}, "fallback": {"max_drop": 0.9}}
    settings["data"]["tuning"] = {"name": "text-csv", "path": str(at / "calibration.csv")}
    Path("tiny.yaml").write_text(yaml.safe_dump(settings))
    assert main(["run", "tiny.yaml"]) == 0
    record = read_record(at / "done" / "report.json")
    assert [one.format for one in record.choice.candidates] == ["int8 dynamic", "int8", "float32"]
    assert load_run("done/config.yaml").quantizer.activations.ranges == "dynamic"
    assert Quantizer.load("done/quantizer").config.activations.ranges == "dynamic"
    assert "DynamicQuantizeLinear" in {node.op_type for node in onnx.load("done/model.onnx").graph.node}
    settings["quantizer"]["activations"] = {"ranges": "static"}
    Path("tiny.yaml").write_text(yaml.safe_dump(settings))
    tried: list[bool] = []
    monkeypatch.setattr(run_variants, "cpu_variants", lambda *_, **named: tried.append(named["dynamic"]) or ())
    assert main(["run", "tiny.yaml", "output=again"]) == 1
    assert tried == [False]


@pytest.mark.parametrize(("taken", "plans"), some_daily([(1.11, False), (1.09, True)], 1))
def test_a_backend_that_is_far_slower_gets_no_plan(
    taken: float, plans: bool, at: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = {f"{OPENVINO} float32": 3.0, f"{OPENVINO} int8": 1.0, f"{ONNXRUNTIME} int8": taken}
    _taking(times, monkeypatch)
    made: list[str] = []
    for_backend = Quantizer.for_backend
    monkeypatch.setattr(
        Quantizer, "for_backend", lambda self, name, **more: made.append(name) or for_backend(self, name, **more)
    )
    assert (
        main(["run", "tiny.yaml", "quantizer.preset=balanced", f"quantizer.candidates=[{OPENVINO},{ONNXRUNTIME}]"]) == 0
    )
    assert made == ([ONNXRUNTIME] if plans else [])
    record = read_record(at / "done" / "report.json")
    verdicts = {one.name: one.verdict for one in record.choice.candidates}
    assert verdicts[f"{OPENVINO} int8"] == "chosen"
    why = f"not built: with max calibration it takes 1.11x the time of {OPENVINO} int8"
    assert verdicts[f"{ONNXRUNTIME} int8"] == ("1.09x the time" if plans else why)
    assert (why in " ".join(capsys.readouterr().out.split())) is not plans


@pytest.mark.nightly
def test_a_rough_plan_that_fails_says_nothing(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {f"{OPENVINO} int8": 2.0, f"{ONNXRUNTIME} int8": 9.0, f"{ONNXRUNTIME} int8 dynamic": 1.0}
    _taking(times, monkeypatch)
    built: list[str] = []
    build = pick.tried_build

    def fails(name: str, onnx: Path, engine: Path, *more: Any, **options: Any) -> BuildResult:
        built.append(engine.name)
        trials = [f"{ONNXRUNTIME}-{form}.engine" for form in ("borrowed", "rough")]
        if engine.name in trials or engine.parent.name == f"{ONNXRUNTIME}-int8":
            raise EngineError("building it crashed")
        return build(name, onnx, engine, *more, **options)

    monkeypatch.setattr(pick, "tried_build", fails)
    settings = ("quantizer.preset=balanced", f"quantizer.candidates=[{OPENVINO},{ONNXRUNTIME}]")
    assert main(["run", "tiny.yaml", *settings]) == 0
    record = read_record(at / "done" / "report.json")
    assert {one.name: one.verdict for one in record.choice.candidates} == {
        f"{ONNXRUNTIME} int8 dynamic": "chosen",
        f"{OPENVINO} int8": "2.00x the time",
        f"{ONNXRUNTIME} int8": "failed: building it crashed",
    }
    assert built.count(f"{ONNXRUNTIME}-rough.engine") == 1


@pytest.mark.parametrize("fails", [False, True])
def test_ranges_at_run_time_that_no_budget_asks_for(
    fails: bool, at: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = {f"{ONNXRUNTIME} float32": 3.0, f"{ONNXRUNTIME} int8": 2.0, f"{ONNXRUNTIME} int8 dynamic": 1.0}
    _taking(times, monkeypatch)
    load = pick.load_engine

    def loaded(name: str, path: Path, **options: Any) -> Any:
        if fails and path.parent.name == f"{ONNXRUNTIME}-int8":
            raise EngineError("the library gave up")
        return load(name, path, **options)

    monkeypatch.setattr(pick, "load_engine", loaded)
    assert main(["run", "tiny.yaml"]) == 0
    record = read_record(at / "done" / "report.json")
    verdicts = {one.format: one.verdict for one in record.choice.candidates}
    if fails:
        assert verdicts["int8 dynamic"] == "chosen"
        assert verdicts["int8"] == "failed: the library gave up"
    else:
        assert verdicts["int8"] == "chosen"
        assert verdicts["int8 dynamic"] == "not built: no faster than int8"
    assert verdicts["int8 dynamic"] in capsys.readouterr().out


def test_one_that_breaks_while_it_is_timed(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {f"{ONNXRUNTIME} float32": 1.8, f"{ONNXRUNTIME} int8": 1.2, f"{OPENVINO} float32": 1.0}
    _taking(times, monkeypatch)
    called = pick._called
    latency = pick.times_of

    def breaks(engines: Mapping[str, Any], **options: Any) -> Any:
        if f"{OPENVINO} float32" in engines:
            raise RuntimeError("the library gave up")
        return latency(engines, **options)

    def call(batch: Any, engine: Any) -> object:
        if engine.name == "openvino":
            raise RuntimeError("the library gave up")
        return called(batch, engine)

    monkeypatch.setattr(pick, "times_of", breaks)
    monkeypatch.setattr(pick, "_called", call)
    assert main(["run", "tiny.yaml"]) == 0
    record = read_record(at / "done" / "report.json")
    assert [(one.name, one.verdict) for one in record.choice.candidates] == [
        (f"{ONNXRUNTIME} int8", "chosen"),
        (f"{ONNXRUNTIME} float32", "1.50x the time"),
        (f"{OPENVINO} float32", "failed: the library gave up"),
    ]


@pytest.mark.skipif(not for_this_cpu._has_bf16(), reason="this CPU has no BF16")
@pytest.mark.nightly
def test_the_run_goes_on_with_the_rest_that_won(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forms = {"float32": 4.0, "bfloat16": 5.0, "int8": 2.0, "int8+bfloat16": 1.0}
    _taking({f"{OPENVINO} {form}": value for form, value in forms.items()}, monkeypatch)
    settings = yaml.safe_load(Path("tiny.yaml").read_text())
    # The engine of a plan with a fallback is built anew.
    settings |= {"amp": {}, "fallback": {"num": 1}}
    Path("tiny.yaml").write_text(yaml.safe_dump(settings))
    assert main(["run", "tiny.yaml"]) == 0
    record = read_record(at / "done" / "report.json")
    assert record.fallback is not None
    decibels = {one.format: one.sqnr_db for one in record.choice.candidates}
    assert 30 <= decibels["bfloat16"] < (decibels["float32"] or math.inf)
    assert load_run("done/config.yaml").engine.inference_precision == "bfloat16"
    # What groups cost in float is taken from an engine in the types of the other one's rest.
    for stem in ("model", "float"):
        assert read_engine(at / "done" / f"{stem}.engine")[1]["precision"] == "bfloat16"


# -- of a conversion ---------------------------------------------------------------------------------------------------


def _convert(at: Path, *backends: str) -> None:
    Path("settings.yaml").write_text("preset: plain\n")
    data = ("--quantization", "--calibration", f"text-csv:{at / 'calibration.csv'}", "--samples", "12")
    sizes = ("--batch-size", "1", "2", "4", "--seq-len", "16", "24", "32", "--config", "settings.yaml")
    sizes += ("--set", "engine.time_budget=null")
    assert main(["convert", "-m", "model", *data, *sizes, "-o", "out", "--backend", "auto", *backends]) == 0


def test_a_conversion_delivers_float_where_it_is_faster(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = pick.tried_build

    def tried(name: str, onnx: Path, engine: Path, *more: Any, **options: Any) -> BuildResult:
        if engine.parent.name == f"{OPENVINO}-int8":
            engine.write_bytes(b"half of an engine")
            raise EngineError("building it crashed")
        return build(name, onnx, engine, *more, **options)

    monkeypatch.setattr(pick, "tried_build", tried)
    _taking({**TIMES, f"{ONNXRUNTIME} int8": 8.0}, monkeypatch)
    _convert(at, OPENVINO, ONNXRUNTIME)
    (folder,) = (path for path in Path("out").iterdir() if path.is_dir())
    assert folder.name == OPENVINO
    choice = read_record(folder / "report.json").choice
    assert choice.headline.startswith(
        f"no INT8 engine is faster than float on this CPU, so {OPENVINO} float32 is delivered: {ONNXRUNTIME} int8 "
        f"takes 2.00x its time. This CPU ({choice.instructions})"
    )
    assert f"the time of {ONNXRUNTIME} int8 is spent " in choice.headline
    assert choice.shapes == ("2 x 24", "1 x 16", "4 x 32")
    assert choice.candidates[-1].verdict == "failed: building it crashed"
    config = read_json(folder / "config.json")
    assert (config["quantization"], config["chosen_on"]) == (None, choice.instructions)
    assert not list(folder.glob("float.*"))
    assert not load_run(folder / "config.yaml").quantize
    assert load.load_converted(folder)(["a good film", "dull"])["logits"].shape[0] == 2
    monkeypatch.setattr(load, "collect_machine", lambda: {"instructions": "neon"})
    with pytest.warns(UserWarning, match="was the fastest on a CPU with .* but this CPU has neon"):
        load.load_converted(folder)


@pytest.mark.parametrize(
    ("vnni", "named", "chosen"),
    some_daily([(True, False, ONNXRUNTIME), (True, True, TORCH), (False, False, TORCH)], 2),
)
def test_where_torch_was_never_faster_it_is_tried_if_it_is_named(
    vnni: bool, named: bool, chosen: str, at: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pick, "has_vnni", lambda: vnni)
    # Inductor takes half a minute; tests/engines/test_torch_engine.py is about what it compiles.
    monkeypatch.setattr("quantizer.engines.torch_engine.engine.missing_compiler", lambda: "no C++ compiler found")
    _taking({f"{ONNXRUNTIME} float32": 3.0, f"{ONNXRUNTIME} int8": 2.0, f"{TORCH} int8": 1.0}, monkeypatch)
    settings = [f"quantizer.candidates=[{ONNXRUNTIME},{TORCH}]"] if named else []
    assert main(["run", "tiny.yaml", *settings]) == 0
    verdicts = {one.name: one.verdict for one in read_record(at / "done" / "report.json").choice.candidates}
    assert verdicts[f"{chosen} int8"] == "chosen"
    if chosen != TORCH:
        why = "with VNNI, it was slower in all our benchmarks; name it to compare it"
        assert verdicts[f"{TORCH} int8"] == f"not built: {why}"


@pytest.mark.nightly
def test_torch_competes_on_its_eager_road(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roads: dict[str, bool | None] = {}
    built = pick.tried_build

    def tried(name: str, onnx: Path, engine: Path, options: BuildOptions, **more: Any) -> BuildResult:
        roads[engine.parent.name] = options.compiled
        return built(name, onnx, engine, options, **more)

    monkeypatch.setattr(pick, "tried_build", tried)
    _taking({f"{TORCH} float32": 5.0, f"{TORCH} int8": 2.0}, monkeypatch)
    _convert(at)
    assert set(roads.values()) == {False}
    assert read_json(Path(f"out/{TORCH}/config.json"))["backend"] == TORCH
    assert load.load_converted(f"out/{TORCH}")(["a good film"])["logits"].shape[0] == 1
