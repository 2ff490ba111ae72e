"""Atomic writing of files and folders, which replaces only files that this package wrote.

writable.py    resolves paths and checks that they can be written, before any work
temporary.py   temporary folders beside their targets, their cleanup, and the marker file of a folder
folder.py      atomic writing of a file or folder, which may replace an earlier one
store.py       a cache of results in a folder, each made once for its key
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
