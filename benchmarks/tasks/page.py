"""The page of the tasks: what INT8 does to a model of each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap

from cases import Case

from quantizer.report import RunRecord

__all__ = ["Result", "page"]

_INTRO = """# Tasks

<!-- Made by `make tasks`: change benchmarks/tasks, not this page. -->

What INT8 does to a model of each of the [tasks](how-to/tasks.md).

Each by `quantizer run` for OpenVINO and by `quantizer convert` for ONNX Runtime, with all defaults. The score is that
of float and engine on the same rows; behind the engine's the 95% interval of its difference to float, from
resampled rows. Paired figures compare engine and float row by row. Speed is that of the INT8 engine beside the float
engine of the same backend, with one thread. Weights and rows are real ones here; those heads that were fine-tuned for
this table saw few rows, so that their scores stand for what INT8 changes, not for the architecture.
"""

_MADE = """
Small random checkpoints on made-up rows: that the way is there, and how far the outputs are from float.

"""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The records of one task; None: the task is not for this way."""

    case: Case
    run: RunRecord | None = None
    convert: RunRecord | None = None


def page(results: Sequence[Result], before: str) -> str:
    """The page, in Markdown.

    Args:
        results: what was measured here.
        before: the page that there is: its rows stay where nothing was measured here.
    """
    kept = {tuple(_cells(line)[key] for key in _KEY): line for line in before.splitlines() if line.startswith("| `")}
    real = list(_scores([result for result in results if result.case.real], kept))
    made = list(_scores([result for result in results if not result.case.real], kept))
    used = {_cells(line)[-1] for line in (*real, *made)}
    parts = (real, [_MADE.strip("\n")], made, _where(results, used, before), _missing(results, [*real, *made]))
    texts = ("\n".join(part) for part in parts)
    return _INTRO + "\n" + "\n\n".join(filter(None, texts)) + "\n"


_KEY = (0, 2)
"""The cells that tell a row: its task and the way."""


def _scores(results: Sequence[Result], kept: Mapping[tuple[str, ...], str]) -> Iterator[str]:
    names = ("task", "model", "way", "rows", "score", "float", "engine", "paired", "SQNR", "speed", "CPU")
    yield from _head(*names)
    for result in results:
        for way, record in (("run, OpenVINO", result.run), ("convert, ONNX Runtime", result.convert)):
            task = f"`{result.case.task}`"
            if record is not None:
                yield _row(task, result.case.model, way, *_figures(record), _short(record))
            elif (task, way) in kept:
                yield kept[task, way]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def _short(record: RunRecord) -> str:
    """The name of the machine in the table: the last word of its CPU's that is no common one."""
    words = re.sub(r"\(.*?\)", "", str(record.machine["cpu"])).split()
    return next(word for word in reversed(words) if word not in ("Processor", "CPU"))


def _figures(record: RunRecord) -> list[str]:
    found = {score.form: score for score in record.scores}
    scores = [f"{found[which].value:.4f}" if which in found else "-" for which in ("float", "engine")]
    paired, rows, metric = "-", "-", "-"
    if "engine" in found:
        engine = found["engine"]
        rows, metric = str(engine.rows), engine.metric
        if engine.interval is not None:
            scores[-1] += f" [{engine.interval[0]:+.4f}, {engine.interval[1]:+.4f}]"
        figures = {name: value for name, value in engine.paired.items() if value is not None and name != "sqnr_db"}
        paired = ", ".join(f"{name} {value:.4g}" for name, value in figures.items()) or "-"
    distances = [output.sqnr_db for output in record.outputs if output.sqnr_db is not None]
    speed = "-"
    if record.latency is not None:
        speed = next((f"{one.ratio_to_float:.2f}x" for one in record.latency.engines if one.name == "engine"), "-")
    return [rows, metric, *scores, paired, f"{min(distances):.1f} dB" if distances else "-", speed]


def _where(results: Sequence[Result], used: set[str], before: str) -> Iterator[str]:
    """The machines of the rows, each with the first and the last day; those of kept rows as the page had them."""
    records = [record for result in results for record in (result.run, result.convert) if record is not None]
    told = {name: found.splitlines() for found, name in re.findall(r"(^- (\w+): .*(?:\n  .*)*)", before, re.MULTILINE)}
    for name in sorted({_short(record) for record in records}):
        mine = [record for record in records if _short(record) == name]
        days = sorted({record.created[:10] for record in mine})
        when, machine = " to ".join(days[:1] + days[1:][-1:]), mine[0].machine
        line = f"- {name}: {machine['cpu']} ({machine['instructions']}), {machine['cores']} cores; {when}"
        told[name] = wrap(line, 120, subsequent_indent="  ", break_on_hyphens=False)
    for name, lines in sorted(told.items()):
        yield from lines if name in used else ()


def _missing(results: Sequence[Result], rows: Sequence[str]) -> Iterator[str]:
    """The tasks without a row."""
    there = {_cells(line)[0] for line in rows}
    names = [name for result in results if (name := f"`{result.case.task}`") not in there]
    if names:
        yield from _wrapped(f"Not measured yet, of those in `benchmarks/tasks/cases.py`: {', '.join(names)}.")


def _wrapped(text: str) -> list[str]:
    return wrap(text, 120, break_on_hyphens=False)


def _head(*names: str) -> Iterator[str]:
    yield _row(*names)
    yield "|---" * len(names) + "|"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
