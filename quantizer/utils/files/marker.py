"""The marker of a folder: a hidden file with the folder's kind and the names of everything written into it.

It is written last, so that a folder with a marker is complete. Only a folder with a marker may be replaced or removed,
and only the files on its list: all other files belong to somebody else.
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

from quantizer.utils.paths import regular_file

logger = logging.getLogger(__name__)

MARKER = ".quantizer.json"
_FORMAT = 1

# A saved quantizer of a version without markers has only these files, and the first one begins with these bytes.
_FORMER_KIND = "saved quantizer"
_FORMER = ("quantizer.yaml", "ranges.safetensors", "observed.safetensors")
_FORMER_BEGIN = b"format: 1\n"


@dataclass(frozen=True)
class Marker:
    """The content of a folder's marker.

    Attributes:
        kind: the kind of folder, such as "run".
        holds: the names written into it, relative to the folder; names of folders end with a slash.
    """

    kind: str
    holds: frozenset[str]


def write_marker(folder: Path, kind: str) -> None:
    """Write the marker of a folder, with the names of its current content."""
    holds = sorted(name for name, _ in _entries(folder) if name != MARKER)
    document = {"format": _FORMAT, "kind": kind, "holds": holds}
    part = folder / f"{MARKER}.part"
    part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(part, folder / MARKER)


def read_marker(folder: Path) -> Marker | None:
    """Return the marker of a folder; None if there is none or it cannot be read."""
    try:
        document = json.loads(regular_file(folder / MARKER).read_text(encoding="utf-8"))
        kind, holds, known = document["kind"], document["holds"], document["format"] == _FORMAT
    except FileNotFoundError:
        return _former(folder)
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None
    if not (known and isinstance(kind, str) and isinstance(holds, list) and all(isinstance(n, str) for n in holds)):
        return None
    return Marker(kind, frozenset(holds))


def foreign(folder: Path, marker: Marker) -> list[str]:
    """Return the first names in a folder that are not on its marker's list."""
    others = (name for name, _ in _entries(folder) if name not in marker.holds and name != MARKER)
    return list(islice(others, 3))


def discard(folder: Path) -> None:
    """Remove a folder: with a marker only the files on its list, without one all files.

    Files that cannot be removed stay. Files that are not on the list stay, with a warning in the log.
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
        # The marker is removed last, so that an interrupted removal can continue.
        if os.listdir(folder) == [MARKER]:
            (folder / MARKER).unlink()
            folder.rmdir()
        elif others := foreign(folder, marker):
            logger.warning("%s is not removed: quantizer did not write %s in it", folder, ", ".join(others))


def _entries(folder: Path, inside: str = "") -> Iterator[tuple[str, Path]]:
    """Yield name and path of everything below a folder; folders come after their content, links are not followed."""
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
        with regular_file(folder / _FORMER[0]).open("rb") as stream:
            begin = stream.read(len(_FORMER_BEGIN))
    except OSError:
        return None
    return Marker(_FORMER_KIND, frozenset(_FORMER)) if begin == _FORMER_BEGIN else None
