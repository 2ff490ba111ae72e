"""Detection of out-of-memory errors."""

from __future__ import annotations

# On a CPU torch raises a plain RuntimeError; on a GPU a subclass, whose message has these words too.
_WORDS = ("can't allocate memory", "not enough memory", "out of memory", "DefaultCPUAllocator")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means too little memory: Python's ``MemoryError``, or one of torch's allocators."""
    if isinstance(error, RuntimeError):
        return any(word in str(error) for word in _WORDS)
    return isinstance(error, MemoryError)
