"""The choice between engines: by time over all shapes, with a reason for each that lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from quantizer.engines import Inspection, PrecisionShare
from quantizer.engines.measure import is_disturbed, shortest
from quantizer.errors import EngineError
from quantizer.pipeline import fastest_engine as choose_engine
from quantizer.pipeline.benchmark import with_deployed
from quantizer.pipeline.fastest_engine import bound, choose, has_float_work, require_sites, slow_ones, timed
from quantizer.report.record import Candidate, Latency, latency_entries
from quantizer.report.terminal import print_choice
from quantizer.utils import cpu

SHAPES = ("1 x 16", "8 x 128")


def _candidate(backend: str, form: str, *milliseconds: float, verdict: str = "") -> Candidate:
    return Candidate(backend=backend, format=form, milliseconds=milliseconds, verdict=verdict, sqnr_db=20.0)


A_INT8 = _candidate("a", "int8", 2.0, 8.0)
A_FLOAT = _candidate("a", "float32", 4.0, 16.0)
B_INT8 = _candidate("b", "int8", 1.0, 36.0)
BROKEN = _candidate("b", "float32", verdict="failed: it crashed")


def test_the_mean_of_ratios_decides() -> None:
    choice = choose([BROKEN, B_INT8, A_FLOAT, A_INT8], SHAPES, ())
    assert [(one.name, one.verdict) for one in choice.candidates] == [
        ("a int8", "chosen"),
        ("b int8", "1.50x the time"),
        ("a float32", "2.00x the time"),
        ("b float32", "failed: it crashed"),
    ]
    assert choice.headline == "a int8 is the fastest; in float it is a float32"
    assert choice.shapes == SHAPES


@pytest.mark.parametrize(
    ("time", "names", "headline"),
    [
        (9.8, ["a int8", "b int8", "a float32"], "a int8 is as fast as any; in float it is a float32"),
        (9.6, ["b int8", "a int8", "a float32"], "b int8 is the fastest; in float it is a float32"),
    ],
)
def test_noise_does_not_choose(time: float, names: list[str], headline: str) -> None:
    tried = [_candidate("a", "float32", 20.0), _candidate("a", "int8", 10.0), _candidate("b", "int8", time)]
    choice = choose(tried, ["8 x 128"], ())
    assert [one.name for one in choice.candidates] == names
    assert choice.headline == headline
    assert choice.candidates[1].verdict == ("0.98x the time" if time == 9.8 else "1.04x the time")


@pytest.mark.parametrize(
    ("times", "names"),
    [
        # By time; the first of each kind that are next to each other comes first.
        ({"a float32": 10.2, "a int8": 10.1, "b float32": 10.0}, ["b float32", "a int8", "a float32"]),
        ({"a int8": 10.0, "b int8": 9.8, "a float32": 9.9}, ["a float32", "b int8", "a int8"]),
        ({"a int8": 10.0, "b int8": 9.8, "a float32": 10.2}, ["a int8", "b int8", "a float32"]),
        (
            {"a float32": 4.0, "b int8": 12.0, "c int8": 11.9, "a int8": 13.0},
            ["a float32", "b int8", "c int8", "a int8"],
        ),
        ({"a float32": 4.1, "b float32": 4.0, "b int8": 5.0}, ["a float32", "b float32", "b int8"]),
    ],
    ids=str,
)
def test_only_engines_of_a_kind_are_tied(times: dict[str, float], names: list[str]) -> None:
    tried = [_candidate(*name.split(), time) for name, time in times.items()]
    choice = choose(tried, ["8 x 128"], ())
    assert [one.name for one in choice.candidates] == names


def test_another_format_is_another_choice() -> None:
    """An engine in float that is as fast as one in INT8 loses no accuracy."""
    tried = [_candidate("a", "int8", 10.0), _candidate("a", "float32", 10.2)]
    choice = choose(tried, ["8 x 128"], ())
    assert choice.candidates[0].name == "a float32"
    assert "no INT8 engine is clearly faster than float" in choice.headline
    assert "a int8 takes 0.98x its time" in choice.headline


@pytest.mark.parametrize(("time", "first"), [(9.6, "int8"), (9.4, "int8+bfloat16")])
def test_a_rest_in_bfloat16_must_gain_5_percent(time: float, first: str) -> None:
    tried = [_candidate("a", "int8", 10.0), _candidate("a", "int8+bfloat16", time), _candidate("a", "float32", 30.0)]
    assert choose(tried, ["8 x 128"], ()).candidates[0].format == first


@pytest.mark.parametrize(("time", "first"), [(9.1, "int8+bfloat16"), (10.9, "int8+bfloat16"), (11.1, "int8")])
def test_multiply_adds_in_float_run_in_bfloat16_unless_it_is_slower(time: float, first: str) -> None:
    tried = [_candidate("a", "int8", 10.0), _candidate("a", "int8+bfloat16", time), _candidate("a", "float32", 30.0)]
    assert choose(tried, ["8 x 128"], (), {"a"}).candidates[0].format == first


def test_float_work_of_a_backend_without_bfloat16_changes_nothing() -> None:
    tried = [_candidate("b", "int8", 9.9), _candidate("a", "int8", 10.0), _candidate("a", "int8+bfloat16", 10.1)]
    assert choose(tried, ["8 x 128"], (), {"b"}).candidates[0].name == "b int8"
    assert choose(tried[1:], ["8 x 128"], (), {"a"}).candidates[0].name == "a int8+bfloat16"


@pytest.mark.parametrize(("share", "expected"), [(1.0, False), (0.9995, False), (0.99, True), (None, False)])
def test_float_work_is_the_share_that_is_not_quantized(share: float | None, expected: bool) -> None:
    quantizer: Any = SimpleNamespace(coverage=SimpleNamespace(share=share))
    assert has_float_work(quantizer) is expected


def test_some_rounds_with_other_work_decide_nothing() -> None:
    """Of two engines, one had a busy neighbor in more than half of its rounds."""
    quiet, busy = [2.0, 2.1, 2.0, 2.2, 2.1, 2.0, 2.1], [3.0, 1.9, 2.9, 3.1, 2.9, 2.8]
    assert shortest({"a": quiet, "b": busy, "one": [4.0]}) == {"a": 2.0, "b": 1.9, "one": 4.0}
    assert not is_disturbed({"a": quiet, "one": [4.0]})
    assert is_disturbed({"a": quiet, "b": busy})


def test_those_that_are_too_slow_are_not_timed_to_the_end() -> None:
    quick, slow = _candidate("c", "int8", 1.0), _candidate("c", "int8 dynamic", 1.5)
    plain, slow_plain = _candidate("c", "float32", 4.0), _candidate("c", "bfloat16", 6.1)
    assert slow_ones([quick, slow, plain, slow_plain, BROKEN]) == {"c int8 dynamic", "c float32", "c bfloat16"}
    # Quantized engines are compared with each other too, because one of them is delivered with a fallback.
    assert slow_ones([plain, slow_plain, _candidate("c", "int8", 8.0), BROKEN]) == {"c bfloat16"}
    whole = [_candidate("c", "int8", 1.0, 10.0), _candidate("c", "float32", 4.0, 40.0)]
    choice = choose([slow_plain, slow, *whole, BROKEN], SHAPES, ())
    assert [(one.name, one.verdict) for one in choice.candidates] == [
        ("c int8", "chosen"),
        ("c float32", "4.00x the time"),
        ("c int8 dynamic", "1.50x the time at 1 x 16: too slow to continue"),
        ("c bfloat16", "6.10x the time at 1 x 16: too slow to continue"),
        ("b float32", "failed: it crashed"),
    ]


def test_bf16_is_an_engine_in_float() -> None:
    best, plain = _candidate("a", "bfloat16", 1.0, 1.0), _candidate("a", "float32", 2.0, 2.0)
    lost = choose([best, plain, _candidate("a", "int8+bfloat16", 3.0, 3.0)], SHAPES, ())
    assert lost.headline == (
        "no INT8 engine is faster than float on this CPU, so a bfloat16 is delivered: a int8+bfloat16 takes 3.00x "
        "its time"
    )
    won = choose([best, plain, _candidate("a", "int8+bfloat16", 0.5, 0.5)], SHAPES, ())
    assert won.headline.endswith("in float it is a bfloat16")


class _Runs:
    """An engine, or one that breaks with an error of its library."""

    def __init__(self, broken: bool) -> None:
        self.broken = broken

    def __call__(self) -> None:
        if self.broken:
            raise RuntimeError("the library gave up")


def test_one_that_breaks_while_it_is_timed() -> None:
    def time(engines: dict[str, Any]) -> list[str]:
        for engine in engines.values():
            engine()
        return list(engines)

    engines: dict[str, Any] = {"a": _Runs(broken=False), "b": _Runs(broken=True), "c": _Runs(broken=False)}
    assert timed(engines, time, lambda engine: engine()) == (["a", "c"], {"b": "the library gave up"})
    assert timed({"a": engines["a"]}, time, lambda engine: engine()) == (["a"], {})
    with pytest.raises(RuntimeError, match="the library gave up"):
        # Nobody is to blame who runs alone.
        timed({"b": engines["b"]}, time, lambda engine: None)


def test_float_alone() -> None:
    assert choose([A_FLOAT], SHAPES, ()).headline == "a float32 is the fastest"
    assert choose([A_INT8], SHAPES, ()).headline == "a int8 is the fastest"


@pytest.mark.parametrize("saturates", [True, False])
def test_what_bounds_int8(saturates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_engine, "saturates", lambda: saturates)
    slow = _candidate("a", "int8", 8.0, 32.0)
    choice = choose([slow, A_FLOAT], SHAPES, ())
    assert choice.headline == (
        "no INT8 engine is faster than float on this CPU, so a float32 is delivered: a int8 takes 2.00x its time"
    )
    asked = []

    def inspect(candidate: Candidate) -> Inspection:
        asked.append(candidate.name)
        share = PrecisionShare(precision="int8", layers=1, products=1, layer_share=1.0, time_share=0.25)
        return Inspection(backend="a", verified=True, note="", shares=(share,))

    told = bound(choice, inspect).headline
    assert told.startswith(f"{choice.headline}. This CPU (")
    assert told.endswith("the time of a int8 is spent 25.0% in int8")
    assert ("has no VNNI" in told) is saturates
    assert asked == ["a int8"]
    quick = choose([A_INT8, A_FLOAT], SHAPES, ())
    assert bound(quick, inspect) is quick

    def broken(candidate: Candidate) -> Inspection:
        raise RuntimeError(f"the profiler lost {candidate.name}")

    without = bound(choice, broken).headline
    assert without == told.partition("; the time of")[0]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"sse4_2", "avx"}, ") has no instructions for INT8: neither AVX2 nor VNNI"),
        ({"avx2"}, ") has no VNNI, and needs several instructions for INT8"),
        ({"avx2", "avx_vnni"}, ") has VNNI"),
        ({"asimddp"}, ")"),
        (set(), ")"),
    ],
)
def test_the_instructions_that_bound_int8(flags: set[str], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (choose_engine, cpu):
        monkeypatch.setattr(module, "cpu_flags", lambda: flags)
    choice = choose([_candidate("a", "int8", 8.0, 32.0), A_FLOAT], SHAPES, ())
    assert bound(choice, lambda _: Inspection(backend="a", verified=True, note="")).headline.endswith(told)


def test_nothing_is_left_to_choose() -> None:
    with pytest.raises(
        EngineError, match="no engine is correct and runs on this machine: b float32: failed: it crashed"
    ):
        choose([BROKEN], SHAPES, ())


def test_a_long_reason_leaves_the_times_in_sight(capsys: pytest.CaptureFixture[str]) -> None:
    shapes = ("1 x 16", "8 x 128", "32 x 512")
    path = "/a/long/way/" + "to/" * 30 + "model.engine"
    tried = [
        Candidate(backend="onnxruntime", format="int8 dynamic", milliseconds=(1.56, 49.38, 1402.87), sqnr_db=26.1),
        Candidate(backend="openvino", format="int8+bfloat16", milliseconds=(9.75, 99.25), score_difference=-0.0011),
        Candidate(backend="openvino", format="int8", verdict=f"failed: {path} is damaged"),
    ]
    print_choice(choose(tried, shapes, ()), Console(width=80))
    said = capsys.readouterr().out
    table, _, below = said.partition(" failed ")
    for shown in ("1.56", "49.38", "1402.87", "9.75", "99.25", "-0.0011", "chosen"):
        assert shown in table
    assert f"openvino int8: failed: {path} is damaged" in below
    assert "openvino int8+bfloat16: 3.54x the time at 1 x 16 and 8 x 128: too slow to continue" in below


@pytest.mark.parametrize(
    ("reference", "milliseconds", "deploy"),
    [
        ("a float32", {"float": 2.0, "engine": 1.0}, "model.engine, 2.00x as fast as float.engine next to it"),
        (
            "b float32",
            {"float": 1.5, "engine": 1.0, "a float32": 2.0},
            "model.engine, 1.50x as fast as the float engine b float32",
        ),
        # Of the files of the run, the float engine is the faster one, whatever another backend does.
        (
            "b float32",
            {"float": 1.0, "engine": 2.0, "a float32": 1.5, "PyTorch float": 9.0},
            "float.engine; the quantized model.engine next to it has 0.75x its speed",
        ),
    ],
)
def test_of_the_files_of_a_run_the_faster_is_deployed(
    reference: str, milliseconds: dict[str, float], deploy: str
) -> None:
    entries = latency_entries({name: [time] for name, time in milliseconds.items()})
    latency = Latency(batch=8, sequence=None, threads=1, reference=reference, engines=entries)
    chosen = with_deployed(choose([A_INT8, A_FLOAT], SHAPES, ()), latency, "a")
    assert chosen is not None
    assert chosen.deploy == deploy


def test_a_plan_without_sites_is_no_candidate() -> None:
    class Nothing:
        coverage = SimpleNamespace(share=0.0)

    quantizer: Any = Nothing()
    with pytest.raises(EngineError, match="no operation of this model can be quantized in this way"):
        require_sites(quantizer)
    quantizer.coverage = SimpleNamespace(share=0.4)
    require_sites(quantizer)


def test_the_table_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    choice = choose([BROKEN, B_INT8, A_FLOAT, A_INT8], SHAPES, ("c: pip install 'enginequant[c]'",))
    print_choice(choice, Console(width=80))
    said = capsys.readouterr().out
    assert said.startswith(choice.headline)
    assert "not tried, because it is not installed: c: pip install 'enginequant[c]'" in said
    lines = said.splitlines()
    assert all(any(one.name in line and one.verdict in line for line in lines) for one in choice.candidates)


def test_candidates_with_one_reason_share_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    late = "not built: the time budget of 60 s was over"
    tried = [A_INT8, *(_candidate("b", name, verdict=late) for name in ("float32", "int8"))]
    print_choice(choose(tried, SHAPES, ()), Console(width=80))
    (line,) = [one for one in capsys.readouterr().out.splitlines() if late in one]
    assert line == f"{tried[1].name}, {tried[2].name}: {late}"
