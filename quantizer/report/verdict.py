"""The verdict on a run: one word and its reason, further findings, and a paragraph on all figures."""

from __future__ import annotations

from dataclasses import dataclass

from quantizer.plan.reasons import counted
from quantizer.report import text
from quantizer.report.record import (
    ALIKE_DB,
    FURTHER_DB,
    TIE,
    LatencyFallback,
    OutputDistance,
    RunRecord,
    reference_words,
)
from quantizer.report.tables import multiply_add_share
from quantizer.report.text import (
    decibels,
    drop,
    file_size,
    noise_sentence,
    paired_figure,
    percent,
    score,
    shape,
    signed,
    times,
)
from quantizer.utils.records import LEAST_SHARE, BudgetOutcome, Score

USABLE, LOOK, NOT = "usable", "check", "do not use"
_ORDER = (USABLE, LOOK, NOT)

_LOSS, _GREAT_LOSS = 0.01, 0.03
"""Losses relative to the float score."""
_DB, _FEW_DB = 20.0, 10.0
"""SQNR of an output, for runs without a score: at 20 dB, the error has a hundredth of the output's power."""

THRESHOLDS = (
    f"Usable: the score loses at most {_LOSS:.0%} of the float score. Check: it loses at most {_GREAT_LOSS:.0%}, or "
    f"its loss is not significant. Without a score, each output needs an SQNR of {_DB:g} dB to be usable, and of "
    f"{_FEW_DB:g} dB to be checked. The quantized engine must be at least {TIE - 1:.0%} faster than the float engine. "
    f"Its outputs need an SQNR of {ALIKE_DB:g} dB against the quantized model in PyTorch, or may be at most "
    f"{FURTHER_DB:g} dB further from the float model, at each compared size; otherwise the engine is refused. A "
    "configured budget or speed must be met; a budget that is missed within noise needs a check."
)


@dataclass(frozen=True)
class Verdict:
    """A verdict.

    Attributes:
        level: ``usable``, ``check`` or ``do not use``: the worst of all findings.
        reasons: the findings, the worst first, each a sentence without its full stop; the first one is the reason of
            the level.
    """

    level: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.level}: {self.reasons[0]}"


def verdict_of(record: RunRecord) -> Verdict:
    """Return the verdict on a run: its goals, accuracy, engine and speed."""
    judged = [*_goals(record), _accuracy(record), *_engine(record), *_judged_speed(record)]
    judged.sort(key=lambda finding: -_ORDER.index(finding[0]))
    return Verdict(judged[0][0], tuple(reason for _, reason in judged))


def loses_accuracy(record: RunRecord) -> bool:
    """Return whether the score, the outputs or a budget ask for more accuracy, so that fixes are worth showing."""
    return any(level != USABLE for level, _ in (*_goals(record), _accuracy(record)))


def lacks_diagnosis(record: RunRecord) -> bool:
    """Return whether accuracy is lost and a diagnosis, which the run can still get, would show where."""
    is_diagnosed = bool(record.diagnoses) or record.diagnosis_error is not None
    can_be = any(site.quantized for site in record.coverage) and record.config.get("qat") is None
    return can_be and not is_diagnosed and loses_accuracy(record)


def missed_goals(outcome: BudgetOutcome | None, latency_fallback: LatencyFallback | None) -> tuple[str, ...]:
    """Return a sentence for each missed goal: the accuracy budget and the speed."""
    missed = []
    if outcome is not None and outcome.is_missed:
        if outcome.evaluation_drop is not None:
            result = f"the {outcome.form} drops by {drop(outcome.evaluation_drop)} on the evaluation samples"
        elif outcome.tuning_drop > outcome.max_drop:
            result = f"the best plan drops by {drop(outcome.tuning_drop)} on the tuning samples"
        else:
            result = "the engine drops by more than the plan did on the tuning samples"
        missed.append(f"the budget max_drop {outcome.max_drop:g} is {outcome.verdict}: {result}")
    if (
        latency_fallback is not None
        and latency_fallback.min_speedup is not None
        and (latency_fallback.speedup or 0) < latency_fallback.min_speedup
    ):
        result = "was not benchmarked" if latency_fallback.speedup is None else f"has {times(latency_fallback.speedup)}"
        missed.append(
            f"the speed min_speedup {times(latency_fallback.min_speedup)} is not reached: the engine {result}"
        )
    return tuple(missed)


def _goals(record: RunRecord) -> list[tuple[str, str]]:
    outcome = None if record.fallback is None else record.fallback.outcome
    goals = missed_goals(outcome, record.latency_fallback)
    noisy = outcome is not None and outcome.is_within_noise
    return [(LOOK if noisy and goal.startswith("the budget") else NOT, goal) for goal in goals]


def _accuracy(record: RunRecord) -> tuple[str, str]:
    if record.coverage and not any(site.quantized for site in record.coverage):
        return NOT, "nothing is quantized"
    entry, plain = record.score, record.float_score
    if entry is not None and plain is not None and entry.difference is not None:
        return _loss(entry, plain)
    worst = record.worst_output
    if worst is None:
        return LOOK, "neither a score nor outputs were compared with the float model"
    if worst.sqnr_db is None:
        return USABLE, "the outputs equal those of the float model"
    level = USABLE if worst.sqnr_db >= _DB else LOOK if worst.sqnr_db >= _FEW_DB else NOT
    name = f"output {worst.output}" if len({output.output for output in record.outputs}) > 1 else "output"
    where = f" at {_size(worst)}" if len({(output.batch, output.sequence) for output in record.outputs}) > 1 else ""
    advice = "" if level == USABLE else "; evaluate a score on labelled samples"
    return level, f"SQNR of the {name}{where} {decibels(worst.sqnr_db)} dB, cosine {worst.cosine:.4f}{advice}"


def _size(output: OutputDistance) -> str:
    return f"batch {output.batch}" if output.sequence is None else shape(output.batch, output.sequence)


def _loss(entry: Score, plain: Score) -> tuple[str, str]:
    assert entry.difference is not None
    sign = -1 if entry.higher_is_better else 1
    base = abs(plain.value) or 1.0
    loss = sign * entry.difference / base
    level = USABLE if loss <= _LOSS else LOOK if loss <= _GREAT_LOSS else NOT
    reason = f"{entry.metric} {score(entry.value)}, {signed(entry.difference)} against float"
    if loss > 0:
        reason += f" ({percent(loss)} lost)"
    if entry.interval is not None:
        low, high = entry.interval
        worst = max(sign * low, sign * high) / base
        if level == NOT and low <= 0 <= high:
            level, reason = LOOK, f"{reason}, not significant: the 95% interval includes 0; evaluate on more samples"
        elif level == USABLE and worst > _LOSS:
            reason = f"{reason}; the 95% interval includes a loss of {percent(worst)}"
    return level, reason


def _engine(record: RunRecord) -> list[tuple[str, str]]:
    """Return the findings on an engine that computes something else than the quantized model in PyTorch."""
    if record.engine is None and record.engine_refused is None:
        return []
    if record.latency is None and record.engine_refused is None:
        return [(LOOK, "the engine was built but cannot run on this machine")]
    different = [output for output in record.outputs if not output.is_alike]
    reasons = [_lack(record)] if _lacks_precision(record) else []
    if record.engine_refused is not None:
        reasons.append((NOT, f"the engine was refused and deleted: {record.engine_refused}"))
    elif different:
        worst = min(different, key=lambda output: output.engine_to_proxy_db or 0.0)
        several_sizes = len({(output.batch, output.sequence) for output in record.outputs}) > 1
        where = f" at {_size(worst)}" if several_sizes else ""
        wrong = (worst.engine_to_proxy_db or 0.0) < _FEW_DB
        reason = (
            f"SQNR of the engine's output {worst.output}{where} against the quantized model in PyTorch is "
            f"{decibels(worst.engine_to_proxy_db or 0.0)} dB"
        )
        reasons.append((NOT if wrong else LOOK, reason))
    if _float_is_wrong(record):
        both_wrong = bool(different) or record.engine_refused is not None
        action = "do not deploy it" if record.float_engine_refused is None else "it was deleted"
        action = "no engine of this backend is correct; use another backend" if both_wrong else action
        sqnr = decibels(record.float_engine_db or 0.0)
        reason = f"SQNR of the float engine against the model in PyTorch is {sqnr} dB: {action}"
        reasons.append((NOT if both_wrong else LOOK, reason))
    return reasons


def _float_is_wrong(record: RunRecord) -> bool:
    wrong = record.float_engine_db is not None and record.float_engine_db < ALIKE_DB
    return wrong or record.float_engine_refused is not None


def _lacks_precision(record: RunRecord) -> bool:
    """Return whether the engine computes less than half of the quantized work in low precision."""
    share = None if record.inspection is None or not record.inspection.verified else record.inspection.low_share()
    return share is not None and bool(record.covered_share) and share < LEAST_SHARE * (record.covered_share or 0)


def _lack(record: RunRecord) -> tuple[str, str]:
    assert record.inspection is not None
    backend, share = record.inspection.backend, record.inspection.low_share() or 0.0
    return LOOK, (
        f"{backend} runs {percent(share)} of the multiply-adds in low precision, although "
        f"{percent(record.covered_share or 0)} are quantized: it has no kernels for the others; try another backend"
    )


def _judged_speed(record: RunRecord) -> list[tuple[str, str]]:
    if record.speeds is None or record.latency is None:
        return []
    ratio, reference = record.speeds[0].ratio_to_float, reference_words(record.latency)
    if ratio < TIE:
        # Conversions and encoder-decoder models have no float.engine beside the quantized one.
        alone = record.engine is not None and record.engine.path != "model.engine"
        run = ("report" in record.config or not record.config) and not alone
        deploy = (
            '; deploy float.engine, which quantizer.load("FOLDER", float_engine=True) loads'
            if run
            else "; convert without --quantization"
        )
        is_delivered = record.latency.float_engine is record.speeds[1]
        deploy = deploy if is_delivered and not _float_is_wrong(record) else ""
        slower = "is not faster" if ratio < 1 / TIE else "is not faster beyond noise"
        return [(LOOK, f"the quantized engine {slower}: {ratio:.2f}x as fast as {reference}{deploy}")]
    return [(USABLE, f"{ratio:.2f}x as fast as {reference}")]


def verdict(record: RunRecord) -> str:
    """Return a paragraph on speed, size, memory if measured, score and coverage."""
    noise = noise_sentence(record.latency)
    timing = [*_speed(record), *([noise] if noise else [])]
    return " ".join([*timing, *_disk(record), *_memory(record), *_score(record), *_coverage(record)])


def covered_share(record: RunRecord) -> float | None:
    """Return the share of all multiply-adds in low precision, else of the sites' ones; None if unknown."""
    return multiply_add_share(record.coverage) if record.covered_share is None else record.covered_share


def _speed(record: RunRecord) -> list[str]:
    if record.speeds is None or record.latency is None:
        return ["Speed was not measured."]
    size = text.timed_shape(record)
    where = f"on a batch of {size} with {text.counted(record.latency.threads, 'thread')}"
    ratio, reference = record.speeds[0].ratio_to_float, reference_words(record.latency)
    if ratio >= TIE:
        return [f"The quantized engine runs {ratio:.2f} times as fast as {reference} {where}."]
    if ratio > 1 / TIE:
        return [f"The quantized engine is not faster than {reference}: {ratio:.2f} times its speed {where}."]
    return [f"The quantized engine is slower than {reference}: {ratio:.2f} times its speed {where}."]


def _disk(record: RunRecord) -> list[str]:
    if record.sizes is None:
        return ["Size was not measured."]
    entry, reference = record.sizes
    figures = f"{file_size(entry.bytes)} against {file_size(reference.bytes)}"
    return [f"On disk it is {text.compared(entry.ratio, 'smaller', 'larger')} ({figures})."]


def _memory(record: RunRecord) -> list[str]:
    if record.peaks is None:
        return []
    entry, reference = record.peaks
    figures = f"{entry.peak_mib:,.0f} MiB against {reference.peak_mib:,.0f} MiB"
    return [f"Its peak memory is {text.compared(entry.ratio, 'lower', 'higher')} ({figures})."]


def _score(record: RunRecord) -> list[str]:
    entry, reference = record.score, record.float_score
    if entry is None:
        return ["The quantized model was not scored."]
    if reference is None or entry.difference is None:
        return [f"The {entry.form}'s {entry.metric} is {score(entry.value)}; the float model was not scored."]
    samples = f" on {entry.samples:,} samples" if entry.samples else ""
    figures = f"{score(entry.value)} against {score(reference.value)} for float ({signed(entry.difference)}){samples}"
    return [f"The {entry.form}'s {entry.metric} is {figures}; {_significance(entry)}.", *_paired(entry)]


def _significance(entry: Score) -> str:
    if entry.interval is None:
        return "no interval was computed, so its significance is unknown"
    low, high = entry.interval
    span = f"the 95% interval of the difference, {signed(low)} to {signed(high)},"
    if low <= 0 <= high:
        return f"{span} includes zero, so the change is not significant"
    better = (low > 0) == entry.higher_is_better
    side, effect = "above" if low > 0 else "below", "gain" if better else "loss"
    return f"{span} lies {side} zero, so this is a significant {effect}"


def _paired(entry: Score) -> list[str]:
    words = []
    for key, value in entry.paired.items():
        if value is not None:
            name, show = paired_figure(key)
            words.append(f"{name} {show(value)}")
    return [f"Against the float model on the same inputs: {', '.join(words)}."] if words else []


def _coverage(record: RunRecord) -> list[str]:
    sites = [site for site in record.coverage if site.ran]
    if not sites:
        return ["No sites were recorded."]
    quantized = [site for site in sites if site.quantized]
    unquantized = [site for site in sites if not site.quantized]
    share = covered_share(record)
    verb = "is" if len(quantized) == 1 else "are"
    count = f"{len(quantized)} of {len(sites)} sites"
    sentences = [f"{count} {verb} quantized."]
    if share is not None:
        sentences = [f"{percent(share)} of the multiply-adds run in low precision, in {count}."]
    if unquantized:
        reason, number = counted(site.reason for site in unquantized)[0]
        sentences.append(f"The most frequent reason for the others: {reason} ({text.counted(number, 'site')}).")
    if record.fallback and record.fallback.groups:
        number = len(record.fallback.groups)
        groups = "1 sensitive group was" if number == 1 else f"{number} sensitive groups were"
        sentences.append(f"{groups} kept in float ({record.fallback.reason}).")
    return sentences
