"""Pass that adds up two constants, such as a bias and its shift.

Legend: b [C] the bias of a layer; d [C] its shift (``calibration/bias_correction.py``). The exporter folds the sum of
small constants by itself, but not of those with more than 8192 numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantizer.export.passes.base import MatchPass
from quantizer.export.passes.base import add_constant
from quantizer.export.passes.base import take_out
from quantizer.qdq.graph import floats

__all__ = ["FoldBiasShifts"]

_Constants = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


class FoldBiasShifts(MatchPass[_Constants]):
    """``Add(b, d)`` of two vectors of one length becomes the constant ``b + d``."""

    left = "a shift is still added to a bias"

    def match(self, node: Any) -> _Constants | None:
        """Return the constants that a node adds up; None for any other node."""
        if node.op_type != "Add" or node.outputs[0].is_graph_output():
            return None
        first, second = map(floats, node.inputs)
        if first is None or second is None or first.ndim != 1 or first.shape != second.shape:
            return None
        return first, second

    def apply(self, model: Any, node: Any, found: _Constants) -> None:
        first, second = (array.astype(np.float64) for array in found)
        bias = node.inputs[0]
        made = add_constant(model, f"{bias.name}_shifted", (first + second).astype(found[0].dtype), bias.dtype)
        take_out(model, node, made)
