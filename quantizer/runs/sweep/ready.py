"""Checks of a sweep before its first run: what a later run lacks is told before the hours that come before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quantizer.config.sweep import SweepRun
from quantizer.errors import QuantizerError
from quantizer.runs.preflight.run_ready import ready_to_run
from quantizer.runs.run import RUN
from quantizer.runs.sweep.shared_work import needs

__all__ = ["SweepReady", "ready_to_sweep"]


@dataclass(frozen=True)
class SweepReady:
    """A sweep of which one run at least can start.

    Attributes:
        notes: what is worth knowing before it does, with an estimate of one run alone for each model and its rows.
        faults: why runs cannot start, by their names.
    """

    notes: tuple[str, ...]
    faults: dict[str, str]


def ready_to_sweep(runs: Sequence[SweepRun]) -> SweepReady:
    """Check all that the runs need besides the loaded models; what is the same for several runs is checked once.

    Raises:
        QuantizerError: no run can start; the message is that of the first.
    """
    known: dict[str, str | None] = {}
    notes: dict[str, None] = {}
    faults: dict[str, str] = {}
    for run in runs:
        config = run.config
        key = (
            f"{needs(config)} {config.quantizer.backend} {config.quantizer.candidates} {config.engine} {config.report}"
        )
        if key not in known:
            try:
                ready = ready_to_run(config, Path(config.output).absolute(), RUN, force=True)
                notes.update(dict.fromkeys(ready.notes))
                if ready.estimate is not None and not any(needs(config) in other for other in known):
                    notes[f"{run.name}, alone: {ready.estimate}"] = None
                known[key] = None
            except QuantizerError as error:
                known[key] = str(error)
        if (fault := known[key]) is not None:
            faults[run.name] = fault
    if runs and len(faults) == len(runs):
        raise QuantizerError(faults[runs[0].name])
    return SweepReady(tuple(notes), faults)
