"""The verdict on a run, with every reason and the threshold that it goes by; and its figures in plain words."""

from __future__ import annotations

from dataclasses import dataclass

from quantizer.plan.reasons import counted
from quantizer.report import text
from quantizer.report.record import ALIKE_DB, FURTHER_DB, LatencyFallback, OutputDistance, RunRecord, reference_words
from quantizer.report.tables import multiply_add_share
from quantizer.report.text import decibels, drop, error, file_size, noise_sentence, percent, score, shape, signed, times
from quantizer.utils.records import LEAST_SHARE, BudgetOutcome, Score

USABLE, LOOK, NOT = "usable", "check", "do not use"
_ORDER = (USABLE, LOOK, NOT)

_LOSS, _GREAT_LOSS = 0.01, 0.03
"""Shares of the float model's score."""
_DB, _FEW_DB = 20.0, 10.0
"""SQNR of an output, without a score to go by: at 20 dB the error has a hundredth of the output's power."""

THRESHOLDS = (
    f"A score may lose {_LOSS:.0%} of the float model's, and {_GREAT_LOSS:.0%} with a look at it; a larger loss that "
    f"chance can explain counts as one to look at. Without a score every output needs an SQNR of {_DB:g} dB, and "
    f"{_FEW_DB:g} dB with a look at it. An engine in INT8 is to be faster than the one in float. Its outputs have an "
    f"SQNR of {ALIKE_DB:g} dB or more against those of the quantized model in PyTorch, or are at most {FURTHER_DB:g} "
    "dB further from the float model than these, at each size that is compared: else it computes something else, and "
    "is refused. A budget and a speed that were asked for have to be met; a budget that is missed within noise is one "
    "to look at."
)


@dataclass(frozen=True)
class Verdict:
    """A verdict.

    Attributes:
        level: ``usable``, ``check`` or ``do not use``: the worst of the reasons.
        reasons: what was judged, the worst first, each a sentence without its full stop.
    """

    level: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.level}: {'; '.join(self.reasons)}"


def verdict_of(record: RunRecord) -> Verdict:
    """Return the verdict on a run: on what was asked for, on its accuracy, on its engine, and on its speed."""
    judged = [*_asked(record), _accuracy(record), *_engine(record), *_judged_speed(record)]
    judged.sort(key=lambda one: -_ORDER.index(one[0]))
    return Verdict(judged[0][0], tuple(reason for _, reason in judged))


def missed_goals(outcome: BudgetOutcome | None, latency_fallback: LatencyFallback | None) -> tuple[str, ...]:
    """Return, in words, the budget of accuracy and the speed that were asked for and are not reached."""
    missed = []
    if outcome is not None and outcome.is_missed:
        if outcome.evaluation is not None:
            found = f"the {outcome.which} drops by {drop(outcome.evaluation)} in evaluation"
        elif outcome.tuning > outcome.asked:
            found = f"the best plan drops by {drop(outcome.tuning)} in tuning"
        else:
            found = "the engine drops by more than the plan did in tuning"
        missed.append(f"the budget max_drop {error(outcome.asked)} is {outcome.verdict}: {found}")
    if (
        latency_fallback is not None
        and latency_fallback.min_speedup is not None
        and (latency_fallback.speedup or 0) < latency_fallback.min_speedup
    ):
        got = "was not timed" if latency_fallback.speedup is None else f"has {times(latency_fallback.speedup)}"
        missed.append(f"the speed min_speedup {times(latency_fallback.min_speedup)} is not reached: the engine {got}")
    return tuple(missed)


def _asked(record: RunRecord) -> list[tuple[str, str]]:
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
        return LOOK, "neither a score nor the outputs were compared with the float model's"
    if worst.sqnr_db is None:
        return USABLE, "the outputs are those of the float model"
    level = USABLE if worst.sqnr_db >= _DB else LOOK if worst.sqnr_db >= _FEW_DB else NOT
    which = f" of {worst.output}" if len({one.output for one in record.outputs}) > 1 else ""
    if len({(one.batch, one.sequence) for one in record.outputs}) > 1:
        which += f" at {_size(worst)}"
    return level, (
        f"the output{which} is {decibels(worst.sqnr_db)} dB from float, cosine {worst.cosine:.4f}; a score on rows "
        "with labels says more"
    )


def _size(output: OutputDistance) -> str:
    return f"batch {output.batch}" if output.sequence is None else shape(output.batch, output.sequence)


def _loss(entry: Score, plain: Score) -> tuple[str, str]:
    assert entry.difference is not None
    sign = -1 if entry.higher_is_better else 1
    base = abs(plain.value) or 1.0
    loss = sign * entry.difference / base
    level = USABLE if loss <= _LOSS else LOOK if loss <= _GREAT_LOSS else NOT
    said = f"{entry.metric} {score(entry.value)}, {signed(entry.difference)} to float"
    if loss > 0:
        said += f", {percent(loss)} of it"
    if entry.interval is not None:
        low, high = entry.interval
        worst = max(sign * low, sign * high) / base
        if level == NOT and low <= 0 <= high:
            level, said = LOOK, f"{said}, which chance can explain: more samples tell"
        elif level == USABLE and worst > _LOSS:
            said = f"{said}; with chance it may be {percent(worst)}: more samples tell"
    return level, said


def _engine(record: RunRecord) -> list[tuple[str, str]]:
    """Return a reason if the engine computes something else than the quantized model in PyTorch."""
    if record.engine is None and record.engine_refused is None:
        return []
    if record.latency is None and record.engine_refused is None:
        return [(LOOK, "the engine was built and did not run here")]
    apart = [one for one in record.outputs if not one.is_alike]
    reasons = [_lack(record)] if _lacks_precision(record) else []
    if record.engine_refused is not None:
        reasons.append((NOT, f"the engine is refused, and was removed: {record.engine_refused}"))
    elif apart:
        worst = min(apart, key=lambda one: one.engine_to_proxy_db or 0.0)
        several = len({(one.batch, one.sequence) for one in record.outputs}) > 1
        where = f" at {_size(worst)}" if several else ""
        wrong = (worst.engine_to_proxy_db or 0.0) < _FEW_DB
        said = (
            f"the engine's output {worst.output}{where} is {decibels(worst.engine_to_proxy_db or 0.0)} dB from that of "
            "the quantized model in PyTorch"
        )
        reasons.append((NOT if wrong else LOOK, said))
    if _float_is_wrong(record):
        none = bool(apart) or record.engine_refused is not None
        kept = "do not deploy it" if record.float_engine_refused is None else "it was removed"
        nothing = "no engine of this backend is right; take another backend" if none else kept
        found = f"the float engine is {decibels(record.float_engine_db or 0.0)} dB from the model in PyTorch: {nothing}"
        reasons.append((NOT if none else LOOK, found))
    return reasons


def _float_is_wrong(record: RunRecord) -> bool:
    wrong = record.float_engine_db is not None and record.float_engine_db < ALIKE_DB
    return wrong or record.float_engine_refused is not None


def _lacks_precision(record: RunRecord) -> bool:
    """Return whether an engine computes less than half of what is quantized in low precision."""
    share = None if record.inspection is None or not record.inspection.verified else record.inspection.low_share()
    return share is not None and bool(record.covered_share) and share < LEAST_SHARE * (record.covered_share or 0)


def _lack(record: RunRecord) -> tuple[str, str]:
    assert record.inspection is not None
    backend, share = record.inspection.backend, record.inspection.low_share() or 0.0
    said = (
        f"{backend} computes {percent(share)} of the work in low precision, where {percent(record.covered_share or 0)} "
        "is quantized: it has no kernels for the rest, and computes that in float; compare another backend"
    )
    return LOOK, said


def _judged_speed(record: RunRecord) -> list[tuple[str, str]]:
    if record.speeds is None or record.latency is None:
        return []
    ratio, told = record.speeds[0].ratio_to_float, reference_words(record.latency)
    if ratio < 1:
        # A conversion, whose record has no such section, delivers no float engine beside the quantized one, nor does a
        # run of a model in parts, whose engines have the names of these.
        alone = record.engine is not None and record.engine.path != "model.engine"
        run = ("report" in record.config or not record.config) and not alone
        deploy = ": deploy float.engine" if run else ": convert without --quantization"
        deploy = "" if _float_is_wrong(record) else deploy
        return [(LOOK, f"INT8 is no faster than float here, {ratio:.2f}x as fast as {told}{deploy}")]
    return [(USABLE, f"{ratio:.2f}x as fast as {told}")]


# A ratio within this share of 1 counts as no change: timings vary by about as much.
_SAME = 0.05


def verdict(record: RunRecord) -> str:
    """Return a paragraph on speed, size, memory, score and coverage, which also names what was not measured."""
    noise = noise_sentence(record.latency)
    timing = [*_speed(record), *([noise] if noise else [])]
    return " ".join([*timing, *_disk(record), *_memory(record), *_score(record), *_coverage(record)])


def covered_share(record: RunRecord) -> float | None:
    """Return the share in low precision of all multiply-adds that torch executed, or else of the sites' ones."""
    return multiply_add_share(record.coverage) if record.covered_share is None else record.covered_share


def _speed(record: RunRecord) -> list[str]:
    if record.speeds is None or record.latency is None:
        return ["Speed was not measured."]
    size = text.shape(record.latency.batch, record.latency.sequence, " tokens")
    where = f"on a batch of {size} with {text.counted(record.latency.threads, 'thread')}"
    ratio, told = record.speeds[0].ratio_to_float, reference_words(record.latency)
    if ratio >= 1 + _SAME:
        return [f"The quantized engine runs {ratio:.2f} times as fast as {told} {where}."]
    if ratio > 1 - _SAME:
        return [f"The quantized engine is no faster than {told}: {ratio:.2f} times its speed {where}."]
    return [f"The quantized engine is slower than {told}: {ratio:.2f} times its speed {where}."]


def _disk(record: RunRecord) -> list[str]:
    if record.sizes is None:
        return ["Size was not measured."]
    entry, reference = record.sizes
    figures = f"{file_size(entry.bytes)} against {file_size(reference.bytes)}"
    return [f"On disk it is {_compare(entry.ratio, 'smaller', 'larger')} ({figures})."]


def _memory(record: RunRecord) -> list[str]:
    if record.peaks is None:
        return ["Memory was not measured."]
    entry, reference = record.peaks
    figures = f"{entry.peak_mib:,.0f} MiB against {reference.peak_mib:,.0f} MiB"
    return [f"Its peak memory is {_compare(entry.ratio, 'lower', 'higher')} ({figures})."]


def _compare(ratio: float, better: str, worse: str) -> str:
    if ratio >= 1 + _SAME:
        return f"{ratio:.2f} times {better}"
    return "about the same" if ratio > 1 - _SAME else f"{1 / ratio:.2f} times {worse}"


def _score(record: RunRecord) -> list[str]:
    entry, reference = record.score, record.float_score
    if entry is None:
        return ["The quantized model was not scored."]
    if reference is None or entry.difference is None:
        return [
            f"The {entry.which}'s {entry.metric} is {score(entry.value)}; it was not compared with the float model."
        ]
    rows = f" on {entry.samples:,} samples" if entry.samples else ""
    figures = f"{score(entry.value)} against {score(reference.value)} for float ({signed(entry.difference)}){rows}"
    return [f"The {entry.which}'s {entry.metric} is {figures}; {_significance(entry)}.", *_paired(entry)]


def _significance(entry: Score) -> str:
    if entry.interval is None:
        return "no interval was computed, so chance is not ruled out"
    low, high = entry.interval
    span = f"the 95% interval of the difference, {signed(low)} to {signed(high)},"
    if low <= 0 <= high:
        return f"{span} includes zero, so these examples show no certain change"
    better = (low > 0) == entry.higher_is_better
    return f"{span} lies {'above' if low > 0 else 'below'} zero, so this is a real {'gain' if better else 'loss'}"


def _paired(entry: Score) -> list[str]:
    figures = [(name.replace("_", " "), value) for name, value in entry.paired.items() if value is not None]
    if not figures:
        return []
    words = [
        f"{name} {percent(value) if 'flip' in name or 'share' in name else f'{value:.4f}'}" for name, value in figures
    ]
    return [f"Against the float model on the same inputs: {', '.join(words)}."]


def _coverage(record: RunRecord) -> list[str]:
    sites = [site for site in record.coverage if site.ran]
    if not sites:
        return ["No sites were recorded."]
    quantized = [site for site in sites if site.quantized]
    rest = [site for site in sites if not site.quantized]
    share = covered_share(record)
    verb = "is" if len(quantized) == 1 else "are"
    count = f"{len(quantized)} of {len(sites)} sites"
    sentences = [f"{count} {verb} quantized."]
    if share is not None:
        count += " (operations, large and small)"
        sentences = [f"{percent(share)} of the multiply-adds, the work, run in low precision, in {count}."]
    if rest:
        reason, number = counted(site.reason for site in rest)[0]
        sentences.append(f"The most frequent reason for the others: {reason} ({number}).")
    if record.fallback and record.fallback.groups:
        number = len(record.fallback.groups)
        which = "1 sensitive group was" if number == 1 else f"{number} sensitive groups were"
        sentences.append(f"{which} kept in float ({record.fallback.reason}).")
    return sentences
