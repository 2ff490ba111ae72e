"""The pages of the table: who is the fastest, and by machine the score and the speed of every tool on each model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import TextWrapper
from typing import Any

from quantizer.report.charts.plots import RunPoint, runs_svg

__all__ = ["OURS", "REFERENCE", "write_pages"]

Rows = Sequence[dict[str, Any]]

OURS, REFERENCE = "auto", "onnxruntime-float32"
"""The tool that is compared with the others, and the one beside which all latencies are measured."""
_BATCHES, _PICTURED = ("1", "8", "32"), "8"
_SLOWEST = 0.2
"""The speed-up from which on a tool is in the picture."""
_AGAIN = 0.002
"""How near a score must be to that of another machine."""
_LINES = TextWrapper(width=118, break_long_words=False, break_on_hyphens=False)
"""Prose and pictures in lines of usual length; in a picture a name of an attribute may have a hyphen."""
_STYLE, _STRING = re.compile("<style>.*?</style>"), re.compile("'[^']*'")
_VERSIONS = ("torch", "onnxruntime", "openvino", "nncf", "nvidia-modelopt", "torchao", "optimum-quanto")
_INTRO = """# Against other tools, on a CPU

<!-- Made by `make field`: change benchmarks/field, not this page. -->

Float, INT8 and what each tool makes of real models, with all defaults and the same rows to calibrate on, one thread.
A row was measured in a process of its own, interleaved with ONNX Runtime in float32: a speed-up is the median of ratios
of calls that follow each other. "To float" is the score less that of the float model, with its 95% interval from
resampled rows, better above 0; paired figures compare outputs with the float model's, row by row. Memory is what the
engine adds to a fresh process that loads it and runs a batch of 8; time is what quantizing took, from the model to a
file, with its export. Two rows were measured at once, each on a core of its own: that slows both, so that a time is
good for comparisons by a factor and not by a few percent; a speed-up, of calls that take turns, hardly changes.

"Ours, `backend: auto`" is `quantize_model(model, batches)`: it builds every engine for this CPU, measures them, and
keeps the fastest that computes what the model does. Its time has all of that in it.

A table says who is faster than ours at a batch size with a score that is not worse. All others are slower, or lose
more. The rows themselves are in `benchmarks/field/rows`, a file for each kind of machine.
"""
_BESIDE = """# {machine}

<!-- Made by `make field`: change benchmarks/field, not this page. -->

[How all of this was measured](index.md), and who is the fastest.
"""
_GROWTH = """An encoder of MiniLM's width with random weights: how long quantizing it takes, by its layers (with 128
rows of 128 tokens to calibrate on) and by the rows (of 6 layers), and the latency of 8 rows of 6 layers, by their
tokens, beside that of ONNX Runtime in float32.
"""


def write_pages(machines: Mapping[str, Rows], growth: Mapping[str, Rows], folder: Path) -> None:
    """Write the pages into a folder: ``index.md``, and one for each machine.

    Args:
        machines: all rows by the slug of their machine, each with ``name``, the title of its tool, and ``ours``.
        growth: what ``grown`` returned of each tool, likewise.
        folder: the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = [_INTRO]
    for slug, rows in machines.items():
        if any("failed" not in row for row in rows):
            parts += _fastest(slug, rows)
            _write(folder / f"{slug}.md", [_BESIDE.format(machine=_machine(rows)), *_tables(rows, growth[slug])])
    parts += _found_again(machines.values())
    _write(folder / "index.md", parts)


def _write(path: Path, parts: Iterable[str]) -> None:
    path.write_text("\n".join(parts).rstrip("\n") + "\n", encoding="utf-8")


def _tables(rows: Rows, growth: Rows) -> Iterator[str]:
    models = _measured_models(rows)
    none = sorted({row["model"] for row in rows} - {*models})
    if none:
        yield f"Of these models nothing was measured yet: {', '.join(none)}.\n"
    for model in models:
        yield from _model([row for row in rows if row["model"] == model])
    yield from _growth(growth)


def _measured_models(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in rows if "failed" not in row))


def _fastest(slug: str, rows: Rows) -> Iterator[str]:
    """Whether ours is the fastest at each size of a batch among those that are as accurate, and who else is."""
    yield f"## {_machine(rows)}\n"
    models = [row["model"] for row in rows if row["tool"] == OURS and "failed" not in row]
    if not models:
        yield f"Ours is not measured here yet: [figures of others]({slug}.md).\n"
        return
    yield "| model | " + " | ".join(f"batch {batch}" for batch in _BATCHES) + " |\n|---|" + "---|" * len(_BATCHES)
    cells = best = 0
    for model in models:
        measured = {row["tool"]: row for row in rows if row["model"] == model and "failed" not in row}
        shown = []
        for batch in _BATCHES:
            faster = list(_faster(measured, batch))
            cells, best = cells + 1, best + (not faster)
            shown.append(", ".join(faster) or "**ours**")
        yield f"| {measured[OURS]['title']} | " + " | ".join(shown) + " |"
    yield f"\nOurs is the fastest at an equal or better score in {best} of {cells} cells: [all figures]({slug}.md).\n"


def _found_again(machines: Iterable[Rows]) -> Iterator[str]:
    """How many rows have the same score on another machine, in an environment that was made for it."""
    scores: dict[tuple[str, str], list[float]] = {}
    for row in (row for rows in machines for row in rows if "failed" not in row):
        scores.setdefault((row["title"], row["name"]), []).append(row["score"])
    twice = {row: found for row, found in scores.items() if len(found) > 1}
    if not twice:
        return
    others = {row: found for row, found in twice.items() if max(found) - min(found) > _AGAIN}
    yield "## Found again\n"
    yield _LINES.fill(
        f"{len(twice)} rows were measured on more than one machine, each in an environment made for it: the scores of "
        f"{len(twice) - len(others)} are within {_AGAIN} of each other."
    )
    if others:
        yield "\nThe others; CPUs sum in other orders, and of some hundred rows a few are decided otherwise:\n"
    for (title, name), found in others.items():
        said = f"- {name} on {title}: " + ", ".join(f"{score:.4f}" for score in found)
        yield _LINES.fill(said).replace("\n", "\n  ")


def _faster(measured: dict[str, dict[str, Any]], batch: str) -> Iterator[str]:
    ours = measured[OURS]
    for row in measured.values():
        if row["ours"] or row["gained"] < ours["gained"]:
            continue
        ratio = row["latency"][batch]["speedup"] / ours["latency"][batch]["speedup"]
        if ratio > 1:
            # A score of some hundred rows says little of how far outputs are off.
            told = f"{ratio:.2f} times as fast"
            if "sqnr_db" in row:
                told += f", its outputs {row['sqnr_db']:.1f} dB from float's, ours {ours['sqnr_db']:.1f} dB"
            yield f"{row['name']} ({told})"


def _model(rows: Rows) -> Iterator[str]:
    measured = [row for row in rows if "failed" not in row]
    first = measured[0]
    yield f"## {first['title']}\n"
    versions = measured[-1]["versions"]
    shown = ", ".join(f"{name} {versions[name]}" for name in _VERSIONS if name in versions)
    yield _LINES.fill(f"Commit {_commits(measured)}, seed {first['seed']}; {shown}.") + "\n"
    latest = max(row["day"] for row in measured)
    again = [f"{row['name']} ({row['commit']})" for row in measured if row["day"] == latest]
    if len(again) < len(measured):
        yield _LINES.fill(f"Measured on {latest}: {', '.join(again)}. All other samples are older.") + "\n"
    paired = [name for name in ("label_flips", "mean_cosine", "kl_divergence", "sqnr_db") if name in first]
    heads = ["", "tool", *(f"batch {batch}, ms (speed-up)" for batch in _BATCHES), first["metric"], "to float", "95%"]
    heads += [name.replace("_", " ") for name in paired]
    yield _row(*heads)
    yield "|---" * len(heads) + "|"
    for number, row in enumerate(measured, start=1):
        yield _row(
            str(number),
            _title(row),
            *(_latency(row["latency"][batch]) for batch in _BATCHES),
            _told(row["score"]),
            _told(row["gained"], "+"),
            f"{_told(row['low'], '+')} to {_told(row['high'], '+')}",
            *(f"{row[name]:.1f}" if name == "sqnr_db" else _told(row[name]) for name in paired),
        )
    yield "\n" + _picture(measured) + "\n"
    yield _row("tool", "files, MiB", "to load, s", "memory, MiB", "to quantize, s", "peak, MiB")
    yield "|---" * 6 + "|"
    for row in measured:
        sizes = (f"{row[name]:.1f}" if name in row else "" for name in ("file_mib", "load_s", "run_peak_mib"))
        yield _row(_title(row), *sizes, f"{row['quantize_s']:.0f}", f"{row['quantize_peak_mib']:.0f}")
    yield from _failed(rows)
    yield ""


def _growth(rows: Rows) -> Iterator[str]:
    """How the tools grow; nothing where none was measured."""
    measured = [row for row in rows if "failed" not in row]
    if not measured:
        return
    yield "## How they grow\n"
    yield _GROWTH
    yield f"Commit {_commits(measured)}.\n"
    # Kept rows have their keys in the order of texts.
    layers, data, tokens = (sorted(measured[0][axis], key=int) for axis in ("layers", "rows", "tokens"))
    yield from _table(
        [*(f"{count} layers, s" for count in layers), *(f"{count} rows, s" for count in data)],
        {
            row["name"]: [
                *(f"{row['layers'][count]:.1f}" for count in layers),
                *(f"{row['rows'][count]:.1f}" for count in data),
            ]
            for row in measured
        },
    )
    yield ""
    yield from _table(
        [f"{count} tokens, ms (speed-up)" for count in tokens],
        {row["name"]: [_latency(row["tokens"][count]) for count in tokens] for row in measured},
    )
    yield from _failed(rows)
    yield ""


def _table(heads: Sequence[str], cells: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """A table of tools, by their names; a page has room for seven columns."""
    yield _row("tool", *heads)
    yield "|---" * (1 + len(heads)) + "|"
    for name, of_tool in cells.items():
        yield _row(name, *of_tool)


def _failed(rows: Rows) -> Iterator[str]:
    failed = [row for row in rows if "failed" in row]
    if failed:
        yield "\nNot measured:\n"
        yield "| tool | why |\n|---|---|"
    for row in failed:
        yield _row(row["name"], row["failed"].replace("|", "/")[:300])


def _machine(rows: Rows) -> str:
    told = next(row["machine"] for row in rows if "failed" not in row)
    return f"{told['cpu']} with {told['instructions']}"


def _commits(measured: Rows) -> str:
    return ", ".join(sorted({f"{row['commit']} of {row['day']}" for row in measured}))


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _title(row: dict[str, Any]) -> str:
    return f"{row['name']} ({row['note']})" if row["note"] else str(row["name"])


def _told(value: float, sign: str = "") -> str:
    """Return a score, or a difference of scores with a sign; one that is far too large for four decimals in short."""
    return f"{value:{sign}.4f}" if abs(value) < 1e6 else f"{value:{sign}.1e}"


def _latency(taken: dict[str, float]) -> str:
    return f"{taken['ms']:.1f} ({taken['speedup']:.2f})"


def _picture(measured: Rows) -> str:
    """Score against time at one batch size; times are those of the reference divided by the speed-ups."""
    reference = next(row for row in measured if row["tool"] == REFERENCE)
    base = reference["latency"][_PICTURED]["ms"]
    # One that loses as much as all of float's score would leave no room for the others, nor would one that takes ages.
    far = [row["name"] for row in measured if -row["gained"] > abs(reference["score"])]
    slow = [
        row["name"] for row in measured if row["latency"][_PICTURED]["speedup"] < _SLOWEST and row["name"] not in far
    ]
    spots = [
        (number, row["name"], base / row["latency"][_PICTURED]["speedup"], row["score"], row["gained"])
        for number, row in enumerate(measured, start=1)
        if row["name"] not in (*far, *slow)
    ]
    points = [
        RunPoint(
            number=number,
            name=title,
            milliseconds=time,
            score=score,
            pareto_optimal=not any(other[2] < time and other[4] >= gained for other in spots),
        )
        for number, title, time, score, gained in spots
    ]
    falls = any(row["gained"] * (row["score"] - reference["score"]) < 0 for row in measured)
    picture = runs_svg(points, f"{measured[0]['metric']}, batch {_PICTURED}", {}, higher_is_better=not falls)
    # A block of HTML, so that its text has the colour of the page.
    block = ["<div>", *_in_lines(picture), "</div>"]
    for why, names in (("Too far from float", far), ("Too slow", slow)):
        if names:
            block.append("\n" + _LINES.fill(f"{why} for the picture: {'; '.join(names)}."))
    return "\n".join(block)


def _in_lines(picture: str) -> list[str]:
    """Return a picture in lines of usual length.

    No string of its style is cut: the end of a line would end it, and make all styles behind it void.
    """
    loose = _STYLE.sub(lambda found: found[0].replace(";", "; "), picture.replace("><", "> <"))
    whole = _STRING.sub(lambda found: found[0].replace(" ", "\0"), loose)
    return [line.replace("\0", " ") for line in _LINES.wrap(whole)]
