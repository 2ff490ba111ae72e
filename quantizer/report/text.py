"""Numbers as text, in ASCII for every terminal; :func:`typeset` converts them for a page.

Also prints wrapped lines in a terminal, and names the spread of latencies and the errors of each measure.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from quantizer.report.record import Latency, LatencyEntry, RunRecord, pair
from quantizer.utils.registry import TASKS_OF_RECORDINGS

MISSING = "\N{EN DASH}"
"""The text of a missing value on a page."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def score(value: float) -> str:
    """Return a metric's value: ``0.8203``."""
    return f"{value:.4f}"


def signed(value: float) -> str:
    """Return a difference with its sign: ``+0.0012``; without a sign if it rounds to zero."""
    text = f"{value:+.4f}"
    return text[1:] if float(text) == 0 else text


def interval(value: tuple[float, float]) -> str:
    """Return a 95% interval: ``[-0.0031, +0.0008]``."""
    return f"[{signed(value[0])}, {signed(value[1])}]"


def times(value: float) -> str:
    """Return a ratio: ``3.71x``."""
    return f"{value:.2f}x"


def significant(value: float, digits: int = 4) -> str:
    """Return a number with ``digits`` significant digits, without an exponent for magnitudes from 1e-5 to 1e9."""
    if not math.isfinite(value):
        return {math.inf: "infinite", -math.inf: "-infinite"}.get(value, "not a number")
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if -5 <= size < 9:
        return f"{value:,.{max(digits - 1 - size, 0)}f}"
    return f"{value:.{digits - 1}e}"


def percent(value: float) -> str:
    """Return a share as a percentage with three significant digits: ``0.0123`` is ``1.23%``."""
    return f"{significant(value * 100, 3)}%" if math.isfinite(value) else significant(value)


def error(value: float) -> str:
    """Return an error with three digits: ``0.0410``, ``1.74e-05``."""
    if math.isfinite(value) and 0 < abs(value) < 0.0001:
        return f"{value:.2e}"
    return significant(value, 3)


def decibels(value: float) -> str:
    """Return decibels with one digit and without the unit: ``31.4``."""
    return f"{value:.1f}" if math.isfinite(value) else significant(value)


def paired_figure(key: str) -> tuple[str, Callable[[float], str]]:
    """Return the name and the format of a paired figure of a task: ``SQNR in dB`` for ``sqnr_db``."""
    name = key.replace("_", " ").replace("sqnr", "SQNR")
    if key.endswith("_db"):
        return f"{name.removesuffix(' db')} in dB", decibels
    return name, percent if "flip" in key or "share" in key else score


def milliseconds(value: float) -> str:
    """Return a time with its unit: ``12.3 ms``."""
    return f"{significant(value, 3)} ms"


def seconds(value: float) -> str:
    """Return a time with its unit: ``0.42 s``, ``12.3 s`` or ``2 min 05 s``."""
    if value < 100:
        return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
    minutes, remainder = divmod(round(value), 60)
    return f"{minutes} min {remainder:02d} s"


def file_size(size_bytes: float) -> str:
    """Return a size in bytes as ``22.9 MiB``; under 0.1 MiB as ``12.3 KiB``."""
    kib = size_bytes / 2**10
    return f"{kib:,.1f} KiB" if kib < 0.1 * 2**10 else f"{kib / 2**10:,.1f} MiB"


SAME = 0.05
"""Ratios within this distance of 1 count as no change, because timings vary as much."""


def compared(ratio: float, better: str, worse: str) -> str:
    """Return float divided by engine in words: ``2.71x smaller``, ``1.52x larger`` or ``about the same``."""
    if ratio >= 1 + SAME:
        return f"{times(ratio)} {better}"
    return "about the same" if ratio > 1 - SAME else f"{times(1 / ratio)} {worse}"


def size_words(size_bytes: float, ratio: float) -> str:
    """Return a size beside that of float: ``2.3 MiB (2.71x smaller)``, ``1.4 MiB (1.52x larger)``."""
    return f"{file_size(size_bytes)} ({compared(ratio, 'smaller', 'larger')})"


def memory_words(peak_mib: float, ratio: float) -> str:
    """Return a peak of memory beside that of float: ``212 MiB (1.31x lower)``."""
    return f"{peak_mib:,.0f} MiB ({compared(ratio, 'lower', 'higher')})"


def count(value: int) -> str:
    """Return a whole number with separators: ``22,713,216``."""
    return f"{value:,}"


def share(value: float) -> str:
    """Return a share as a percentage; shares below 1 never show as 100%, nor shares above 0 as 0%."""
    if 0.9995 <= value < 1:
        return f"{value:.4%}" if value < 0.999999 else "just under 100%"
    return f"{value:.1%}" if value == 0 or value >= 0.001 else f"{100 * value:.2g}%"


def magnitude(value: int) -> str:
    """Return an integer with at most three digits: ``1.23 G``, ``17.4 M``, ``2 k``."""
    for unit, size in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return str(value)


def compact(value: int) -> str:
    """Return an integer with three digits: ``1.00 G``, ``17.4 M``; numbers below a million as :func:`count`."""
    for size, unit in ((10**12, "T"), (10**9, "G"), (10**6, "M")):
        if value >= size:
            return f"{significant(value / size, 3)} {unit}"
    return count(value)


def amount(value: float) -> str:
    """Return a cost in any unit: integers as :func:`compact`, other numbers with three digits."""
    return compact(int(value)) if float(value).is_integer() else significant(value, 3)


def shape(batch: int, sequence: int | None, unit: str = "") -> str:
    """Return the size of a batch: ``8``, or ``8 x 128`` with tokens and an optional unit such as `` tokens``."""
    return f"{batch} x {sequence}{unit}" if sequence else f"{batch}"


def timed_shape(record: RunRecord) -> str:
    """Return the size of the benchmarked batch: ``8 x 128 tokens``, or ``8 x 16000 values`` for recordings."""
    assert record.latency is not None
    unit = " values" if record.model.task in TASKS_OF_RECORDINGS else " tokens"
    return shape(record.latency.batch, record.latency.sequence, unit)


def counted(number: int, what: str) -> str:
    """Return a number with its noun: ``1 group``, ``2 groups``."""
    return f"{count(number)} {what}{'' if number == 1 else 's'}"


def plain(value: object) -> str:
    """Return any value of a cell: None is ``-``, floats have four significant digits."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return count(value)
    if isinstance(value, float):
        return significant(value)
    return str(value)


def drop(value: float) -> str:
    """Return the drop of a score: ``0.0045``; an improvement is negative."""
    return f"{value:.4f}" if round(value, 4) else "0.0000"


def listed(names: Sequence[str]) -> str:
    """Return the first three names, each of at most 40 characters, and the number of others."""
    hidden = len(names) - 3
    return ", ".join(shorten(name, 40) for name in names[:3]) + (f" and {hidden} more" if hidden > 0 else "")


def shorten(name: str, length: int) -> str:
    """Return ``name`` with at most ``length`` characters, cut in the middle, since both ends identify a site."""
    if len(name) <= length:
        return name
    left = (length - 1) // 2
    return f"{name[:left]}…{name[len(name) - (length - 1 - left) :]}"


_ROOM = 20
"""Letters of a verdict that fit beside three shapes in a terminal of 80 columns."""


def short_verdict(verdict: str) -> str:
    """Return a verdict that fits in a table, without a longer reason."""
    return verdict if len(verdict) <= _ROOM else re.split(":| at ", verdict)[0]


def typeset(line: str) -> str:
    """Return ``line`` with minus, multiplication and micro signs in place of ``-``, ``x`` and the ``u`` of ``us``."""
    words = []
    for word in line.split(" "):
        bare = word.lstrip("([")
        head = word[: len(word) - len(bare)]
        bare, tail = bare.rstrip(",;:.)]"), bare[len(bare.rstrip(",;:.)]")) :]
        if bare[:1] == "-" and bare[1:2].isdigit():
            bare = "\N{MINUS SIGN}" + bare[1:]
        if bare == "x" or (bare[:1].isdigit() and bare.endswith("x")):
            bare = bare[:-1] + "\N{MULTIPLICATION SIGN}"
        if bare == "us":
            bare = "\N{MICRO SIGN}s"
        words.append(head + bare + tail)
    return " ".join(words)


def visible(words: str) -> str:
    """Return a text with control characters escaped, so that names from files cannot control the terminal."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], words)


_LEAST = 20
"""The narrowest width for wrapping; a narrower terminal breaks lines itself."""

_LABEL = 8
"""Columns of a label and the space after it."""


def wrapped(line: str, width: int, *, first: str = "", rest: str = "") -> list[str]:
    """Return a line as lines of at most ``width`` columns; longer names are shortened in the middle."""
    width = max(width, _LEAST + len(first))
    room = width - max(len(first), len(rest))
    return textwrap.wrap(
        re.sub(r"\S+", lambda word: shorten(word[0], room), line),
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [first.rstrip()]


def print_lines(
    lines: Iterable[str], console: Console, *, first: str = "- ", rest: str | None = None, style: str | None = None
) -> None:
    """Print lines, each wrapped at the width of the console with a hanging indent, by default as wide as ``first``."""
    rest = " " * len(first) if rest is None else rest
    for line in lines:
        for part in wrapped(line, console.width, first=first, rest=rest):
            console.print(Text(visible(part), style=style or ""), soft_wrap=True)


def print_labelled(label: str, line: str, console: Console, *, style: str | None = None, wrap: bool = True) -> None:
    """Print a line after its label, wrapped with a hanging indent unless ``wrap`` is False, as for paths."""
    parts = wrapped(line, console.width - _LABEL) if wrap else [line]
    for number, part in enumerate(parts):
        head = f"{'' if number else label:{_LABEL}}"
        console.print(Text.assemble((head, "bold"), (visible(part), style or "")), soft_wrap=True)


_NOISY = 0.15
"""The largest share of the median that the middle half of the times may span."""


def spread_words(entry: LatencyEntry) -> str:
    """Return the middle half of the times, ``44.1 to 47.9 ms``, or their extremes without quartiles."""
    low, high = _limits(entry)
    return f"{milliseconds(low).removesuffix(' ms')} to {milliseconds(high)}"


def noise_sentence(latency: Latency | None) -> str:
    """Return a warning if the latencies vary by more than 15% of their median, else ""."""
    entries = () if latency is None else pair(latency.engines) or latency.engines[:1]
    noisy = [entry for entry in entries if _share(entry) > _NOISY]
    if not noisy:
        return ""
    worst = max(noisy, key=_share)
    return (
        f"The timing is noisy: the middle half of the latencies of {worst.name} spans {percent(_share(worst))} of the "
        f"median ({spread_words(worst)}). Benchmark again on an idle machine."
    )


def _share(entry: LatencyEntry) -> float:
    low, high = _limits(entry)
    return (high - low) / entry.median_ms


def _limits(entry: LatencyEntry) -> tuple[float, float]:
    return entry.quartiles_ms or (entry.min_ms, entry.max_ms)


@dataclass(frozen=True, kw_only=True)
class ErrorWords:
    """The name of a measure's error."""

    column: str
    """Title of its column."""
    phrase: str
    """The name of the error within a sentence, without a capital first letter."""

    @property
    def caption(self) -> str:
        """The line above a chart."""
        return f"{self.column[:1].upper()}{self.column[1:]}, one group quantized at a time"

    @property
    def heading(self) -> str:
        """The phrase with a capital first letter."""
        return self.phrase[:1].upper() + self.phrase[1:]


_WORDS = {
    "gradient": ErrorWords(
        column="estimated divergence",
        phrase="divergence of the output (Kullback-Leibler of logits, else relative error), estimated from gradients",
    ),
    "loss": ErrorWords(column="estimated effect on the loss", phrase="effect on the loss, estimated from gradients"),
    "output": ErrorWords(
        column="divergence of the output",
        phrase="divergence of the output (Kullback-Leibler of logits, else relative error)",
    ),
    "local": ErrorWords(column="relative error at its sites", phrase="relative error at the outputs of its sites"),
    "metric": ErrorWords(column="drop of the metric", phrase="drop of the metric"),
}
_UNKNOWN = ErrorWords(column="error", phrase="error")


def error_words(measure: str | None) -> ErrorWords:
    """Return the name of a measure's errors; ``error`` for an unknown measure."""
    return _UNKNOWN if measure is None else _WORDS.get(measure, _UNKNOWN)
