"""Files from which an interrupted command resumes, next to its unfinished output folder."""

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
"""Longest suffix of these files."""


@dataclass(frozen=True)
class ResumeFiles:
    """The files from which a run resumes, next to its unfinished folder.

    Attributes:
        scores: scores of a search.
        training: the folder with training checkpoints.
        times: measured latencies, which remain for later runs.
        engines: candidate engines and their scores.
    """

    scores: Store
    training: Path
    times: Store
    engines: Store


@contextmanager
def resume_files(folder: Path, *, searches: bool, trains: bool, chooses: bool = False) -> Iterator[ResumeFiles]:
    """Yield the files from which the same command resumes, and remove them after success."""
    require_names(folder)
    # Errors are raised now, not after calibration or a long search.
    files = ResumeFiles(
        scores=Store(folder.with_name(f"{folder.name}.search") if searches else None),
        training=folder.with_name(f"{folder.name}.training"),
        times=Store(folder.with_name(f"{folder.name}.times")),
        engines=Store(folder.with_name(f"{folder.name}.engines") if chooses else None),
    )
    if trains:
        check_checkpoints(files.training)
    used = {"scores": files.scores.folder, "checkpoints": files.training if trains else None}
    used["engines"] = files.engines.folder
    try:
        yield files
    except KeyboardInterrupt as stop:
        existing = [
            (f"the {what} are kept in {path}") for what, path in used.items() if path is not None and path.exists()
        ]
        # An interrupt with a message came after the work was complete.
        if existing and not stop.args:
            raise type(stop)(f"{', and '.join(existing)}; run the same command again to resume") from stop
        raise
    except BaseException:
        files.engines.clear()
        raise
    with said_complete(folder):
        files.scores.clear()
        if trains:
            remove_checkpoints(files.training)
        files.engines.clear()


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
