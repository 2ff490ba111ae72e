"""Further names of a file: links, which take no room, and copies where the file system has none."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from quantizer.qdq.structure import external_files


def link_onnx(path: Path, place: Path) -> None:
    """Give an ONNX file and the files with its weights, which it names, a second place."""
    link_file(path, place)
    for name in external_files(path):
        link_file(path.with_name(name), place.with_name(name))


def link_file(path: Path, place: Path) -> None:
    """Give a file a second place."""
    try:
        # A hard link: it holds when the folder is moved or one of the names is removed.
        os.link(path, place)
    except OSError:
        shutil.copyfile(path, place)
