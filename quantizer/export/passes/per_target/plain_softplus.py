"""Pass that leaves large values to a Softplus itself, for a target that dequantizes a value for each of its readers.

torch returns large values as they are: ``Where(x > 20, x, Softplus(x))``. Its Softplus differs from x there by less
than float32 can tell, and ONNX Runtime's Softplus does not overflow. Three readers of a quantized x are three
DequantizeLinear there, and a Where takes as long as a Softplus.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantizer.export.passes.base import MatchPass, drop_unread, take_out
from quantizer.qdq.graph import scalar

_ALIKE = -float(np.log(np.finfo(np.float32).eps))
"""From here on log(1 + e^x) is x in float32."""


class PlainSoftplus(MatchPass[Any]):
    """``Where(x > 20, x, Softplus(x))`` becomes ``Softplus(x)``."""

    left = "a Softplus still has large values chosen beside it"

    def match(self, node: Any) -> Any | None:
        """Return the result of the Softplus of such a Where; None for any other node."""
        if node.op_type != "Where" or node.outputs[0].is_graph_output():
            return None
        condition, value, soft = node.inputs
        greater, softplus = condition.producer(), soft.producer()
        if greater is None or greater.op_type != "Greater" or softplus is None or softplus.op_type != "Softplus":
            return None
        threshold = scalar(greater.inputs[1])
        same = greater.inputs[0] is value and softplus.inputs[0] is value
        return soft if same and threshold is not None and threshold >= _ALIKE else None

    def apply(self, model: Any, node: Any, found: Any) -> None:
        compared = node.inputs[0].producer()
        take_out(model, node, found)
        if not compared.outputs[0].uses() and not compared.outputs[0].is_graph_output():
            limit = compared.inputs[1]
            model.graph.remove(compared, safe=True)
            drop_unread(model, limit)
