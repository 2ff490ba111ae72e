"""How our torch operators are spelled in ONNX.

The types are in the graph: scale, input and output of a Q/DQ pair share one float type, and the zero point is an INT8
zero, without which ``QuantizeLinear`` would give unsigned integers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["translations"]


def translations(opset: int) -> dict[Callable[..., Any], Callable[..., Any]]:
    """The table that ``torch.onnx.export`` takes as ``custom_translation_table``."""
    import numpy as np
    import onnxscript

    op: Any = onnxscript.values.Opset("", opset)
    zero = np.array(0, dtype=np.int8)

    def fake_quantize(x: Any, scale: Any, dtype: str = "int8", axis: int | None = None) -> Any:
        attributes = {} if axis is None else {"axis": axis}
        steps = op.QuantizeLinear(x, scale, op.Constant(value=_tensor(zero)), **attributes)
        return op.DequantizeLinear(steps, scale, **attributes)

    def dequantize(q: Any, scale: Any, axis: int | None = None) -> Any:
        return op.DequantizeLinear(q, scale, **({} if axis is None else {"axis": axis}))

    operators = torch.ops.quantizer
    return {operators.fake_quantize.default: fake_quantize, operators.dequantize.default: dequantize}


def _tensor(value: Any) -> Any:
    import onnx

    return onnx.numpy_helper.from_array(value)
