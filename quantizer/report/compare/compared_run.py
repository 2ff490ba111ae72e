"""One run of a comparison: its record, or why there is none, and the figures that it is compared by."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quantizer.errors import QuantizerError
from quantizer.files import restore_folder
from quantizer.report.codec import read_record
from quantizer.report.compare.resamples import Resamples, read_resamples
from quantizer.report.compare.run_folders import run_folders
from quantizer.report.ratios import quantized_entry
from quantizer.report.record import LatencyEntry, RunRecord, Score, SizeEntry
from quantizer.report.run_records import worst_output
from quantizer.report.tables.headline import quantized_score
from quantizer.report.tables.text import noise_sentence
from quantizer.report.verdict import verdict_of


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One run.

    Attributes:
        name: its name in the comparison.
        folder: its folder.
        config: its configuration.
        record: its record; None: it failed.
        resamples: its scores on resamples; None: it keeps none.
        error: what it failed of, or a goal that it missed; empty: nothing.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    record: RunRecord | None = None
    resamples: Resamples | None = None
    error: str = ""
    settings: Mapping[str, Any] = field(init=False)
    """The configuration as values by keys in dots, without the place of the folder."""

    def __post_init__(self) -> None:
        settings = {key: value for key, value in _flat(self.config) if key != "output"}
        object.__setattr__(self, "settings", settings)

    def with_error(self, error: str) -> ComparedRun:
        """Return the run with what is wrong with it."""
        return replace(self, error=error)

    @property
    def score(self) -> Score | None:
        """The score of the form nearest to the engine; None if there is none."""
        return None if self.record is None else quantized_score(self.record.scores)

    @property
    def float_score(self) -> Score | None:
        """The score of the float model; None if there is none."""
        scores = () if self.record is None else self.record.scores
        return next((score for score in scores if score.which == "float"), None)

    @property
    def by_function(self) -> bool:
        """True if a function gave the score, of which no rows are known; False if there is none."""
        return self.score is not None and self.score.rows is None

    @property
    def resampled(self) -> Sequence[float] | None:
        """The scores of that form on resamples; None: none are kept."""
        score = self.score
        return None if score is None or self.resamples is None else self.resamples.scores.get(score.which)

    @property
    def latency(self) -> LatencyEntry | None:
        """The latency of the engine; None if it was not timed."""
        timed = None if self.record is None else self.record.latency
        return None if timed is None else quantized_entry(timed.engines)

    @property
    def reference(self) -> str | None:
        """The float engine to which the speed of the engine is relative; None: not timed, or not recorded."""
        return None if self.record is None or self.record.latency is None else self.record.latency.reference

    @property
    def sqnr_db(self) -> float | None:
        """The SQNR of its worst output in dB, infinite if it is equal to float's; None: it was not measured."""
        worst = None if self.record is None else worst_output(self.record.outputs)
        if worst is None:
            return None
        return math.inf if worst.sqnr_db is None else worst.sqnr_db

    @property
    def verdict(self) -> str | None:
        """The level of the verdict on the run, such as ``usable``; None if it failed."""
        return None if self.record is None else verdict_of(self.record).level

    @property
    def is_noisy(self) -> bool:
        """True if the times of its engines vary so much that their medians are not to be trusted."""
        return self.record is not None and bool(noise_sentence(self.record.latency))

    @property
    def size(self) -> SizeEntry | None:
        """The size of the engine; None if it was not measured."""
        return None if self.record is None else quantized_entry(self.record.size)

    @property
    def seconds(self) -> float | None:
        """The seconds that the stages of the run took; None if it failed."""
        return (
            None if self.record is None else sum(stage.seconds for stage in self.record.stages if stage.inside is None)
        )

    @property
    def timed_on(self) -> tuple[object, ...] | None:
        """The machine and the shape, on which a time depends besides the engine; None if nothing was timed."""
        if self.record is None or self.record.latency is None:
            return None
        latency, machine = self.record.latency, self.record.machine
        return machine.get("cpu"), machine.get("cores"), latency.batch, latency.sequence, latency.threads


def failed_run(name: str, folder: Path, config: Mapping[str, Any], error: str) -> ComparedRun:
    """Return a run that has no record."""
    return ComparedRun(name=name, folder=folder, config=config, error=error)


def read_run(path: Path, name: str) -> ComparedRun:
    """Return the run in a folder, or of a ``report.json``."""
    restore_folder(path)
    folder = path if path.is_dir() else path.parent
    if path.is_dir() and not (path / "report.json").exists():
        raise QuantizerError(
            f"{path} holds no report.json, and no folder in it does; expected a folder that `quantizer run` wrote"
        )
    record = read_record(folder / "report.json" if path.is_dir() else path)
    return ComparedRun(name=name, folder=folder, config=record.config, record=record, resamples=read_resamples(folder))


def read_runs(paths: Sequence[Path]) -> list[ComparedRun]:
    """Return the runs of folders or files, each by the shortest end of its path that no other one has.

    The folder of a sweep, or of several conversions, stands for all finished runs in it.
    """
    paths = [run for path in paths for run in run_folders(path) or [path]]
    places = [(path if path.is_dir() else path.parent).resolve() for path in paths]
    if len(places) < 2:
        raise QuantizerError(
            f"{len(places)} run to compare; expected two or more folders that `quantizer run` wrote, or that of a sweep"
        )
    for place, path in zip(places, paths, strict=True):
        if places.count(place) > 1:
            raise QuantizerError(f"{path} is named twice; expected each run once")
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
