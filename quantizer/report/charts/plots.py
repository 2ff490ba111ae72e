"""Scatter plots and curves: scores of a search, runs, engines, plans between fast and accurate, and training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from quantizer.report import text
from quantizer.report.charts.axes import (
    BLUE,
    FILLED,
    GREEN,
    HOLLOW,
    ORANGE,
    RING,
    Axes,
    dot_sign,
    line_look,
    line_sign,
    quiet_look,
    svg_dot,
    svg_note,
    svg_text,
    svg_title,
)
from quantizer.report.record import Candidate, EngineChoice, FallbackPoint, LatencyFallback, TrainingRun
from quantizer.report.text import amount, counted, error, plain, significant
from quantizer.utils.records import Evaluation, FallbackRecord

_DASHED = line_look(ORANGE, "6 4")
_LABEL = 15
"""The smallest distance in pixels between two labels of the axis of drops."""


def pareto_svg(fallback: FallbackRecord) -> str:
    """Return all scores of a search with the Pareto front, the budget, and the chosen fallback.

    Drops may be negative, and span decades around a small budget. Their axis is therefore asinh(drop / budget): about
    linear up to the budget, and logarithmic beyond.
    """
    points = [point for point in fallback.evaluations if math.isfinite(point.drop) and math.isfinite(point.cost)]
    if not points:
        return svg_note("There was no search.")
    budget = fallback.max_drop if fallback.max_drop is not None else 0.0
    unit = budget if budget > 0 else min((abs(point.drop) for point in points if point.drop), default=1.0)
    heights = [math.asinh(drop / unit) for drop in (0.0, budget, *(point.drop for point in points))]
    cost = max((point.cost for point in points), default=0.0) or 1.0
    axes = Axes(
        across=(0.0, cost),
        up=(min(heights), max(max(heights), min(heights) + 1)),
        ends=(17, 97),
        height=220,
        margin=14,
        scale=lambda drop: math.asinh(drop / unit),
    )
    legend = [(dot_sign(FILLED), "Pareto-optimal"), (dot_sign(HOLLOW), "other evaluation")]
    if fallback.max_drop is not None:
        legend.append((line_sign(_DASHED), f"budget: drop {error(fallback.max_drop)}"))
    if any(point.chosen for point in fallback.evaluations):
        legend.append((dot_sign(RING, 6.5), "chosen"))
    inner = [
        axes.level(drop, error(drop), _DASHED if drop == budget else quiet_look(0.4 if drop == 0 else 0.12))
        for drop in _drops(axes, budget)
    ]
    inner += [axes.tick(value, amount(value)) for value in _round_costs(cost)]
    inner += axes.path(sorted((point.cost, point.drop) for point in points if point.pareto_optimal))
    # The chosen point comes last, so that no other point covers it.
    inner += [
        _evaluation(point, axes) for point in sorted(points, key=lambda point: (point.chosen, point.pareto_optimal))
    ]
    label = (
        f"Drop of the metric against the cost of groups in float: {counted(len(points), 'evaluation')}, "
        f"{sum(point.pareto_optimal for point in points)} of them Pareto-optimal; the budget is a drop of "
        f"{error(budget)}"
    )
    return axes.picture(label, legend, ("drop", "cost of groups in float"), inner, middle="57.0%", more=24)


def _drops(axes: Axes, budget: float) -> list[float]:
    """Return the drops to label: the budget, 0, and powers of ten that do not overlap."""
    drops: list[float] = []
    sizes = [10.0**power for power in range(9, -10, -1)]
    for drop in (budget, 0.0, *sizes, *(-size for size in sizes)):
        # Within the chart, and not over another label.
        if axes.up[0] <= axes.scale(drop) <= axes.up[1] and all(
            abs(axes.y(drop) - axes.y(other)) >= _LABEL for other in drops
        ):
            drops.append(drop)
    return drops


def _round_costs(largest: float) -> list[float]:
    """Return 0 and up to five round numbers, none above the largest cost."""
    step = _step(largest, (0.2, 0.5, 1, 2))
    return [step * number for number in range(math.floor(largest / step) + 1)]


def _step(span: float, shares: Sequence[float]) -> float:
    """Return a round number that fits at most five times into a span."""
    size = 10.0 ** math.floor(math.log10(span))
    return next(size * share for share in shares if span / (size * share) <= 5)


def _evaluation(point: Evaluation, axes: Axes) -> str:
    words = [*([", Pareto-optimal"] if point.pareto_optimal else []), *([", chosen"] if point.chosen else [])]
    title = (
        f"{counted(len(point.groups), 'group')} kept in float, cost {amount(point.cost)}: score "
        f"{significant(point.score)}, "
        f"drop {error(point.drop)}{''.join(words)}"
    )
    x, y = axes.x(point.cost), axes.y(point.drop)
    ring = svg_dot(x, y, 8.5, RING) if point.chosen else ""
    return svg_title(title, ring, svg_dot(x, y, 4.5, FILLED if point.pareto_optimal else HOLLOW))


@dataclass(frozen=True, kw_only=True)
class RunPoint:
    """One run in the chart.

    Attributes:
        number: its number in the table next to the chart.
        name: its name.
        milliseconds: the median latency of a batch in milliseconds.
        score: its score.
        pareto_optimal: whether no other run is better in both.
    """

    number: int
    name: str
    milliseconds: float
    score: float
    pareto_optimal: bool


def runs_svg(
    points: Sequence[RunPoint], metric: str, floats: Mapping[str, float], *, higher_is_better: bool = True
) -> str:
    """Return the runs, numbered, by latency and score; faster runs are further right."""
    if not points:
        return svg_note("No run has both a score and a latency.")
    slowest, fastest = (pick(point.milliseconds for point in points) for pick in (max, min))
    scores = [*(point.score for point in points), *floats.values()]
    low, high = min(scores), max(scores)
    axes = Axes(across=(slowest, fastest), up=(low, high), ends=(20, 92), height=220, margin=26, name_at=20)
    legend = [(dot_sign(FILLED), "Pareto-optimal"), (dot_sign(HOLLOW), "slower and worse than another run")]
    legend += [(line_sign(_DASHED), "float")] if floats else []
    inner = [axes.level(score, text.score(score), quiet_look(0.15)) for score in sorted({low, high})]
    inner += [axes.level(score, text.score(score), _DASHED) for score in sorted(set(floats.values()))]
    front = sorted((point for point in points if point.pareto_optimal), key=lambda point: -point.milliseconds)
    inner += axes.path([(point.milliseconds, point.score) for point in front])
    inner += [_run(point, axes) for point in sorted(points, key=lambda point: point.pareto_optimal)]
    inner += [axes.tick(ms, text.milliseconds(ms)) for ms in sorted({slowest, fastest})]
    label = f"{metric} against latency of {counted(len(points), 'run')}, {len(front)} of them Pareto-optimal"
    up = metric if higher_is_better else f"{metric} (lower is better)"
    return axes.picture(label, legend, (up, "latency of a batch (faster to the right)"), inner)


def _run(point: RunPoint, axes: Axes) -> str:
    x, y = axes.x(point.milliseconds), axes.y(point.score)
    title = f"{point.name}: {text.score(point.score)}, {text.milliseconds(point.milliseconds)}"
    dot = svg_dot(x, y, 5, FILLED if point.pareto_optimal else HOLLOW)
    return svg_title(title, dot, svg_text(x, y - 9, str(point.number), "qz-value", "middle"))


_KINDS = {"quantized": BLUE, "float": ORANGE}
_TOP_DB = 60.0
_NEAR, _LETTER = 0.05, 16
"""Points within this share of the width and this many pixels of height share a label."""


def candidates_svg(choice: EngineChoice) -> str:
    """Return the candidates that ran, numbered, by speed over all shapes and accuracy.

    Accuracy is the score difference to the float model if all candidates have one, else the SQNR of the outputs. Float
    engines have 100 dB and more, INT8 engines 15 to 40 dB: values above 60 dB are drawn at the top.
    """
    ran = [candidate for candidate in choice.candidates if candidate.milliseconds]
    if not ran:
        return svg_note("No engine ran.")
    ratios = [candidate.times_of(ran[0]) for candidate in ran]
    most = max(ratios) / min(ratios)
    speeds = [max(ratios) / ratio for ratio in ratios]
    differences = [candidate.score_difference for candidate in ran if candidate.score_difference is not None]
    if len(differences) == len(ran):
        name, meaning, nearness = "score difference", "Score difference to the float model", differences
        low, high = min(0.0, *differences), max(0.0, *differences)
        levels = [(value, text.signed(value) if value else "0") for value in sorted({low, 0.0, high})]
        low, high = (low, high) if low != high else (-1.0, 1.0)
    else:
        name, meaning, low, high = "SQNR, dB", "SQNR of the outputs", 0.0, _TOP_DB
        # Outputs equal to float are at the top.
        nearness = [_TOP_DB if candidate.sqnr_db is None else candidate.sqnr_db for candidate in ran]
        levels = [(0.0, "0"), (20.0, "20"), (40.0, "40"), (_TOP_DB, f"{_TOP_DB:g}+")]
    axes = Axes(
        across=(1.0, most),
        up=(low, high),
        ends=(19, 94),
        height=200,
        margin=24,
        gap=22,
        name_at=16,
        below=26,
        scale=lambda value: min(max(value, low), high),
    )
    shares = [(speed - 1) / (most - 1) if most > 1 else 0.5 for speed in speeds]
    labels = _labels(list(zip(shares, map(axes.y, nearness), strict=True)))
    inner = [axes.level(value, shown, quiet_look(0.15)) for value, shown in levels]
    inner += [axes.tick(speed, text.times(speed)) for speed in dict.fromkeys((1.0, most))]
    for number, candidate, speed, near in zip(labels, ran, speeds, nearness, strict=True):
        inner.append(_candidate(number, candidate, axes.x(speed), axes.y(near), choice.shapes))
    where = f"at {choice.shapes[0]}" if len(choice.shapes) == 1 else "averaged over shapes"
    legend = [(dot_sign(f'fill="{colour}"', 5), kind) for kind, colour in _KINDS.items()]
    label = f"{meaning} against speed of {counted(len(ran), 'engine')}; {choice.headline}"
    return axes.picture(label, legend, (name, f"speed relative to the slowest engine, {where}"), inner)


def _labels(places: Sequence[tuple[float, float]]) -> list[str]:
    """Return the number of each engine; engines that overlap have all numbers at the first of them."""
    together: list[list[int]] = []
    for row, (share, height) in enumerate(places):
        near = (
            group
            for group in together
            if abs(share - places[group[0]][0]) < _NEAR and abs(height - places[group[0]][1]) < _LETTER
        )
        group_nearby = next(near, None)
        if group_nearby is None:
            together.append([row])
        else:
            group_nearby.append(row)
    labels = {group[0]: ", ".join(str(row + 1) for row in group) for group in together}
    return [labels.get(row, "") for row in range(len(places))]


def _candidate(label: str, candidate: Candidate, x: str, y: float, shapes: Sequence[str]) -> str:
    ring = svg_dot(x, y, 9, RING) if candidate.verdict == "chosen" else ""
    times = candidate.milliseconds
    title = f"{candidate.name}: {times[-1]:.2f} ms at {shapes[len(times) - 1]}, {candidate.verdict}"
    # Numbers, because the names of similar engines would overlap.
    words = svg_text(x, y - 13, label, "qz-value", "middle") if label else ""
    dot = svg_dot(x, y, 5, f'fill="{_KINDS["float" if candidate.is_float else "quantized"]}"')
    return svg_title(title, ring, dot, words)


def frontier_svg(latency_fallback: LatencyFallback) -> str:
    """Return the plans with one more group in float each, by predicted latency and error, and the chosen one.

    The result is empty if no sensitivity was measured.
    """
    points = latency_fallback.frontier
    if len(points) < 2:
        return ""
    fast, slow = (pick(point.milliseconds for point in points) for pick in (min, max))
    most = max(point.error for point in points) or 1.0
    axes = Axes(across=(fast, slow), up=(0, most), ends=(19, 90), height=200, margin=14, gap=22, name_at=16, below=26)

    def mark(point: FallbackPoint, colour: str, radius: int) -> str:
        title = f"{counted(point.float_groups, 'group')} in float: {text.milliseconds(point.milliseconds)}"
        dot = svg_dot(axes.x(point.milliseconds), axes.y(point.error), radius, f'fill="{colour}"')
        return svg_title(f"{title}, error {error(point.error)}", dot)

    # The chosen plan may lie off the line: a search decides by the score.
    chosen = min(points, key=lambda point: abs(point.milliseconds - latency_fallback.predicted_ms))
    inner = [
        axes.level(0, "", quiet_look(0.3)),
        *(mark(point, BLUE, 4) for point in points),
        mark(chosen, ORANGE, 7),
        *(svg_text(at, 204, text.milliseconds(ms), "qz-value", "middle") for at, ms in (("19%", fast), ("90%", slow))),
        *(svg_text("15.5%", axes.y(at) + 4, shown, "qz-value", "end") for at, shown in ((0, "0"), (most, error(most)))),
    ]
    legend = [(dot_sign(f'fill="{colour}"', 5), name) for name, colour in (("plan", BLUE), ("chosen plan", ORANGE))]
    label = f"Error against predicted latency of {counted(len(points), 'plan')}"
    return axes.picture(label, legend, ("remaining error", "predicted latency"), inner)


_POINTS = 200
"""The most points of a curve; longer curves are averaged over neighbouring steps."""
_LARGEST = 1e300
"""The largest magnitude in a chart, so that differences of two values are finite."""


def loss_svg(training: TrainingRun) -> str:
    """Return the curve of the loss over the steps."""
    if not training.losses:
        return svg_note("There was no training step.")
    stride = math.ceil(len(training.losses) / _POINTS)
    parts = [training.losses[at : at + stride] for at in range(0, len(training.losses), stride)]
    points = [(at * stride + (len(part) + 1) / 2, sum(part) / len(part)) for at, part in enumerate(parts)]
    axes = _of_training(training, [0.0, *(loss for _, loss in points)])
    label = f"Loss over {counted(len(training.losses), 'step')}: from {plain(points[0][1])} to {plain(points[-1][1])}"
    return _training_picture(axes, training, label, "loss", [], _curve(axes, points))


def score_svg(training: TrainingRun) -> str:
    """Return the scores on the tuning samples, with lines for the float model and PTQ."""
    points = [(float(entry.step), entry.score) for entry in training.scores]
    axes = _of_training(training, [training.float_score, *(score for _, score in points)])
    lines = [
        ("float", training.float_score, line_look(GREEN, "2 3")),
        ("PTQ", points[0][1], line_look(ORANGE, "7 4")),
    ]
    legend = [(line_sign(look), f"{name}: {plain(value)}") for name, value, look in lines]
    inner = [axes.level(value, "", look) for _, value, look in lines] + _curve(axes, points)
    for step, score in points:
        x, y = axes.x(step), axes.y(score)
        title = f"<title>after {step:.0f} steps: {plain(score)}</title>"
        inner.append(f'<circle cx="{x}" cy="{y}" r="4.5" {FILLED}>{title}</circle>')
    best = next((entry for entry in training.scores if entry.best), None)
    if best is not None:
        legend.append((dot_sign(RING, 6.5), f"restored: {plain(best.score)} after {best.step} steps"))
        inner.append(svg_dot(axes.x(best.step), axes.y(best.score), 8.5, RING))
    label = (
        f"{training.metric} on the tuning samples over the training: {plain(points[0][1])} before, "
        f"{plain(points[-1][1])} at the end, {plain(training.float_score)} in float"
    )
    return _training_picture(axes, training, label, training.metric, legend, inner)


def training_caption(training: TrainingRun) -> str:
    """Return a summary of the training in a line."""
    steps = f"{len(training.losses):,} of {counted(training.planned_steps, 'step')}"
    ended = f", stopped: {training.stopped}" if training.stopped else ""
    best = next((entry for entry in training.scores if entry.best), None)
    restored = "" if best is None else f"; the state after {counted(best.step, 'step')} was restored"
    return f"{steps}{ended}{restored}"


def _of_training(training: TrainingRun, values: Sequence[float]) -> Axes:
    drawn = [_drawable(value) for value in values]
    low, high = min(drawn), max(drawn)
    room = (high - low) * 0.08 or abs(high) * 0.01 or 1.0
    return Axes(
        across=(0, max(training.planned_steps, 1)),
        up=(low - room, high + room),
        ends=(14, 98),
        left=14,
        height=180,
        margin=12,
        gap=14,
        name_at=12,
        below=22,
        scale=_drawable,
    )


def _drawable(value: float) -> float:
    """Return a value, limited so that differences of values are finite; NaN becomes 0."""
    return 0.0 if math.isnan(value) else max(-_LARGEST, min(_LARGEST, value))


def _curve(axes: Axes, points: Sequence[tuple[float, float]]) -> list[str]:
    return axes.path(points, more=' stroke-linecap="round"')


def _training_picture(
    axes: Axes, training: TrainingRun, label: str, name: str, legend: Iterable[tuple[str, str]], inner: Iterable[str]
) -> str:
    grid = [*_grid(axes), axes.tick(0, "0", "start", 6), axes.tick(axes.across[1], f"{axes.across[1]:,}", "end", 6)]
    return axes.picture(label, legend, (name, "steps"), [*grid, *inner], middle="56.0%", more=24)


def _grid(axes: Axes) -> Iterator[str]:
    """Yield lines at round values, with labels."""
    low, high = axes.up
    unit = _step(high - low, (0.1, 0.2, 0.5, 1, 2))
    for number in range(math.ceil(low / unit), math.floor(high / unit) + 1):
        yield axes.level(number * unit, f"{round(number * unit, 12):g}", quiet_look(0.12))
