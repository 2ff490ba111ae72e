"""Atomic writing of files and folders, which replaces only what this package wrote.

place.py       the real place of a path, and checks that it can be written, before any work
temporary.py   temporary folders beside their targets, and removal of those that killed processes left
marker.py      the marker file of a folder: its kind, and the names of everything written into it
exchange.py    atomic exchange of two folders, if the system supports it
whole.py       atomic writing of a file
folder.py      atomic writing of a folder, which may replace a former one
"""

from __future__ import annotations

from quantizer.files.folder import checked_folder
from quantizer.files.folder import require_sole_writer
from quantizer.files.folder import restore_folder
from quantizer.files.folder import said_complete
from quantizer.files.folder import write_folder
from quantizer.files.marker import MARKER
from quantizer.files.place import checked_file
from quantizer.files.place import require_room
from quantizer.files.place import require_writable
from quantizer.files.temporary import begun_in
from quantizer.files.temporary import is_begun
from quantizer.files.temporary import scratch
from quantizer.files.temporary import scratch_folder
from quantizer.files.temporary import temporary_beside
from quantizer.files.whole import whole_file

__all__ = [
    "MARKER",
    "begun_in",
    "checked_file",
    "checked_folder",
    "is_begun",
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
