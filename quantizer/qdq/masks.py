"""What of a graph is a mask: a low number that a softmax turns into 0, and that nothing else sees.

A factor, a divisor, a bound or what is compared is none, nor is a number that the model gives as a result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["masks_only"]

# Operators that give what they read on, in other places or together with something else.
_MOVES = frozenset(
    {
        *("Cast", "Concat", "ConstantOfShape", "Expand", "Flatten", "Gather", "Identity", "Pad", "Reshape", "Slice"),
        *("Squeeze", "Split", "Tile", "Transpose", "Trilu", "Unsqueeze"),
    }
)
_CHOOSES = frozenset({"Where", "ScatterElements", "ScatterND"})
"""Puts numbers in the place of others."""
_BOUNDS = frozenset({"Clip", "Max", "Min"})
_FLOATS = frozenset({"FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE"})


def masks_only(reader: Any, index: int) -> bool:
    """Return whether what a node reads as its input ``index`` gets to a softmax as a mask, and nowhere else.

    It is put in the place of scores, or added to them. A number that is multiplied first, ``(1 - kept) * lowest``, is
    one where the result is added; in the place of a bound it is none.
    """
    if reader.op_type in _BOUNDS:
        return False
    ways = list(_ends(reader, index, masks=False, seen=set()))
    return bool(ways) and all(ways)


def _ends(reader: Any, index: int, masks: bool, seen: set[tuple[Any, int, bool]]) -> Iterator[bool]:
    """For each end of the ways onwards from an input, whether a mask ends there; each way is gone once."""
    if (reader, index, masks) in seen:
        return
    seen.add((reader, index, masks))
    if reader.op_type == "Softmax":
        yield masks
        return
    further = _further(reader, index, masks)
    if further is None:
        yield False
        return
    for output in reader.outputs:
        if output.is_graph_output():
            yield False
        for use, place in output.uses():
            yield from _ends(use, place, further, seen)


def _further(reader: Any, index: int, masks: bool) -> bool | None:
    """Whether it masks behind a node; None: it is something else there."""
    kind = reader.op_type
    if kind == "Cast":
        return masks if reader.attributes["to"].as_int() in _float_types() else None
    if kind in _MOVES or kind in _BOUNDS:
        return masks
    if kind in _CHOOSES:
        return True if index > 0 or kind != "Where" else None
    if kind == "Add":
        return True
    if kind == "Mul" or (kind in ("Div", "Sub") and index == 0):
        return masks
    return None


def _float_types() -> set[int]:
    import onnx_ir

    return {int(onnx_ir.DataType[name]) for name in _FLOATS}
