"""The number of threads that torch computes on, for the length of a call.

``torch.set_num_threads`` sets that of the process as well, which a thread that is new to torch takes for its own. If
calls from several threads set and restored it, threads would keep the number of some engine for ever. So the number of
this thread alone is set, where torch computes with OpenMP.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch


@contextmanager
def computing_threads(count: int) -> Iterator[None]:
    """Let torch compute on ``count`` threads inside the block."""
    # The first question to torch in a thread also sets the thread's number.
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    set_openmp, set_mkl = _setters()
    set_openmp(count)
    # MKL answers with the number that it had.
    before_mkl = set_mkl(count)
    try:
        yield
    finally:
        set_openmp(before)
        set_mkl(before_mkl)


@cache
def _setters() -> tuple[Callable[[int], object], Callable[[int], int]]:
    """Return what sets the number of the calling thread in OpenMP and in MKL, if torch has MKL."""
    # A PyDLL keeps the interpreter's lock, whose release would take longer than the call.
    library = ctypes.PyDLL(torch._C.__file__)
    try:
        openmp = library.omp_set_num_threads
    except AttributeError:
        # A torch without OpenMP, or a system whose libraries show no symbols of those that they need.
        return torch.set_num_threads, lambda count: count
    # The name in small letters is that of Fortran, whose argument is an address.
    mkl = getattr(library, "MKL_Set_Num_Threads_Local", None)
    return openmp, mkl or (lambda count: count)
