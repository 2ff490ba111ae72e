"""Atomic writing of files and folders, which replaces only what this package wrote.

writable.py    the real place of a path, and checks that it can be written, before any work
temporary.py   temporary folders beside their targets, and removal of those that killed processes left; the marker file
               of a folder: its kind, and the names of everything written into it
folder.py      atomic writing of a file, or of a folder, which may replace a former one
store.py       results in a folder, each made once by all that it depends on
"""

from __future__ import annotations

from quantizer.utils.files.folder import (
    checked_folder,
    new_folder,
    require_sole_writer,
    restore_folder,
    said_complete,
    whole_file,
    write_folder,
)
from quantizer.utils.files.store import NO_STORE, Store
from quantizer.utils.files.temporary import MARKER, begun_in, is_begun, scratch, scratch_folder, temporary_beside
from quantizer.utils.files.writable import checked_file, require_room, require_writable

__all__ = [
    "MARKER",
    "NO_STORE",
    "Store",
    "begun_in",
    "checked_file",
    "checked_folder",
    "is_begun",
    "new_folder",
    "require_room",
    "require_sole_writer",
    "require_writable",
    "restore_folder",
    "said_complete",
    "scratch",
    "scratch_folder",
    "temporary_beside",
    "whole_file",
    "write_folder",
]
