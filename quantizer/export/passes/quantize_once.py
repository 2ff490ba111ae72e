"""Pass that quantizes once what is quantized twice in the same way, one time behind the other.

The result of a convolution and the operand of the next one share their range where they are one tensor.
"""

from __future__ import annotations

from typing import Any

from quantizer.export.passes.base import MatchPass, take_out
from quantizer.export.passes.share_quantizers import content
from quantizer.qdq.graph import is_quantize, pair_before


class QuantizeOnce(MatchPass[Any]):
    """``Q(s) -> DQ(s) -> Q(s)`` becomes ``Q(s)``: rounding what was rounded changes nothing."""

    left = "codes are still made of their own values"

    def match(self, node: Any) -> Any:
        """Return the Q before whose codes a Q makes again; None for any other node."""
        if not is_quantize(node) or node.outputs[0].is_graph_output():
            return None
        pair = pair_before(node.inputs[0])
        if pair is None or not is_quantize(pair[0]) or node.attributes != pair[0].attributes:
            return None
        # The DQ is that of this Q, so that it has its scale and zero point; a zero point of 0 it may leave out.
        mine, theirs = ([content(value) for value in one.inputs[1:]] for one in (node, pair[0]))
        return pair[0] if mine == theirs and content(pair[1].inputs[1]) == mine[0] else None

    def apply(self, model: Any, node: Any, found: Any) -> None:
        take_out(model, node, found.outputs[0])
