"""Mask constants that FP16 can add to.

Masks are made with the lowest number of the float type. In FP16 that is -65504, and a score below -16 added to it is
-inf; a row of nothing but -inf is NaN after softmax. -30000 masks as well, exp(-30000) being 0 in every float type.
What bounds other values (Clip, Max, Min) is no mask and stays. A mask of several numbers, such as a causal one, has
zeros beside its lowest.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantizer.export.passes.base import add_constant
from quantizer.export.passes.base import floats
from quantizer.export.passes.base import scalar
from quantizer.proxy.regions import MASK

__all__ = ["ClampMasks"]

_BOUNDED = frozenset({"Clip", "Max", "Min"})
_MASKING = frozenset({"Add", "Expand", "Sub", "Unsqueeze", "Where"})


class ClampMasks:
    """Half-precision constants below ``MASK`` become ``MASK``: numbers, and those in tensors that are masks."""

    def requires(self, model: Any) -> str | None:
        return None

    def run(self, model: Any) -> int:
        import onnx_ir

        found = list(_too_low(model))
        for value in found:
            clamped = np.maximum(value.const_value.numpy(), np.float16(MASK))
            others = [use for use in value.uses() if use[0].op_type not in _BOUNDED]
            if len(others) < len(list(value.uses())):
                mask = add_constant(model, f"{value.name}_clamped", clamped, value.dtype)
                for reader, index in others:
                    reader.replace_input_with(index, mask)
                continue
            replacement = onnx_ir.tensor(clamped, name=value.name)
            producer = value.producer()
            if producer is None:
                value.const_value = replacement
            else:
                producer.attributes["value"] = onnx_ir.AttrTensor("value", replacement)
                value.const_value = replacement
        return len(found)

    def ensures(self, model: Any) -> str | None:
        left = [value.name for value in _too_low(model)]
        return f"a constant is still below what FP16 can add to: {left[0]}" if left else None


def _too_low(model: Any) -> list[Any]:
    import onnx_ir

    constants = [*model.graph.initializers.values()]
    constants += [node.outputs[0] for node in model.graph if node.op_type == "Constant"]
    return [value for value in constants if value.dtype == onnx_ir.DataType.FLOAT16 and _lowest(value) < MASK]


def _lowest(value: Any) -> float:
    """The lowest number of a constant; 0 where it is no mask."""
    number = scalar(value)
    if number is not None:
        return 0.0 if _is_bound(value) else number
    readers = {reader.op_type for reader, _ in value.uses()}
    held = floats(value) if readers and readers <= _MASKING else None
    return 0.0 if held is None or not (held == 0).any() else float(held.min())


def _is_bound(value: Any) -> bool:
    """Nobody reads it but those whom it bounds."""
    readers = {reader.op_type for reader, _ in value.uses()}
    return bool(readers) and readers <= _BOUNDED and not value.is_graph_output()
