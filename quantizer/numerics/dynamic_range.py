"""``quantizer::fake_quantize_dynamic``, a torch operator: values rounded with their own range.

Legend: x [*] any shape; s the scale and z the zero point of all of x; q [*] the codes, in UINT8; x' [*] the dequantized
values.

    low = min(x, 0)    high = max(x, 0)    s = (high - low) / (qmax - qmin), 1 if that is 0
    z = clamp(round(qmin - low / s), qmin, qmax)

q and x' are those of ``torch_operators.py`` with these s and z. That is ONNX ``DynamicQuantizeLinear`` with a
``DequantizeLinear`` behind it (https://onnx.ai/onnx/operators/onnx__DynamicQuantizeLinear.html). Nothing is clipped, so
that the gradient of x passes straight through.

It is a custom operator for the reasons given there, and so that a file has the one operator that engines fuse.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantizer.numerics.qtype import UINT8
from quantizer.numerics.torch_operators import fake_quantize

__all__ = ["dynamic_range", "fake_quantize_dynamic"]


def dynamic_range(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return s [] in float32 and z [] in uint8 of x [*], which has at least one value."""
    low, high = torch.aminmax(x.float())
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = (high - low) / (UINT8.qmax - UINT8.qmin)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    zero_point = (UINT8.qmin - low / scale).clamp(UINT8.qmin, UINT8.qmax).round()
    return scale, zero_point.to(UINT8.storage)


@torch.library.custom_op("quantizer::fake_quantize_dynamic", mutates_args=())
def fake_quantize_dynamic(x: Tensor) -> Tensor:
    """Return x' [*] in the type of x."""
    if x.numel() == 0:
        return torch.empty_like(x)
    scale, zero_point = dynamic_range(x)
    result: Tensor = fake_quantize(x, scale, UINT8.name, None, None, zero_point)
    return result


@fake_quantize_dynamic.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _straight_through(context: Any, gradient: Tensor) -> Tensor:
    return gradient


fake_quantize_dynamic.register_autograd(_straight_through)
