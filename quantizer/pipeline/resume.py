"""Files from which an interrupted command resumes, next to its unfinished output folder or in a folder of the user."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from quantizer.algorithms.qat.checkpoint import check_checkpoints, remove_checkpoints
from quantizer.errors import QuantizerError
from quantizer.utils.files import NO_STORE, Store, said_complete
from quantizer.utils.paths import is_folder

_LONGEST_ENDING = ".training"
"""Longest suffix of these files."""


@dataclass(frozen=True)
class ResumeFiles:
    """The files from which a run resumes.

    Attributes:
        scores: scores of a search.
        training: the folder with training checkpoints.
        times: measured latencies, which remain for later runs.
        engines: exported ONNX files, candidate engines and their scores.
        calibration: the calibration and the choices of its plans; for the runs of a sweep, of all runs together.
    """

    scores: Store
    training: Path
    times: Store
    engines: Store
    calibration: Store = NO_STORE


@contextmanager
def resume_files(
    folder: Path, *, searches: bool, trains: bool, keeps: bool = False, store: Path | None = None
) -> Iterator[ResumeFiles]:
    """Yield the files from which the same command resumes, and remove them after success.

    Args:
        folder: the unfinished folder; the files lie next to it.
        searches: a search stores scores.
        trains: the run trains.
        keeps: calibration, plans and engines are stored.
        store: a folder for all of them, which also keeps them after an error; None: see ``folder``.
    """
    require_names(folder)
    # Errors are raised now, not after calibration or a long search.
    files = _in_one(Store(store), folder) if store is not None else _beside(folder, searches=searches, keeps=keeps)
    if trains:
        check_checkpoints(files.training)
    new_parents = [parent for parent in folder.absolute().parents if not parent.exists()]
    used = {files.scores.folder: "scores", files.training if trains else None: "checkpoints"}
    # With ``store``, this is the folder of the scores.
    used[files.engines.folder] = "calibration, plans and engines"
    try:
        yield files
    except KeyboardInterrupt as stop:
        existing = [
            f"the {what} are kept in {path}" for path, what in used.items() if path is not None and path.exists()
        ]
        # An interrupt with a message came after the work was complete.
        if existing and not stop.args:
            again = "run the same command again" if store is None else "make the same call again"
            raise type(stop)(f"{', and '.join(existing)}; {again} to resume") from stop
        raise
    except BaseException:
        if store is None:
            files.engines.clear()
            for parent in new_parents:
                with suppress(OSError):
                    parent.rmdir()
        raise
    with said_complete(folder):
        files.scores.clear()
        if trains:
            remove_checkpoints(files.training)
        files.engines.clear()


def _beside(folder: Path, *, searches: bool, keeps: bool) -> ResumeFiles:
    results = Store(folder.with_name(f"{folder.name}.resume") if keeps else None)
    return ResumeFiles(
        scores=Store(folder.with_name(f"{folder.name}.search") if searches else None),
        training=folder.with_name(f"{folder.name}.training"),
        times=Store(folder.with_name(f"{folder.name}.times")),
        engines=results,
        calibration=results,
    )


def _in_one(store: Store, folder: Path) -> ResumeFiles:
    training = folder.with_name(f"{folder.name}.training")
    return ResumeFiles(scores=store, training=training, times=store, engines=store, calibration=store)


def require_names(folder: Path) -> None:
    """Raise if the file system does not allow the longer names of the files next to a folder."""
    above = next(place for place in folder.absolute().parents if is_folder(place))
    limit = os.pathconf(above, "PC_NAME_MAX") - len(_LONGEST_ENDING)
    size = len(os.fsencode(folder.name))
    if size > limit:
        raise QuantizerError(
            f"{folder} cannot be written: its name has {size} bytes, and files next to it add suffixes such as "
            f"{_LONGEST_ENDING}; use a name of at most {limit} bytes"
        )
