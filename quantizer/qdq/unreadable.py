"""``unreadable_is``: one boundary for all that reads the graph of an ONNX file which may be damaged.

Readers rely on what ONNX promises: that a name was made before it is read, that the shapes of operands fit. A damaged
file breaks that in more ways than readers can check each for itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from quantizer.common.out_of_memory import is_out_of_memory
from quantizer.errors import QuantizerError

_LONGEST = 300


@contextmanager
def unreadable_is(kind: type[QuantizerError], path: Path) -> Iterator[None]:
    """Raise an error of this kind for whatever else is raised in the block, which reads the graph of an ONNX file."""
    try:
        yield
    except (QuantizerError, OSError):
        # An OSError may come from what is written meanwhile.
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        fault = _checker_fault(path)
        if fault is None:
            why = (
                f"{path} cannot be read ({_line(error)}), though onnx.checker finds no fault in it: run it in ONNX "
                "Runtime; if it runs there, quantizer is wrong: report it, with the file"
            )
        else:
            why = f"{path} is damaged, or was written wrongly: {fault}; export or copy it again"
        raise kind(why) from error


def _checker_fault(path: Path) -> str | None:
    """Return what ONNX's own checker, with the shapes of all values, says of a file; None: nothing."""
    if find_spec("onnx") is None:
        return None
    import onnx

    try:
        # By its path, for files over 2 GB.
        onnx.checker.check_model(os.fspath(path), full_check=True)
    except Exception as fault:  # noqa: BLE001 - each part of the checker raises a class of its own
        return _line(fault)
    return None


def _line(error: BaseException) -> str:
    """Return an error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    name = type(error).__name__
    return f"{name}: {text[:_LONGEST]}" if text else name
