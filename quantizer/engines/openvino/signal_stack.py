"""Restoration of the alternate signal stack of a thread, which OpenVINO replaces."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class _Stack(ctypes.Structure):
    """``stack_t`` of <signal.h>, as Linux has it."""

    _fields_ = (("memory", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@contextmanager
def kept_signal_stack() -> Iterator[None]:
    """Restore this thread's alternate signal stack at the end of the block.

    The CPU plugin of OpenVINO 2026.4 maps a larger one when it is loaded and unmaps it with its core. If two cores are
    deleted in the order in which they were made, the thread keeps the stack of the first, which is unmapped: the next
    signal that Python handles, such as Ctrl-C, ends the process by SIGSEGV.
    """
    if sys.platform != "linux":
        yield
        return
    sigaltstack = ctypes.CDLL(None).sigaltstack
    former = _Stack()
    sigaltstack(None, ctypes.byref(former))
    try:
        yield
    finally:
        sigaltstack(ctypes.byref(former), None)
