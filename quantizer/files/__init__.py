"""Files and folders that appear at once, and that replace nothing that was not written here.

place.py       what lies behind a path, and whether something may be written there: asked before any work
temporary.py   folders to write into, beside what they become; what a kill left of them is removed later
marker.py      what a folder of ours says of itself: its kind, and all that was written into it
exchange.py    two folders change places in one step, where the system can do that
whole.py       one file that is whole or absent
folder.py      a folder that is whole or absent, and what is replaced by it
"""

from __future__ import annotations

from quantizer.files.folder import checked_folder
from quantizer.files.folder import restore_folder
from quantizer.files.folder import said_complete
from quantizer.files.folder import write_folder
from quantizer.files.marker import MARKER
from quantizer.files.place import checked_file
from quantizer.files.place import require_room
from quantizer.files.temporary import temporary_beside
from quantizer.files.whole import whole_file

__all__ = [
    "MARKER",
    "checked_file",
    "checked_folder",
    "require_room",
    "restore_folder",
    "said_complete",
    "temporary_beside",
    "whole_file",
    "write_folder",
]
