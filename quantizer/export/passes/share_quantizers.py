"""Pass that merges the quantizers of one tensor with one scale.

Query, key and value read the same hidden states, and so may a residual add: their operands share a range, and the
tensor is rounded once.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from quantizer.export.passes.base import take_out

_KINDS = ("QuantizeLinear", "DynamicQuantizeLinear", "DequantizeLinear")


class ShareQuantizers:
    """``Q(x, s) .. Q(x, s)`` becomes ``Q(x, s)``, and DQs that read it likewise."""

    def requires(self, model: Any) -> str | None:
        return None

    def run(self, model: Any) -> int:
        changed = 0
        for kind in _KINDS:
            for first, second in _alike(model, kind):
                # The scale and the zero point of a dynamic Q, and then its codes.
                for held, other in zip(first.outputs[1:], second.outputs[1:], strict=True):
                    other.replace_all_uses_with(held)
                take_out(model, second, first.outputs[0])
                changed += 1
        return changed

    def ensures(self, model: Any) -> str | None:
        left = [second.name for kind in _KINDS for _, second in _alike(model, kind)]
        return f"a tensor is quantized twice in the same way: {left[0]}" if left else None


def _alike(model: Any, kind: str) -> list[tuple[Any, Any]]:
    """Return pairs of nodes of one kind that compute the same, the earlier in the graph first."""
    first: dict[Hashable, Any] = {}
    found = []
    for node in model.graph:
        if node.op_type != kind or node.outputs[0].is_graph_output():
            continue
        attributes = tuple(sorted((name, str(value.value)) for name, value in node.attributes.items()))
        key = (id(node.inputs[0]), *map(content, node.inputs[1:]), attributes)
        if key in first:
            found.append((first[key], node))
        else:
            first[key] = node
    return found


def content(value: Any) -> Hashable:
    """Return the key by which two scales or zero points are equal: their constant, else the value itself."""
    constant = None if value is None else value.const_value
    if constant is None:
        return id(value)
    return constant.dtype, tuple(constant.shape), constant.tobytes()
