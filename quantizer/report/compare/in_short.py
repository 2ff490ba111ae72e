"""A comparison in short: the sentence above its tables, and its picture."""

from __future__ import annotations

from quantizer.report.charts.runs_plot import RunPoint, runs_svg
from quantizer.report.compare.compared_run import ComparedRun
from quantizer.report.compare.comparison import Comparison
from quantizer.report.compare.tables import decibels_or_equal, in_order
from quantizer.report.tables import text


def comparison_sentence(comparison: Comparison) -> str:
    """Return which run is the best and which the fastest or, without a score, whose outputs are nearest to float."""
    return _nearest(comparison) if comparison.best is None else _best(comparison, comparison.best)


def comparison_svg(comparison: Comparison) -> str:
    """Return the scores of the runs against their speed as an ``<svg>`` element; numbers are those of the table."""
    points: list[RunPoint] = []
    floats: dict[str, float] = {}
    for number, run in enumerate(in_order(comparison), start=1):
        if run.name not in comparison.timed or run.score is None or run.latency is None or run.record is None:
            continue
        front = run.name in comparison.front
        ms = run.latency.median_ms
        points.append(RunPoint(number=number, name=run.name, milliseconds=ms, score=run.score.value, front=front))
        base = next((score.value for score in run.record.scores if score.which == "float"), None)
        if base is not None:
            floats[run.record.model.source] = base
    best = None if comparison.best is None else comparison.best.score
    if best is None:
        return runs_svg(points, "score", floats)
    return runs_svg(points, best.metric, floats, higher_is_better=best.higher_is_better)


def _nearest(comparison: Comparison) -> str:
    """Return, where no run has a score, whose outputs are nearest to those of its float model."""
    measured = [run for run in in_order(comparison) if run.sqnr_db is not None]
    if not measured or measured[0].sqnr_db is None:
        return "No run has a score."
    far = decibels_or_equal(measured[0].sqnr_db)
    told = "equal to" if far == "equal" else f"{far} dB from"
    return f"No run has a score. The outputs of {measured[0].name} are the nearest: {told} those of its float model."


def _best(comparison: Comparison, best: ComparedRun) -> str:
    assert best.score is not None
    others = len(comparison.to_best)
    noise = sum(one.within_noise for one in comparison.to_best.values())
    words = f"The best score is {text.score(best.score.value)}, of {best.name}."
    if others and noise:
        words += f" Within noise of it: {noise} of the {text.counted(others, 'other run')}."
    timed = [run for run in comparison.runs if run.name in comparison.timed and run.latency is not None]
    if timed:
        fastest = min(timed, key=lambda run: run.latency.median_ms if run.latency is not None else 0.0)
        assert fastest.latency is not None
        words += f" The fastest is {fastest.name}, {text.milliseconds(fastest.latency.median_ms)} a batch"
        words += ", by a noisy timing." if fastest.is_noisy else "."
    return words
