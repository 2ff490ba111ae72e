"""The quantization of a tensor as one kernel, for operands that no other kernel writes in 8 bits."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantizer.numerics.triton_kernels.arithmetic import KINDS, quantized

_BLOCK = 1024


@triton.jit
def quantize_kernel(
    x_ptr, q_ptr, scale_ptr, zero_point, size, K, BY_COLUMN: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    """Quantize BLOCK values."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + (at % K if BY_COLUMN else 0 * at), mask=inside, other=1.0)
    tl.store(q_ptr + at, quantized(x, scale, zero_point, KIND), mask=inside)


def quantize(x: Tensor, scale: Tensor, zero_point: int, dtype: torch.dtype) -> Tensor:
    """Return the quantized values of x.

    Args:
        x: contiguous floats [.., K].
        scale: the scale of x, or one scale per column: float32 [1] or [K].
        zero_point: the zero point of INT8 values.
        dtype: int8 or float8_e4m3fn.
    """
    result = torch.empty_like(x, dtype=dtype)
    kernel: Any = quantize_kernel
    kernel[(triton.cdiv(x.numel(), _BLOCK),)](
        *(x, result, scale, float(zero_point), x.numel(), x.shape[-1]),
        BY_COLUMN=scale.numel() == x.shape[-1],
        KIND=KINDS[dtype],
        BLOCK=_BLOCK,
    )
    return result
