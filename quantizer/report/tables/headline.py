"""The figures of a run in plain words."""

from __future__ import annotations

from collections.abc import Sequence

from quantizer.reasons import counted
from quantizer.report.ratios import quantized_entry, reference_entry, reference_words
from quantizer.report.record import RunRecord, Score
from quantizer.report.run_records import Site
from quantizer.report.tables import text
from quantizer.report.tables.text import file_size, noise_sentence, percent, score, signed

# A ratio within this share of 1 counts as no change: timings vary by about as much.
_SAME = 0.05


def verdict(record: RunRecord) -> str:
    """Return a paragraph on speed, size, memory, score and coverage, which also names what was not measured."""
    noise = noise_sentence(record.latency)
    timing = [*_speed(record), *([noise] if noise else [])]
    return " ".join([*timing, *_size(record), *_memory(record), *_score(record), *_coverage(record)])


def quantized_score(scores: Sequence[Score]) -> Score | None:
    """Return the score of the headline: that of the form nearest to the engine, else the last that is not float."""
    by_name = {entry.which: entry for entry in scores if entry.which != "float"}
    nearest = (by_name[which] for which in ("engine", "simulation", "qat", "proxy") if which in by_name)
    return next(nearest, next(reversed(by_name.values()), None))


def multiply_add_share(sites: Sequence[Site]) -> float | None:
    """Return the share of the sites' multiply-adds in low precision, 0 to 1; None if none were counted."""
    total = sum(site.multiply_adds or 0 for site in sites)
    return sum(site.multiply_adds or 0 for site in sites if site.quantized) / total if total else None


def covered_share(record: RunRecord) -> float | None:
    """Return the share in low precision of all multiply-adds that torch executed, or else of the sites' ones."""
    return multiply_add_share(record.coverage) if record.covered_share is None else record.covered_share


def _speed(record: RunRecord) -> list[str]:
    entry = quantized_entry(record.latency.engines) if record.latency else None
    if record.latency is None or entry is None:
        return ["Speed was not measured."]
    size = text.shape(record.latency.batch, record.latency.sequence, " tokens")
    where = f"on a batch of {size} with {text.counted(record.latency.threads, 'thread')}"
    ratio, told = entry.ratio_to_float, reference_words(record.latency)
    if ratio >= 1 + _SAME:
        return [f"The quantized engine runs {ratio:.2f} times as fast as {told} {where}."]
    if ratio > 1 - _SAME:
        return [f"The quantized engine is no faster than {told}: {ratio:.2f} times its speed {where}."]
    return [f"The quantized engine is slower than {told}: {ratio:.2f} times its speed {where}."]


def _size(record: RunRecord) -> list[str]:
    entry, reference = quantized_entry(record.size), reference_entry(record.size)
    if entry is None or reference is None:
        return ["Size was not measured."]
    figures = f"{file_size(entry.bytes)} against {file_size(reference.bytes)}"
    return [f"On disk it is {_compare(entry.ratio, 'smaller', 'larger')} ({figures})."]


def _memory(record: RunRecord) -> list[str]:
    entry, reference = quantized_entry(record.memory), reference_entry(record.memory)
    if entry is None or reference is None:
        return ["Memory was not measured."]
    figures = f"{entry.peak_mib:,.0f} MiB against {reference.peak_mib:,.0f} MiB"
    return [f"Its peak memory is {_compare(entry.ratio, 'lower', 'higher')} ({figures})."]


def _compare(ratio: float, better: str, worse: str) -> str:
    if ratio >= 1 + _SAME:
        return f"{ratio:.2f} times {better}"
    return "about the same" if ratio > 1 - _SAME else f"{1 / ratio:.2f} times {worse}"


def _score(record: RunRecord) -> list[str]:
    entry = quantized_score(record.scores)
    reference = next((item for item in record.scores if item.which == "float"), None)
    if entry is None:
        return ["The quantized model was not scored."]
    if reference is None or entry.difference is None:
        return [
            f"The {entry.which}'s {entry.metric} is {score(entry.value)}; it was not compared with the float model."
        ]
    rows = f" on {entry.rows:,} examples" if entry.rows else ""
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
        sentences.append(f"{which} put back to float ({record.fallback.reason}).")
    return sentences
