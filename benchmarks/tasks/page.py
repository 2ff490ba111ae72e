"""The page of the tasks: what INT8 does to a model of each."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap

from cases import Case

from quantizer.report import RunRecord
from quantizer.report import collect_machine

__all__ = ["Result", "page"]

_INTRO = """# Tasks

<!-- Made by `make tasks`: change benchmarks/tasks, not this page. -->

What INT8 does to a model of each of the [tasks](guide/tasks.md).

Each by `quantizer run` for OpenVINO and by `quantizer convert` for ONNX Runtime, with all defaults. The score is that
of float, proxy and engine on the same rows; behind the engine's the 95% interval of its difference to float, from
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


def page(results: Sequence[Result]) -> str:
    """The page, in Markdown."""
    real = [result for result in results if result.case.real]
    made = [result for result in results if not result.case.real]
    parts = (_scores(real), [_MADE.strip("\n")], _scores(made), _where(results), _missing(results))
    texts = ("\n".join(part) for part in parts)
    return _INTRO + "\n" + "\n\n".join(filter(None, texts)) + "\n"


def _scores(results: Sequence[Result]) -> Iterator[str]:
    yield from _head("task", "model", "way", "rows", "score", "float", "proxy", "engine", "paired", "SQNR", "speed")
    for result in results:
        for way, record in (("run, OpenVINO", result.run), ("convert, ONNX Runtime", result.convert)):
            if record is not None:
                yield _row(f"`{result.case.task}`", result.case.model, way, *_figures(record))


def _figures(record: RunRecord) -> list[str]:
    found = {score.which: score for score in record.scores}
    scores = [f"{found[which].value:.4f}" if which in found else "-" for which in ("float", "proxy", "engine")]
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


def _where(results: Sequence[Result]) -> Iterator[str]:
    """The machine of the first record, and the first and the last day."""
    records = [record for result in results for record in (result.run, result.convert) if record is not None]
    days = sorted({record.created[:10] for record in records})
    machine = records[0].machine if records else collect_machine()
    when = " to ".join(days[:1] + days[1:][-1:])
    yield from _wrapped(f"Machine: {machine['cpu']} ({machine['instructions']}), {machine['cores']} cores; {when}.")


def _missing(results: Sequence[Result]) -> Iterator[str]:
    """The tasks without a record."""
    names = [f"`{result.case.task}`" for result in results if result.run is None and result.convert is None]
    if names:
        yield from _wrapped(f"Not measured yet, of those in `benchmarks/tasks/cases.py`: {', '.join(names)}.")


def _wrapped(text: str) -> list[str]:
    return wrap(text, 120, break_on_hyphens=False)


def _head(*names: str) -> Iterator[str]:
    yield _row(*names)
    yield "|---" * len(names) + "|"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
