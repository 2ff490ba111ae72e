"""Pass that limits mask constants to values that FP16 can add to.

Masks are made with the lowest number of the float type. In FP16 that is -65504, and a score below -16 added to it is
-inf; a row of nothing but -inf is NaN after softmax. -30000 masks as well: exp(-30000) is 0 in every float type.
Any other low number keeps its meaning: a bound, a factor, a comparison, or an infinite value that the model returns.
A mask of several numbers, such as a causal one, has zeros beside its lowest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from quantizer.export.passes.base import add_constant
from quantizer.export.qdq.graph import floats, scalar
from quantizer.export.qdq.operand import masks_only
from quantizer.numerics.formats import FLOAT16_MASK


class ClampMasks:
    """Change of half-precision constants below ``FLOAT16_MASK`` to ``FLOAT16_MASK``, where they are read as masks."""

    def requires(self, model: Any) -> str | None:
        return None

    def run(self, model: Any) -> int:
        import onnx_ir

        found = list(_too_low(model))
        for value, uses in found:
            clamped = np.maximum(value.const_value.numpy(), np.float16(FLOAT16_MASK))
            if len(uses) < len(list(value.uses())) or value.is_graph_output():
                mask = add_constant(model, f"{value.name}_clamped", clamped, value.dtype)
                for reader, index in uses:
                    reader.replace_input_with(index, mask)
                continue
            replacement = onnx_ir.tensor(clamped, name=value.name)
            producer = value.producer()
            if producer is not None:
                producer.attributes["value"] = onnx_ir.AttrTensor("value", replacement)
            value.const_value = replacement
        return len(found)

    def ensures(self, model: Any) -> str | None:
        left = next((value.name for value, _ in _too_low(model)), None)
        return None if left is None else f"a constant is still below what FP16 can add to: {left}"


def _too_low(model: Any) -> Iterator[tuple[Any, list[tuple[Any, int]]]]:
    """Yield low constants, each with those of its readers that use it as a mask."""
    import onnx_ir

    constants = [*model.graph.initializers.values()]
    constants += [node.outputs[0] for node in model.graph if node.op_type == "Constant"]
    for value in constants:
        if value.dtype != onnx_ir.DataType.FLOAT16 or not _is_low(value):
            continue
        uses = [(reader, index) for reader, index in value.uses() if masks_only(reader, index)]
        if uses:
            yield value, uses


def _is_low(value: Any) -> bool:
    number = scalar(value)
    if number is not None:
        return number < FLOAT16_MASK
    held = floats(value)
    return held is not None and bool((held == 0).any()) and float(held.min()) < FLOAT16_MASK
