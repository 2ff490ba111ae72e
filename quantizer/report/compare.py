"""The comparison of runs: different settings, and score differences with their significance.

Scores are compared only for the same samples and metric. ``resamples.json`` in the folder of a run has its scores on
bootstrap resamples of the evaluation samples. Runs on the same samples draw the same resamples, so any two runs are
compared in pairs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from quantizer.errors import QuantizerError
from quantizer.report import text
from quantizer.report.record import LatencyEntry, RunRecord, SizeEntry, read_record
from quantizer.report.text import noise_sentence
from quantizer.report.verdict import verdict_of
from quantizer.utils.files import restore_folder, whole_file
from quantizer.utils.paths import is_file, is_folder, regular_file
from quantizer.utils.plain_values import decoded, json_values
from quantizer.utils.records import Score, paired_interval

RESAMPLES = "resamples.json"


@dataclass(frozen=True, kw_only=True)
class Resamples:
    """The scores of one run on bootstrap resamples.

    Attributes:
        samples_hash: a hash of the samples and their labels.
        metric: the name of the metric.
        scores: the score of each resample [R], by the form of the model, such as ``float`` and ``engine``.
    """

    samples_hash: str
    metric: str
    scores: Mapping[str, tuple[float, ...]]


def write_resamples(resamples: Resamples, folder: Path) -> None:
    """Write the resampled scores into the folder of a run."""
    with whole_file(folder / RESAMPLES) as part:
        part.write_text(json.dumps(asdict(resamples)) + "\n", encoding="utf-8")


def read_resamples(folder: Path) -> Resamples | None:
    """Return the resampled scores in the folder of a run; None without a file."""
    path = folder / RESAMPLES
    try:
        resamples: Resamples = decoded(Resamples, json_values(regular_file(path).read_bytes()), "the file")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise QuantizerError(f"{path} cannot be read ({error}); delete it to compare without intervals") from error
    return resamples


def run_folders(folder: Path) -> list[Path]:
    """Return the folders of finished runs in a folder, by name; empty for the folder of a run."""
    if not is_folder(folder) or is_file(folder / "report.json"):
        return []
    # Unfinished runs have hidden folders.
    below = (path for path in folder.iterdir() if not path.name.startswith("."))
    return sorted(path for path in below if is_file(path / "report.json"))


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One run.

    Attributes:
        name: its name in the comparison.
        folder: its folder.
        config: its configuration.
        record: its record; None: the run failed.
        resamples: its scores on resamples; None: not stored.
        error: why the run failed, or the goal that it missed; empty: neither.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    record: RunRecord | None = None
    resamples: Resamples | None = None
    error: str = ""
    settings: Mapping[str, Any] = field(init=False)
    """The configuration by dotted keys, without the output folder."""

    def __post_init__(self) -> None:
        settings = {key: value for key, value in _flat(self.config) if key != "output"}
        object.__setattr__(self, "settings", settings)

    def with_error(self, error: str) -> ComparedRun:
        """Return the run with an error."""
        return replace(self, error=error)

    @property
    def score(self) -> Score | None:
        """The score of the form nearest to the engine; None without a score."""
        return None if self.record is None else self.record.score

    @property
    def float_score(self) -> Score | None:
        """The score of the float model; None without a score."""
        return None if self.record is None else self.record.float_score

    @property
    def by_function(self) -> bool:
        """True if a function computed the score, so that the samples are unknown."""
        return self.score is not None and self.score.samples is None

    @property
    def resampled(self) -> Sequence[float] | None:
        """The resampled scores of the form in ``score``; None: not stored."""
        score = self.score
        return None if score is None or self.resamples is None else self.resamples.scores.get(score.form)

    @property
    def latency(self) -> LatencyEntry | None:
        """The latency of the engine; None if not measured."""
        return None if self.record is None or self.record.speeds is None else self.record.speeds[0]

    @property
    def reference(self) -> str | None:
        """The float engine to which the speed-up is relative; None: unknown."""
        return None if self.record is None or self.record.latency is None else self.record.latency.reference

    @property
    def sqnr_db(self) -> float | None:
        """The SQNR of the worst output in dB, infinite if equal to float; None: not measured."""
        worst = None if self.record is None else self.record.worst_output
        if worst is None:
            return None
        return math.inf if worst.sqnr_db is None else worst.sqnr_db

    @property
    def verdict(self) -> str | None:
        """The level of the verdict, such as ``usable``; None if the run failed."""
        return None if self.record is None else verdict_of(self.record).level

    @property
    def is_noisy(self) -> bool:
        """True if the latencies vary too much to trust their medians."""
        return self.record is not None and bool(noise_sentence(self.record.latency))

    @property
    def size(self) -> SizeEntry | None:
        """The size of the engine; None if not measured."""
        return None if self.record is None or self.record.sizes is None else self.record.sizes[0]

    @property
    def seconds(self) -> float | None:
        """The duration of the run in seconds; None if it failed."""
        return (
            None if self.record is None else sum(stage.seconds for stage in self.record.stages if stage.parent is None)
        )

    @property
    def timed_on(self) -> tuple[object, ...] | None:
        """The machine, shape and threads of the latency; None if not measured."""
        if self.record is None or self.record.latency is None:
            return None
        latency, machine = self.record.latency, self.record.machine
        return machine.get("cpu"), machine.get("cores"), latency.batch, latency.sequence, latency.threads


def failed_run(name: str, folder: Path, config: Mapping[str, Any], error: str) -> ComparedRun:
    """Return a run without a record."""
    return ComparedRun(name=name, folder=folder, config=config, error=error)


def read_run(path: Path, name: str) -> ComparedRun:
    """Return the run in a folder, or of a ``report.json``."""
    restore_folder(path)
    folder = path if path.is_dir() else path.parent
    if path.is_dir() and not (path / "report.json").exists():
        raise QuantizerError(
            f"{path} contains no report.json, and no folder in it does; expected a folder of `quantizer run`"
        )
    record = read_record(folder / "report.json" if path.is_dir() else path)
    return ComparedRun(name=name, folder=folder, config=record.config, record=record, resamples=read_resamples(folder))


def read_runs(paths: Sequence[Path]) -> list[ComparedRun]:
    """Return the runs of folders or files, each named by the shortest unique end of its path.

    The folder of a sweep, or of several conversions, stands for all its finished runs.
    """
    paths = [run for path in paths for run in run_folders(path) or [path]]
    places = [(path if path.is_dir() else path.parent).resolve() for path in paths]
    if len(places) < 2:
        raise QuantizerError(
            f"{len(places)} run to compare; expected two or more folders of `quantizer run`, or the folder of a sweep"
        )
    for place, path in zip(places, paths, strict=True):
        if places.count(place) > 1:
            raise QuantizerError(f"{path} is listed twice; expected each run once")
    return [read_run(path, name) for path, name in zip(paths, _names(places), strict=True)]


def _names(places: Sequence[Path]) -> list[str]:
    for length in range(1, max(len(place.parts) for place in places) + 1):
        names = ["/".join(place.parts[-length:]) for place in places]
        if len(set(names)) == len(names):
            return names
    return [str(place) for place in places]


def _flat(value: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, below in value.items():
        path = f"{above}.{key}" if above else key
        if isinstance(below, Mapping):
            yield from _flat(below, path)
        else:
            yield path, below


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The score difference of two runs.

    Attributes:
        first: the name of one run.
        second: the name of the other run.
        difference: the score of ``second`` minus that of ``first``; None: not comparable.
        interval: its 95% interval; None: unknown.
        why: why there is no interval or no difference; empty otherwise.
    """

    first: str
    second: str
    difference: float | None = None
    interval: tuple[float, float] | None = None
    why: str = ""

    @property
    def within_noise(self) -> bool:
        """True if the interval includes 0, so that the difference is not significant."""
        return self.interval is not None and self.interval[0] <= 0 <= self.interval[1]

    @property
    def verdict(self) -> str:
        """The result of the comparison in words."""
        if self.interval is None:
            return self.why
        return "within noise" if self.within_noise else "significant"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparison of runs.

    Attributes:
        runs: the runs, in the given order.
        differing: the values of each setting by run name, for settings that differ.
        best: the run with the best score, among those comparable with the first run; None without a score.
        to_best: each other run against ``best``, by name.
        pairs: all pairs of runs with a record.
        pareto_optimal: the names of the runs for which no other run is both faster and better.
        timed: the names of the runs whose latency and score are comparable with those of the first one.
        notes: sentences on what is not comparable.
    """

    runs: tuple[ComparedRun, ...]
    differing: Mapping[str, Mapping[str, Any]]
    best: ComparedRun | None
    to_best: Mapping[str, Pair]
    pairs: tuple[Pair, ...]
    pareto_optimal: frozenset[str]
    timed: frozenset[str]
    notes: tuple[str, ...]

    @property
    def by_output(self) -> bool:
        """True if a run has no score, so that runs are compared by their outputs."""
        return any(run.score is None and run.sqnr_db is not None for run in self.runs)

    @property
    def failed(self) -> tuple[ComparedRun, ...]:
        """The runs that failed, or missed a goal."""
        return tuple(run for run in self.runs if run.error)


def compare(runs: Sequence[ComparedRun]) -> Comparison:
    """Return the comparison of runs, including failed ones."""
    scored = [run for run in runs if run.score is not None]
    alike = [run for run in scored if not _not_comparable(scored[0], run)]
    best = _best(alike)
    rivals = [] if best is None else [run for run in scored if run is not best]
    timed = [run for run in alike if run.latency is not None]
    timed = [run for run in timed if run.timed_on == timed[0].timed_on]
    return Comparison(
        runs=tuple(runs),
        differing=_differing(runs),
        best=best,
        to_best={} if best is None else {run.name: pair(best, run) for run in rivals},
        pairs=tuple(pair(first, second) for first, second in combinations(scored, 2)),
        pareto_optimal=frozenset(run.name for run in timed if not any(_beats(other, run) for other in timed)),
        timed=frozenset(run.name for run in timed),
        notes=tuple(_notes(runs, scored, timed)),
    )


def pair(first: ComparedRun, second: ComparedRun) -> Pair:
    """Return the difference of two runs with scores."""
    why = _not_comparable(first, second)
    if why:
        return Pair(first=first.name, second=second.name, why=why)
    assert first.score is not None
    assert second.score is not None
    difference = second.score.value - first.score.value
    first_scores, second_scores = first.resampled, second.resampled
    if not first_scores or not second_scores:
        without = " and ".join(run.name for run in (first, second) if not run.resampled)
        lacking = "scored by a function" if first.by_function else f"no resamples.json in {without}"
        return Pair(first=first.name, second=second.name, difference=difference, why=f"no interval: {lacking}")
    # Runs draw the same resamples in the same order.
    length = min(len(first_scores), len(second_scores))
    interval = paired_interval(np.array(first_scores[:length]), np.array(second_scores[:length]))
    return Pair(first=first.name, second=second.name, difference=difference, interval=interval)


def _not_comparable(first: ComparedRun, second: ComparedRun) -> str:
    """Return why the scores of two runs are not comparable; empty if they are."""
    assert first.score is not None
    assert second.score is not None
    if first is second:
        return ""
    if first.score.metric != second.score.metric:
        return f"not compared: {first.score.metric} and {second.score.metric}"
    if first.resamples is not None and second.resamples is not None:
        same = first.resamples.samples_hash == second.resamples.samples_hash
    elif _function(first) is not None and _function(first) == _function(second):
        same = True
    elif first.by_function or second.by_function:
        return _other_function(first, second)
    else:
        same = _evaluation(first) == _evaluation(second) and first.score.samples == second.score.samples
    return "" if same else "not compared: scored on other samples"


def _other_function(first: ComparedRun, second: ComparedRun) -> str:
    """Return why scores by functions in Python are not comparable, since their samples are unknown; empty if they are.

    If the float models of both runs have the same score, the function and its samples are assumed to be the same.
    """
    first_float, second_float = first.float_score, second.float_score
    if first.by_function != second.by_function or first_float is None or second_float is None:
        return "not compared: their evaluation samples are not recorded"
    if _model(first) != _model(second):
        return "not compared: a function scored different models, on unknown samples"
    if first_float.value == second_float.value:
        return ""
    values = f"{text.score(first_float.value)} and {text.score(second_float.value)}"
    return f"not compared: the float models score {values}, because samples or weights differ"


def _function(run: ComparedRun) -> object:
    """Return the name of the scoring function in a configuration; None without one."""
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
    """Return whether ``other`` is better than ``run`` in latency or score, and not worse in the other."""
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
    values_of = {key: {run.name: run.settings.get(key) for run in runs} for key in keys}
    return {key: values for key, values in values_of.items() if any(v != values[runs[0].name] for v in values.values())}


def _notes(runs: Sequence[ComparedRun], scored: Sequence[ComparedRun], timed: Sequence[ComparedRun]) -> list[str]:
    notes = []
    ran = [run for run in runs if run.record is not None]
    models = dict.fromkeys((run.record.model.source, run.record.model.task) for run in ran if run.record is not None)
    if len(models) > 1:
        named = ", ".join(f"{source} ({task})" for source, task in models)
        notes.append(f"the runs have {len(models)} different models: {named}")
    notes += _score_notes(scored)
    references: dict[str, list[str]] = {}
    for run in ran:
        if run.reference is not None:
            references.setdefault(run.reference, []).append(run.name)
    if len(references) > 1:
        named = "; ".join(f"{reference} ({', '.join(names)})" for reference, names in references.items())
        notes.append(
            f"speed-ups are not comparable, because they are relative to different float engines: {named}; compare "
            f"latencies"
        )
    elsewhere = [run.name for run in ran if timed and run.timed_on not in (None, timed[0].timed_on)]
    if elsewhere:
        notes.append(
            f"latencies not compared with {timed[0].name}, and not in the chart: {', '.join(elsewhere)}; measured "
            "on another machine or at another shape"
        )
    if noisy := [run.name for run in ran if run.is_noisy]:
        notes.append(f"noisy timing: {', '.join(noisy)}; benchmark again on an idle machine")
    if failed := [run for run in runs if run.record is None]:
        notes.append(f"{text.counted(len(failed), 'run')} failed: {', '.join(run.name for run in failed)}")
    return notes


def _score_notes(scored: Sequence[ComparedRun]) -> list[str]:
    """Return notes on incomparable scores, assumptions, and missing intervals."""
    notes = []
    reasons = {run.name: _not_comparable(scored[0], run) for run in scored}
    names_by_reason: dict[str, list[str]] = {}
    for name, why in reasons.items():
        if why:
            names_by_reason.setdefault(why.removeprefix("not compared: "), []).append(name)
    for why, names in names_by_reason.items():
        notes.append(f"not compared with {scored[0].name}, and not in the chart: {', '.join(names)}; {why}")
    alike = [run for run in scored if run.by_function and _function(run) is None and not reasons[run.name]]
    if len(alike) > 1:
        float_score = alike[0].float_score
        assert float_score is not None
        notes.append(
            f"{text.counted(len(alike), 'run')} assumed to have the same evaluation samples, which a function does "
            f"not record: "
            f"the float model of each scores {text.score(float_score.value)}"
        )
    if by_function := [run.name for run in scored if not run.resampled and run.by_function]:
        notes.append(f"without intervals: {', '.join(by_function)}; a function returns one score, not one per sample")
    if blind := [run.name for run in scored if not run.resampled and not run.by_function]:
        notes.append(f"without intervals: {', '.join(blind)} without resamples.json in the folder of the run")
    return notes
