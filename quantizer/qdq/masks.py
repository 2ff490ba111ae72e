"""Masks in a graph: a low number that a softmax turns into 0, and that nothing else reads.

A factor, a divisor, a bound or an operand of a comparison is no mask, nor is a number that the model returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Operators that pass values on, moved or joined with others.
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
    """Return whether input ``index`` of a node reaches a softmax as a mask, and nothing else.

    It replaces scores, or is added to them. A number that is multiplied first, ``(1 - kept) * lowest``, is a mask if
    the product is added; a bound is none.
    """
    if reader.op_type in _BOUNDS:
        return False
    ways = list(_ends(reader, index, masks=False, seen=set()))
    return bool(ways) and all(ways)


def _ends(reader: Any, index: int, masks: bool, seen: set[tuple[Any, int, bool]]) -> Iterator[bool]:
    """Yield for each end of the paths from an input whether a mask ends there; each path is followed once."""
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
    """Return whether the value is a mask behind a node; None if it is something else there."""
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
