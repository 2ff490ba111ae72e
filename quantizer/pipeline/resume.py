"""The files from which a command that was stopped goes on: they lie beside its folder until the folder is complete."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quantizer.algorithms.qat.checkpoint import check_checkpoints, remove_checkpoints
from quantizer.errors import QuantizerError
from quantizer.utils.files import Store, said_complete
from quantizer.utils.paths import is_folder

_LONGEST_ENDING = ".training"
"""Of the files from which a run resumes."""


@dataclass(frozen=True)
class ResumeFiles:
    """The files beside a run's folder from which it can resume, until the folder is complete.

    Attributes:
        scores: those of a search.
        training: the folder with the checkpoints of a training.
        times: those of engines, which stay, for a run that repeats this one.
        engines: those of a choice, and their scores.
    """

    scores: Store
    training: Path
    times: Store
    engines: Store


@contextmanager
def resume_files(folder: Path, *, searches: bool, trains: bool, chooses: bool = False) -> Iterator[ResumeFiles]:
    """Yield the files from which the same command resumes, and remove them after the block."""
    require_names(folder)
    # These raise now, and not after the calibration or the hours of a search.
    kept = ResumeFiles(
        scores=Store(folder.with_name(f"{folder.name}.search") if searches else None),
        training=folder.with_name(f"{folder.name}.training"),
        times=Store(folder.with_name(f"{folder.name}.times")),
        engines=Store(folder.with_name(f"{folder.name}.engines") if chooses else None),
    )
    if trains:
        check_checkpoints(kept.training)
    used = {"scores": kept.scores.folder, "checkpoints": kept.training if trains else None}
    used["engines"] = kept.engines.folder
    try:
        yield kept
    except KeyboardInterrupt as stop:
        there = [f"the {what} are kept in {path}" for what, path in used.items() if path is not None and path.exists()]
        # An interrupt that has a message came after the work was complete.
        if there and not stop.args:
            raise type(stop)(f"{', and '.join(there)}; the same command goes on with them") from stop
        raise
    except BaseException:
        kept.engines.clear()
        raise
    with said_complete(folder):
        kept.scores.clear()
        if trains:
            remove_checkpoints(kept.training)
        kept.engines.clear()


def require_names(folder: Path) -> None:
    """Raise if the files beside a folder would have longer names than its file system allows."""
    above = next(place for place in folder.absolute().parents if is_folder(place))
    most = os.pathconf(above, "PC_NAME_MAX") - len(_LONGEST_ENDING)
    size = len(os.fsencode(folder.name))
    if size > most:
        raise QuantizerError(
            f"{folder} cannot be written: its name has {size} bytes, and files beside it are called like it, with "
            f"endings such as {_LONGEST_ENDING}: choose a name of at most {most} bytes"
        )
