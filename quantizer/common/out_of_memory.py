"""Telling an error that says there is no memory left from the others of its class."""

from __future__ import annotations

__all__ = ["is_out_of_memory"]

# On a CPU torch raises a bare RuntimeError; on a GPU one of a class of its own, which has these words too.
_WORDS = ("can't allocate memory", "not enough memory", "out of memory", "DefaultCPUAllocator")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means too little memory: Python's own, or what torch's allocators raise."""
    if isinstance(error, RuntimeError):
        return any(word in str(error) for word in _WORDS)
    return isinstance(error, MemoryError)
