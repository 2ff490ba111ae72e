"""The comparison of runs: what differs in their configurations, and which differences of scores are more than noise.

Two scores are compared only if they are of the same rows and metric; their interval is that of pairs of resamples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from quantizer.report.compare.compared_run import ComparedRun
from quantizer.report.tables import text
from quantizer.tasks.metrics import paired_interval


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The scores of two runs.

    Attributes:
        first: the name of one run.
        second: that of the other one.
        difference: the score of ``second`` less that of ``first``; None: they cannot be compared.
        interval: its 95% interval; None: there is none.
        why: why there is no interval or no difference; empty: there is one.
    """

    first: str
    second: str
    difference: float | None = None
    interval: tuple[float, float] | None = None
    why: str = ""

    @property
    def within_noise(self) -> bool:
        """True if the interval holds 0, so that the rows show no certain difference."""
        return self.interval is not None and self.interval[0] <= 0 <= self.interval[1]

    @property
    def verdict(self) -> str:
        """The pair in words."""
        if self.interval is None:
            return self.why
        return "within noise" if self.within_noise else "a real difference"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs side by side.

    Attributes:
        runs: the runs, in the order in which they were given.
        differing: the value of each key by run name, for the keys that are not the same in all runs.
        best: the run with the best score, of those that can be compared with the first; None: there is no score.
        to_best: each other run against ``best``, by its name.
        pairs: all pairs of runs that have a record.
        front: the names of the runs that no other one beats in both speed and score.
        timed: the names of the runs whose speed and score can be compared with those of the first one.
        notes: what is not comparable, in words.
    """

    runs: tuple[ComparedRun, ...]
    differing: Mapping[str, Mapping[str, Any]]
    best: ComparedRun | None
    to_best: Mapping[str, Pair]
    pairs: tuple[Pair, ...]
    front: frozenset[str]
    timed: frozenset[str]
    notes: tuple[str, ...]

    @property
    def by_output(self) -> bool:
        """True if a run has no score, so that the outputs have to tell its accuracy."""
        return any(run.score is None and run.sqnr_db is not None for run in self.runs)

    @property
    def failed(self) -> tuple[ComparedRun, ...]:
        """The runs that failed, or missed a goal."""
        return tuple(run for run in self.runs if run.error)


def compare(runs: Sequence[ComparedRun]) -> Comparison:
    """Return the comparison of runs, some of which may have failed."""
    scored = [run for run in runs if run.score is not None]
    alike = [run for run in scored if not _not_comparable(scored[0], run)]
    best = _best(alike)
    others = [] if best is None else [run for run in scored if run is not best]
    timed = [run for run in alike if run.latency is not None]
    timed = [run for run in timed if run.timed_on == timed[0].timed_on]
    return Comparison(
        runs=tuple(runs),
        differing=_differing(runs),
        best=best,
        to_best={} if best is None else {run.name: pair(best, run) for run in others},
        pairs=tuple(pair(first, second) for first, second in combinations(scored, 2)),
        front=frozenset(run.name for run in timed if not any(_beats(other, run) for other in timed)),
        timed=frozenset(run.name for run in timed),
        notes=tuple(_notes(runs, scored, timed)),
    )


def pair(first: ComparedRun, second: ComparedRun) -> Pair:
    """Return the difference of two runs that have scores."""
    why = _not_comparable(first, second)
    if why:
        return Pair(first=first.name, second=second.name, why=why)
    assert first.score is not None
    assert second.score is not None
    difference = second.score.value - first.score.value
    one, other = first.resampled, second.resampled
    if not one or not other:
        without = " and ".join(run.name for run in (first, second) if not run.resampled)
        lacking = "scored by a function" if first.by_function else f"no resamples.json in {without}"
        return Pair(first=first.name, second=second.name, difference=difference, why=f"no interval: {lacking}")
    # Of fewer resamples in one run, the first are those of the other one.
    length = min(len(one), len(other))
    interval = paired_interval(np.array(one[:length]), np.array(other[:length]))
    return Pair(first=first.name, second=second.name, difference=difference, interval=interval)


def _not_comparable(first: ComparedRun, second: ComparedRun) -> str:
    """Return why the scores of two runs are not of the same thing; empty if they are."""
    assert first.score is not None
    assert second.score is not None
    if first is second:
        return ""
    if first.score.metric != second.score.metric:
        return f"not compared: {first.score.metric} and {second.score.metric}"
    if first.resamples is not None and second.resamples is not None:
        same = first.resamples.rows == second.resamples.rows
    elif _function(first) is not None and _function(first) == _function(second):
        same = True
    elif first.by_function or second.by_function:
        return _other_function(first, second)
    else:
        same = _evaluation(first) == _evaluation(second) and first.score.rows == second.score.rows
    return "" if same else "not compared: scored on other rows"


def _other_function(first: ComparedRun, second: ComparedRun) -> str:
    """Return why functions given in Python may score on different rows, of which nothing is recorded.

    One that gives the float model of both runs one score is taken for the same function of the same rows.
    """
    one, other = first.float_score, second.float_score
    if first.by_function != second.by_function or one is None or other is None:
        return "not compared: on which rows they were scored is not recorded"
    if _model(first) != _model(second):
        return "not compared: a function scored different models, on rows that are not recorded"
    if one.value == other.value:
        return ""
    values = f"{text.score(one.value)} and {text.score(other.value)}"
    return f"not compared: the float models score {values}, on other rows or with other weights"


def _function(run: ComparedRun) -> object:
    """Return the name of the function of a configuration that scored a run; None: a task did, or one in Python."""
    return run.config.get("model", {}).get("metric")


def _model(run: ComparedRun) -> tuple[object, ...]:
    assert run.record is not None
    return run.record.model.source, run.record.model.task, run.record.model.parameters


def _evaluation(run: ComparedRun) -> object:
    return run.config.get("data", {}).get("evaluation")


def _best(runs: Sequence[ComparedRun]) -> ComparedRun | None:
    def merit(run: ComparedRun) -> float:
        assert run.score is not None
        return run.score.value if run.score.higher_is_better else -run.score.value

    return max(runs, key=merit, default=None)


def _beats(other: ComparedRun, run: ComparedRun) -> bool:
    """Return whether ``other`` is at least as fast and as good as ``run``, and better in one of both."""
    assert other.score is not None
    assert run.score is not None
    assert other.latency is not None
    assert run.latency is not None
    sign = 1 if run.score.higher_is_better else -1
    gain = sign * (other.score.value - run.score.value)
    faster = run.latency.median_ms - other.latency.median_ms
    return gain >= 0 and faster >= 0 and (gain > 0 or faster > 0)


def _differing(runs: Sequence[ComparedRun]) -> dict[str, dict[str, Any]]:
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    found = {key: {run.name: run.settings.get(key) for run in runs} for key in keys}
    return {key: values for key, values in found.items() if any(v != values[runs[0].name] for v in values.values())}


def _notes(runs: Sequence[ComparedRun], scored: Sequence[ComparedRun], timed: Sequence[ComparedRun]) -> list[str]:
    notes = []
    ran = [run for run in runs if run.record is not None]
    models = dict.fromkeys((run.record.model.source, run.record.model.task) for run in ran if run.record is not None)
    if len(models) > 1:
        named = ", ".join(f"{source} ({task})" for source, task in models)
        notes.append(f"the runs are of {len(models)} models, so that more than the settings differs: {named}")
    notes += _score_notes(scored)
    references: dict[str, list[str]] = {}
    for run in ran:
        if run.reference is not None:
            references.setdefault(run.reference, []).append(run.name)
    if len(references) > 1:
        named = "; ".join(f"{told} ({', '.join(names)})" for told, names in references.items())
        notes.append(
            f"speeds are not comparable, for they are relative to different float engines: {named}; compare ms"
        )
    elsewhere = [run.name for run in ran if timed and run.timed_on not in (None, timed[0].timed_on)]
    if elsewhere:
        notes.append(
            f"times not compared with that of {timed[0].name}, and not in the picture: {', '.join(elsewhere)}; timed "
            "on another machine or at another shape"
        )
    if noisy := [run.name for run in ran if run.is_noisy]:
        notes.append(f"noisy timing: {', '.join(noisy)}; measure again on a machine that does nothing else")
    if failed := [run for run in runs if run.record is None]:
        notes.append(f"{text.counted(len(failed), 'run')} failed: {', '.join(run.name for run in failed)}")
    return notes


def _score_notes(scored: Sequence[ComparedRun]) -> list[str]:
    """Return which scores are not compared with that of the first run, on what evidence others are, and what lacks."""
    notes = []
    reasons = {run.name: _not_comparable(scored[0], run) for run in scored}
    others: dict[str, list[str]] = {}
    for name, why in reasons.items():
        if why:
            others.setdefault(why.removeprefix("not compared: "), []).append(name)
    for why, names in others.items():
        notes.append(f"not compared with {scored[0].name}, and not in the picture: {', '.join(names)}; {why}")
    alike = [run for run in scored if run.by_function and _function(run) is None and not reasons[run.name]]
    if len(alike) > 1:
        float_score = alike[0].float_score
        assert float_score is not None
        notes.append(
            f"{text.counted(len(alike), 'run')} taken as scored on the same rows, which a function does not record: "
            f"the float model of each scores {text.score(float_score.value)}"
        )
    if by_function := [run.name for run in scored if not run.resampled and run.by_function]:
        notes.append(f"without intervals: {', '.join(by_function)}; a function gives one score, and none of each row")
    if blind := [run.name for run in scored if not run.resampled and not run.by_function]:
        notes.append(f"without intervals: {', '.join(blind)} holds no resamples.json, which runs write beside a report")
    return notes
