"""The refusal of commands under a launcher of several processes, each of which would do the whole work."""

from __future__ import annotations

from quantizer.errors import QuantizerError
from quantizer.pipeline.launcher import launched


def require_one_process(command: str) -> None:
    """Raise if a launcher such as ``torchrun`` started this process as one of several."""
    rank, size = launched()
    if size > 1:
        raise QuantizerError(
            f"{command} is one process, and this is rank {rank} of {size}: each would do the whole work, into the same "
            "folder. Start it without torchrun, under which one  quantizer run CONFIG  works in several processes"
        )
