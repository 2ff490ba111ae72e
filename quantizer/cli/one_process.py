"""The refusal of commands under a launcher of several processes, each of which would do the whole work."""

from __future__ import annotations

import os

from quantizer.errors import QuantizerError

__all__ = ["require_one_process"]


def require_one_process(command: str) -> None:
    """Raise if a launcher such as ``torchrun`` started this process as one of several.

    Raises:
        QuantizerError: ``WORLD_SIZE`` says so.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdecimal() and int(size) > 1:
        rank = os.environ.get("RANK", "?")
        raise QuantizerError(
            f"{command} is one process, and this is rank {rank} of {size}: each would do the whole work, into the same "
            "folder. Start it without torchrun, under which one  quantizer run CONFIG  works in several processes"
        )
