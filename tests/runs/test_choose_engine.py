"""The choice between engines: by time over all shapes, with a reason for each that lost."""

from __future__ import annotations

import pytest
from rich.console import Console

from quantizer.engines import Inspection
from quantizer.engines import PrecisionShare
from quantizer.errors import EngineError
from quantizer.report.candidate_record import Candidate
from quantizer.report.tables.choice_table import print_choice
from quantizer.runs import choose_engine
from quantizer.runs.choose_engine import bound
from quantizer.runs.choose_engine import choose

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
    assert choice.headline == "a int8 is the fastest, 2.00x as fast as the fastest engine in float, a float32"
    assert choice.shapes == SHAPES


def test_float_alone() -> None:
    assert choose([A_FLOAT], SHAPES, ()).headline == "a float32 is the fastest"
    assert choose([A_INT8], SHAPES, ()).headline == "a int8 is the fastest"


@pytest.mark.parametrize("saturates", [True, False])
def test_what_bounds_int8(saturates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_engine, "saturates", lambda: saturates)
    slow = _candidate("a", "int8", 8.0, 32.0)
    choice = choose([slow, A_FLOAT], SHAPES, ())
    assert choice.headline == (
        "nothing in INT8 is faster than float here, and a float32 is delivered: a int8 takes 2.00x its time"
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


def test_nothing_is_left_to_choose() -> None:
    with pytest.raises(EngineError, match="no engine is right and runs here: b float32: failed: it crashed"):
        choose([BROKEN], SHAPES, ())


def test_the_table_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    choice = choose([BROKEN, B_INT8, A_FLOAT, A_INT8], SHAPES, ("c: pip install 'quantizer[c]'",))
    print_choice(choice, Console(width=80))
    said = capsys.readouterr().out
    assert said.startswith(choice.headline)
    assert "not tried, as it is not installed: c: pip install 'quantizer[c]'" in said
    lines = said.splitlines()
    assert all(any(one.name in line and one.verdict in line for line in lines) for one in choice.candidates)
