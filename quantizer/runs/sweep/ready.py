"""Checks of a sweep before its first run: what a later run lacks is told before the hours that come before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quantizer.config.sweep import SweepRun
from quantizer.errors import QuantizerError
from quantizer.runs.preflight.faults import Looks
from quantizer.runs.preflight.run_ready import ready_to_run
from quantizer.runs.run import RUN
from quantizer.runs.sweep.shared_work import needs

_ESTIMATES = 4
"""How many runs are estimated: an estimate takes longer than all other checks of a run."""


@dataclass(frozen=True)
class SweepReady:
    """A sweep of which one run at least can start.

    Attributes:
        notes: what is worth knowing before it does, with an estimate of one run alone for each of the first
            models and rows.
        faults: why runs cannot start, by their names.
    """

    notes: tuple[str, ...]
    faults: dict[str, str]


def ready_to_sweep(runs: Sequence[SweepRun]) -> SweepReady:
    """Check all that each run needs besides its loaded model.

    Raises:
        QuantizerError: no run can start; the message is that of the first.
    """
    notes: dict[str, None] = {}
    estimated: set[str] = set()
    faults: dict[str, str] = {}
    looks = Looks()
    for run in runs:
        estimates = len(estimated) < _ESTIMATES and needs(run.config) not in estimated
        folder = Path(run.config.output).absolute()
        try:
            ready = ready_to_run(run.config, folder, RUN, force=True, looks=looks, estimated=estimates)
        except QuantizerError as error:
            faults[run.name] = str(error)
            continue
        notes.update(dict.fromkeys(ready.notes))
        if ready.estimate is not None:
            estimated.add(needs(run.config))
            notes[f"{run.name}, alone: {ready.estimate}"] = None
    if runs and len(faults) == len(runs):
        raise QuantizerError(faults[runs[0].name])
    return SweepReady(tuple(notes), faults)
