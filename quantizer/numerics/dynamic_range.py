"""``quantizer::fake_quantize_dynamic``, a torch operator: values rounded with their own range.

Legend: x [*] any shape; s the scale and z the zero point; q [*] the codes; x' [*] the dequantized values.

In UINT8, for all of x:

    low = min(x, 0)    high = max(x, 0)
    s = (high - low) / (qmax - qmin)    z = clamp(round(qmin - low / s), qmin, qmax)

That is ONNX ``DynamicQuantizeLinear`` (https://onnx.ai/onnx/operators/onnx__DynamicQuantizeLinear.html). In INT8, for
each row of neighbours along the last axis, in blocks of B:

    s = max|x| / qmax

That is OpenVINO's dynamic quantization, whose formula was found by comparing what its release 2026.4 computes
(docs/design/numerics.md). s is 1 if it would be 0. q and x' are those of ``torch_operators.py`` with these s and z.
Nothing is clipped, so that the gradient of x passes straight through.

It is a custom operator for the reasons given there, and so that a file has the one operator that engines fuse.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantizer.numerics.formats import qtype
from quantizer.numerics.granularity import in_blocks
from quantizer.numerics.torch_operators import fake_quantize


def dynamic_range(x: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    """Return s [] in float32 and z [] in the format's storage type, of x [*], which has at least one value."""
    kind = qtype(dtype)
    low, high = torch.aminmax(x.float())
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = _positive((high - low) / (kind.qmax - kind.qmin))
    return scale, (kind.qmin - low / scale).clamp(kind.qmin, kind.qmax).round().to(kind.storage)


def block_scales(x: Tensor, dtype: str, block_size: int) -> Tensor:
    """Return s [.., K / B] in float32, of x [.., K]; B divides K."""
    return _positive(in_blocks(x.float(), -1, block_size).abs().amax(-1) / qtype(dtype).qmax)


def _positive(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, torch.ones_like(scale))


@torch.library.custom_op("quantizer::fake_quantize_dynamic", mutates_args=())
def fake_quantize_dynamic(x: Tensor, dtype: str = "uint8", block_size: int | None = None) -> Tensor:
    """Return x' [*] in the type of x; ``block_size``: B, None: one range for all of x."""
    if x.numel() == 0:
        return torch.empty_like(x)
    if block_size is not None:
        blocks: Tensor = fake_quantize(x, block_scales(x, dtype, block_size), dtype, -1, block_size)
        return blocks
    scale, zero_point = dynamic_range(x, dtype)
    result: Tensor = fake_quantize(x, scale, dtype, None, None, zero_point)
    return result


@fake_quantize_dynamic.register_fake
def _(x: Tensor, dtype: str = "uint8", block_size: int | None = None) -> Tensor:
    return torch.empty_like(x)


def _straight_through(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return gradient, None, None


fake_quantize_dynamic.register_autograd(_straight_through)
