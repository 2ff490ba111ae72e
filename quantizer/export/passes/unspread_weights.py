"""Pass that multiplies by a stored weight itself where a model spreads it over the batch first.

``torch.bmm(x, w.expand(len(x), -1, -1))`` exports as an Expand between the DequantizeLinear of w and the MatMul.
A MatMul broadcasts by itself, and engines have integer kernels for a stored weight alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quantizer.export.passes.base import MatchPass
from quantizer.qdq.graph import attribute, is_dequantize

_MATRIX = 2  # axes


@dataclass(frozen=True, slots=True)
class _Spread:
    """An input of a MatMul that an Expand spreads, by its index, and the DequantizeLinear before."""

    index: int
    dequantize: Any


class UnspreadWeights(MatchPass[_Spread]):
    """``MatMul(x [B, M, K], Expand(DQ(w [1, K, N])))`` becomes ``MatMul(x, DQ(w [K, N]))``."""

    left = "a stored weight is still spread over the batch before its product"

    def match(self, node: Any) -> _Spread | None:
        """Return which input is spread; None for other nodes, and where the other input may be broadcast to it."""
        if node.op_type != "MatMul":
            return None
        for index, value in enumerate(node.inputs):
            expand, other = value.producer(), node.inputs[1 - index]
            if expand is None or expand.op_type != "Expand" or value.shape is None or other.shape is None:
                continue
            dequantize = expand.inputs[0].producer()
            if not is_dequantize(dequantize) or not dequantize.inputs[0].is_initializer():
                continue
            shape, spread = list(dequantize.inputs[0].shape), list(value.shape)
            lead = _lead(value)
            ones = len(shape) == len(spread) and all(size == 1 for size in shape[:-_MATRIX])
            # Sizes of a batch are names, and the same name is the same size; one without a name may be any.
            known = None not in [getattr(size, "value", size) for size in lead]
            if ones and known and lead and shape[-_MATRIX:] == spread[-_MATRIX:] and _lead(other) == lead:
                return _Spread(index, dequantize)
        return None

    def apply(self, model: Any, node: Any, found: _Spread) -> None:
        """Let the node read the weight, as a matrix where nothing else reads it."""
        dequantize = found.dequantize
        spread = node.inputs[found.index]
        node.replace_input_with(found.index, dequantize.outputs[0])
        if not spread.uses() and not spread.is_graph_output():
            spread.producer().graph.remove(spread.producer(), safe=True)
        _as_matrix(dequantize)


def _lead(value: Any) -> list[Any]:
    """Return the sizes of all axes before those of the matrix."""
    return list(value.shape)[:-_MATRIX]


def _as_matrix(dequantize: Any) -> None:
    """Store a weight [1, K, N] as [K, N] if its codes and their values have one reader each, and it has no blocks."""
    import onnx_ir

    stored, scale = dequantize.inputs[0], dequantize.inputs[1]
    alone = len(list(stored.uses())) == 1 and len(list(dequantize.outputs[0].uses())) == 1
    if not alone or stored.const_value is None or scale.shape is None or len(scale.shape) > 1:
        return
    shape = list(stored.shape)
    axis = attribute(dequantize, "axis", 1) % len(shape)
    before = len(shape) - _MATRIX
    if len(scale.shape) == 1 and axis < before:
        return
    matrix: Any = onnx_ir.tensor(stored.const_value.numpy().reshape(shape[before:]), name=stored.name)
    stored.const_value, stored.shape = matrix, onnx_ir.Shape(matrix.shape)
    dequantize.outputs[0].shape = onnx_ir.Shape(matrix.shape)
    if len(scale.shape) == 1:
        dequantize.attributes["axis"] = onnx_ir.AttrInt64("axis", axis - before)
