"""Atomic exchange of two folders, which Linux supports on most local file systems."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# The kernel, file system or container does not support the call; the two folders are in order.
_UNABLE = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM})


def exchange(one: Path, other: Path) -> bool:
    """Exchange two paths of one file system atomically; return False, with no change, if the system cannot do that."""
    if sys.platform != "linux":
        return False
    library = ctypes.CDLL(None, use_errno=True)
    # Older C libraries lack the function.
    call = getattr(library, "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNABLE:
        return False
    raise OSError(code, os.strerror(code), str(other))
