"""The verdict on a run, its headline, and the spread of its latencies."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_samples import bare_record, sample_record
from rich.console import Console

from quantizer.report import (
    EngineFile,
    FallbackRecord,
    Latency,
    RunRecord,
    Score,
    Site,
    html_from_record,
    latency_entries,
)
from quantizer.report.model_card import write_run_card
from quantizer.report.record import (
    LatencyFallback,
    OutputDistance,
    SpeedCheck,
    mapping_from_record,
    record_from_mapping,
)
from quantizer.report.terminal import diagnosis_lines, print_record
from quantizer.report.text import noise_sentence, spread_words
from quantizer.report.verdict import verdict, verdict_of
from quantizer.utils.records import BudgetOutcome, Diagnosis, Fix, GroupTime, Inspection, PrecisionShare

ENGINE = EngineFile(backend="openvino", path="model.engine", build_seconds=1.0, verified="ran here")


def _latency(**milliseconds: float) -> Latency:
    entries = latency_entries({name: [value] for name, value in milliseconds.items()})
    return Latency(batch=8, sequence=None, threads=1, reference="openvino float32", engines=entries)


def _output(**changes: Any) -> OutputDistance:
    values: Mapping[str, Any] = {
        "output": "logits",
        "batch": 8,
        "sqnr_db": 25.0,
        "cosine": 0.998,
        "proxy_sqnr_db": 25.0,
        "engine_to_proxy_db": 31.0,
        "engine": True,
    }
    return OutputDistance(**{**values, **changes})


FAST = {"engine": ENGINE, "latency": _latency(float=4.0, engine=2.0)}


@pytest.mark.parametrize(
    ("difference", "interval", "higher", "level", "said"),
    [
        (-0.004, (-0.006, 0.001), True, "usable", "accuracy 0.7960, -0.0040 against float (0.500% lost)"),
        (-0.004, (-0.020, 0.010), True, "usable", "the 95% interval includes a loss of 2.50%"),
        (+0.004, None, True, "usable", "accuracy 0.8040, +0.0040 against float"),
        (-0.016, None, True, "check", "(2.00% lost)"),
        (-0.040, None, True, "do not use", "(5.00% lost)"),
        (
            -0.040,
            (-0.090, 0.010),
            True,
            "check",
            "not significant: the 95% interval includes 0; evaluate on more samples",
        ),
        (+0.040, None, False, "do not use", "(5.00% lost)"),
        (-0.040, None, False, "usable", "-0.0400 against float"),
    ],
)
def test_on_the_score(
    difference: float, interval: tuple[float, float] | None, higher: bool, level: str, said: str
) -> None:
    plain = Score(form="float", value=0.8, metric="accuracy", higher_is_better=higher)
    engine = Score(
        form="engine",
        value=0.8 + difference,
        metric="accuracy",
        difference=difference,
        interval=interval,
        higher_is_better=higher,
    )
    verdict = verdict_of(
        bare_record(scores=(plain, engine), outputs=(_output(sqnr_db=3.0, proxy_sqnr_db=3.0),), **FAST)
    )
    assert verdict.level == level
    assert said in verdict.reasons[0]
    assert "2.00x as fast as the float engine (openvino float32)" in verdict.reasons


@pytest.mark.parametrize(
    ("decibels", "level"), [(20.0, "usable"), (19.9, "check"), (10.0, "check"), (9.9, "do not use")]
)
def test_on_the_worst_output_without_a_score(decibels: float, level: str) -> None:
    outputs = (_output(), _output(output="pooled", sqnr_db=decibels, proxy_sqnr_db=decibels))
    verdict = verdict_of(bare_record(outputs=outputs, **FAST))
    assert verdict.level == level
    assert f"SQNR of the output pooled {decibels:.1f} dB, cosine 0.9980" in str(verdict)


def test_an_output_without_a_difference() -> None:
    assert verdict_of(bare_record(outputs=(_output(sqnr_db=None),), **FAST)).level == "usable"


@pytest.mark.parametrize(
    ("verdict", "evaluation", "level", "said"),
    [
        (
            "not met",
            0.04,
            "do not use",
            "max_drop 0.02 is not met: the engine drops by 0.0400 on the evaluation samples",
        ),
        (
            "not met",
            None,
            "do not use",
            "max_drop 0.02 is not met: the best plan drops by 0.0300 on the tuning samples",
        ),
        ("not met, within noise", 0.03, "check", "not met, within noise: the engine drops by 0.0300"),
        ("met, within noise", 0.01, "usable", None),
        ("met", 0.01, "usable", None),
    ],
)
def test_a_missed_budget_comes_first(
    verdict: str, evaluation: float | None, level: str, said: str | None, tmp_path: Path
) -> None:
    outcome = BudgetOutcome(max_drop=0.02, tuning_drop=0.03, form="engine", evaluation_drop=evaluation, verdict=verdict)
    record = bare_record(outputs=(_output(),), fallback=FallbackRecord(groups=(), reason="r", outcome=outcome), **FAST)
    found = verdict_of(record)
    assert found.level == level
    write_run_card(record, tmp_path)
    card, page = (tmp_path / "README.md").read_text(encoding="utf-8"), html_from_record(record)
    first_figure, head = card.index("## Measured"), page[: page.index('class="tiles"')]
    if said is None:
        assert "budget" not in str(found) + card[:first_figure]
        return
    assert said in found.reasons[0]
    assert said in head
    assert said in card[:first_figure]


def test_a_speed_that_was_not_reached_comes_first() -> None:
    times = {"conditions": "here", "low_ms": 1.0, "float_ms": 2.0, "predicted_ms": 1.0, "float_groups": 0}
    check = SpeedCheck(groups=0, speedup=2.0)
    latency_fallback = LatencyFallback(**times, groups=(), min_speedup=3.0, checks=(check,))  # type: ignore[arg-type]
    found = verdict_of(bare_record(outputs=(_output(),), latency_fallback=latency_fallback, **FAST))
    assert found.level == "do not use"
    assert found.reasons[0] == "the speed min_speedup 3.00x is not reached: the engine has 2.00x"


def test_nothing_to_judge_by() -> None:
    verdict = verdict_of(bare_record())
    assert verdict.level == "check"
    assert verdict.reasons == ("neither a score nor outputs were compared with the float model",)


def test_nothing_is_quantized() -> None:
    site = Site(name="a", kind="linear", host_type="Linear", file="a.py", line=1, quantized=False, reason="excluded")
    verdict = verdict_of(bare_record(coverage=(site,), outputs=(_output(),), **FAST))
    assert str(verdict) == "do not use: nothing is quantized"


def test_without_a_score_the_worst_shape_is_judged() -> None:
    usual, large = _output(sqnr_db=30.0, batch=8, sequence=128), _output(sqnr_db=17.0, batch=32, sequence=512)
    verdict = verdict_of(bare_record(outputs=(usual, large), **FAST))
    assert verdict.level == "check"
    assert "SQNR of the output at 32 x 512 17.0 dB" in str(verdict)


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("openvino bfloat16", "2.00x as fast as the float engine (openvino bfloat16)"),
        ("PyTorch float", "2.00x as fast as the model in PyTorch, in float"),
    ],
)
def test_a_speed_up_names_what_it_is_relative_to(reference: str, words: str) -> None:
    latency = replace(_latency(float=2.0, engine=1.0), reference=reference)
    assert words in verdict_of(bare_record(outputs=(_output(),), engine=ENGINE, latency=latency)).reasons


def test_a_conversion_has_no_float_engine_to_deploy() -> None:
    record = bare_record(
        outputs=(_output(),), engine=ENGINE, latency=_latency(float=2.0, engine=4.0), config={"model": {"source": "m"}}
    )
    assert (
        verdict_of(record).reasons[0].endswith("as the float engine (openvino float32); convert without --quantization")
    )


def test_an_engine_that_is_no_faster() -> None:
    record = bare_record(outputs=(_output(),), engine=ENGINE, latency=_latency(float=2.0, engine=4.0))
    verdict = verdict_of(record)
    assert verdict.level == "check"
    assert (
        "the quantized engine is not faster: 0.50x as fast as the float engine (openvino float32); "
        'deploy float.engine, which quantizer.load("FOLDER", float_engine=True) loads' in verdict.reasons[0]
    )


@pytest.mark.parametrize(("milliseconds", "level"), [(1.98, "check"), (2.02, "check"), (1.9, "usable")])
def test_a_difference_within_noise_is_no_gain(milliseconds: float, level: str) -> None:
    record = bare_record(outputs=(_output(),), engine=ENGINE, latency=_latency(float=2.0, engine=milliseconds))
    verdict = verdict_of(record)
    assert verdict.level == level
    assert ("is not faster beyond noise" in str(verdict)) == (level == "check")


@pytest.mark.parametrize(("apart", "level"), [(22.0, "check"), (9.9, "do not use"), (-1.3, "do not use")])
def test_an_engine_that_is_not_its_proxy(apart: float, level: str) -> None:
    verdict = verdict_of(bare_record(outputs=(_output(sqnr_db=21.0, engine_to_proxy_db=apart),), **FAST))
    assert verdict.level == level
    said = f"SQNR of the engine's output logits against the quantized model in PyTorch is {apart} dB"
    assert said in verdict.reasons[0].replace("\N{MINUS SIGN}", "-")


def test_an_engine_that_did_not_run() -> None:
    verdict = verdict_of(bare_record(outputs=(_output(engine=False),), engine=ENGINE))
    assert verdict.level == "check"
    assert "the engine was built but cannot run on this machine" in verdict.reasons[0]


@pytest.mark.parametrize(
    ("taken", "said"),
    [
        (30.0, "latency cost 20 us per batch"),
        (10.0, "latency cost within noise"),
        (5.0, "latency cost within noise"),
    ],
)
def test_a_cure_says_what_it_costs(taken: float, said: str) -> None:
    latency_fallback = LatencyFallback(
        conditions="openvino",
        low_ms=1.0,
        float_ms=2.0,
        predicted_ms=1.0,
        float_groups=0,
        groups=(GroupTime(group="head", low_us=10.0, float_us=taken),),
    )
    leave = Fix(setting="exclude: {sites: [head]}", gain_db=2.0, gain_alone_db=float("inf"))
    (line,) = diagnosis_lines([Diagnosis(group="head", sqnr_db=20.0, fix=leave)], latency_fallback)
    assert said in line
    assert "batch" not in diagnosis_lines([Diagnosis(group="head", sqnr_db=20.0, fix=leave)])[0]


def test_float_products_and_a_wrong_float_engine_are_told() -> None:
    share = PrecisionShare(
        precision="fp32", layers=2, products=2, layer_share=1.0, multiply_add_share=1.0, time_share=1.0
    )
    inspection = Inspection(backend="onnxruntime", verified=True, note="", shares=(share,))
    slow = {"engine": ENGINE, "latency": _latency(float=2.0, engine=4.0), "outputs": (_output(),)}
    record = bare_record(covered_share=0.9, inspection=inspection, **slow)
    verdict = verdict_of(record)
    assert verdict.level == "check"
    assert any(one.startswith("onnxruntime runs 0% of the multiply-adds in low precision") for one in verdict.reasons)
    assert any("deploy float.engine" in one for one in verdict.reasons)
    # What is wrong itself is not advised, and of two wrong engines none is.
    verdict = verdict_of(replace(record, float_engine_db=1.8))
    assert not any("deploy float.engine" in one for one in verdict.reasons)
    assert any(
        "SQNR of the float engine against the model in PyTorch is 1.8 dB: do not deploy it" in one
        for one in verdict.reasons
    )
    both = replace(record, float_engine_db=1.8, outputs=(_output(sqnr_db=1.8, engine_to_proxy_db=1.8),))
    verdict = verdict_of(both)
    assert verdict.level == "do not use"
    assert any("no engine of this backend is correct" in one for one in verdict.reasons)


QUIET = [10.0, 10.1, 9.9, 10.2, 9.8]


def _spread(engine: list[float], plain: list[float] = [30.0, 30.3, 29.7, 30.1]) -> Latency:  # noqa: B006
    return Latency(
        batch=8,
        sequence=None,
        threads=1,
        reference="openvino float32",
        engines=latency_entries({"float": plain, "engine": engine}),
    )


def _printed(record: RunRecord, folder: Path) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_record(record, folder, console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_quartiles_are_those_of_the_times() -> None:
    (entry,) = latency_entries({"float": [1.0, 2.0, 3.0, 4.0, 5.0]})
    assert entry.quartiles_ms == (2.0, 4.0)
    assert spread_words(entry) == "2.00 to 4.00 ms"
    (few,) = latency_entries({"float": [1.0, 2.0, 3.0]})
    assert few.quartiles_ms is None
    assert spread_words(few) == "1.00 to 3.00 ms"


def test_one_slow_call_is_no_noise() -> None:
    assert noise_sentence(_spread([*QUIET, 99.0])) == ""
    assert noise_sentence(None) == ""


@pytest.mark.parametrize("name", ["engine", "float"])
def test_a_wide_middle_half_is_called_noisy(name: str, tmp_path: Path) -> None:
    wild = [10.0, 8.0, 12.0, 10.0, 8.0, 12.0]
    latency = _spread(wild) if name == "engine" else _spread(QUIET, wild)
    said = noise_sentence(latency)
    assert said.startswith(
        f"The timing is noisy: the middle half of the latencies of {name} spans 30.0% of the median ("
    )
    record = bare_record(latency=latency)
    assert said in verdict(record)
    assert said in _printed(record, tmp_path)


def test_a_quiet_measurement_says_nothing_and_shows_its_spread(tmp_path: Path) -> None:
    pytest.importorskip("jinja2", reason="needs enginequant[report]")
    record = replace(sample_record(), latency=_spread(QUIET))
    assert "noisy" not in verdict(record)
    assert "noisy" not in _printed(record, tmp_path)
    page = html_from_record(record)
    assert "9.90 to 10.1 ms" in page.replace("\N{NO-BREAK SPACE}", " ")
    assert "Half of the latencies lie within the middle half." in page


def test_a_report_without_quartiles_is_read() -> None:
    values = mapping_from_record(bare_record(latency=_spread(QUIET)))
    for entry in values["latency"]["engines"]:
        del entry["quartiles_ms"]
    found = record_from_mapping(values).latency
    assert found.engines[0].quartiles_ms is None


def test_sites_and_work_are_told_apart() -> None:
    said = verdict(sample_record())
    assert "of the multiply-adds run in low precision, in " in said
    assert "of 60 sites" in said
    page = html_from_record(sample_record())
    assert "Multiply-adds in low precision" in page
    assert "a residual add is a site without multiply-adds" in page
    uncounted = replace(
        sample_record(), covered_share=None, coverage=(replace(sample_record().coverage[0], multiply_adds=None),)
    )
    assert "1 of 1 sites is quantized." in verdict(uncounted)
