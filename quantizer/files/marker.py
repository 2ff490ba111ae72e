"""The marker of a folder of ours: a hidden file with its kind and the names of all that was written into it.

It is written last, so that a folder that has it is complete. By it a folder is known that may be replaced or removed,
and by its list what of it: whatever else lies there is somebody else's.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

__all__ = ["MARKER", "Marker", "discard", "foreign", "read_marker", "write_marker"]

logger = logging.getLogger(__name__)

MARKER = ".quantizer.json"
_FORMAT = 1

# A saved quantizer of a version before there were markers: these files and no others, the first of which begins so.
_FORMER_KIND = "saved quantizer"
_FORMER = ("quantizer.yaml", "ranges.safetensors", "observed.safetensors")
_FORMER_BEGIN = b"format: 1\n"


@dataclass(frozen=True)
class Marker:
    """The content of a folder's marker.

    Attributes:
        kind: what it is, such as "run".
        holds: what was written into it, by name from the folder on; names of folders end with a slash.
    """

    kind: str
    holds: frozenset[str]


def write_marker(folder: Path, kind: str) -> None:
    """Say of a folder that it is ours, with all that lies in it now."""
    holds = sorted(name for name, _ in _entries(folder) if name != MARKER)
    document = {"format": _FORMAT, "kind": kind, "holds": holds}
    part = folder / f"{MARKER}.part"
    part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(part, folder / MARKER)


def read_marker(folder: Path) -> Marker | None:
    """Return what a folder says of itself; None where it is none of ours, or what it says cannot be read."""
    try:
        document = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        kind, holds, known = document["kind"], document["holds"], document["format"] == _FORMAT
    except FileNotFoundError:
        return _former(folder)
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None
    if not (known and isinstance(kind, str) and isinstance(holds, list) and all(isinstance(n, str) for n in holds)):
        return None
    return Marker(kind, frozenset(holds))


def foreign(folder: Path, marker: Marker) -> list[str]:
    """Return the first names of what lies in a folder and is not on its list."""
    others = (name for name, _ in _entries(folder) if name not in marker.holds and name != MARKER)
    return list(islice(others, 3))


def discard(folder: Path) -> None:
    """Remove a folder that is not needed any more: a complete one by its list, and any other as a whole.

    What cannot be removed stays; what is not on the list stays and is told.
    """
    marker = read_marker(folder) if (folder / MARKER).exists() else None
    if marker is None:
        shutil.rmtree(folder, ignore_errors=True)
        return
    with suppress(OSError):
        for name, path in _entries(folder):
            if name in marker.holds:
                with suppress(OSError):
                    path.rmdir() if name.endswith("/") else path.unlink()
        # The list goes last: until then the rest of an interrupted removal can be told.
        if os.listdir(folder) == [MARKER]:
            (folder / MARKER).unlink()
            folder.rmdir()
        elif others := foreign(folder, marker):
            logger.warning("%s is not removed: quantizer did not write %s in it", folder, ", ".join(others))


def _entries(folder: Path, inside: str = "") -> Iterator[tuple[str, Path]]:
    """Everything below a folder, by name and path; a folder comes after what it holds, and a link is no folder."""
    with os.scandir(folder) as scan:
        entries = sorted(scan, key=lambda entry: entry.name)
    for entry in entries:
        name, path = f"{inside}{entry.name}", Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            yield from _entries(path, f"{name}/")
            yield f"{name}/", path
        else:
            yield name, path


def _former(folder: Path) -> Marker | None:
    try:
        with (folder / _FORMER[0]).open("rb") as stream:
            begin = stream.read(len(_FORMER_BEGIN))
    except OSError:
        return None
    return Marker(_FORMER_KIND, frozenset(_FORMER)) if begin == _FORMER_BEGIN else None
