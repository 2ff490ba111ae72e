"""References of the kernels in operations of torch.

They compute the layers of a CPU, and each layer whose kernel does not compile.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from quantizer.numerics.formats import FP8, INT8

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda value: value,
    "relu": functional.relu,
    "gelu": lambda value: 0.5 * value * (1.0 + torch.erf(value * 0.7071067811865476)),
    "gelu_tanh": lambda value: value * torch.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value)),
    "silu": lambda value: value * torch.sigmoid(value),
}
"""The activations by name, of float32 values."""


def quantized(value: Tensor, scale: Tensor, dtype: torch.dtype, zero_point: int = 0) -> Tensor:
    """Return float32 values quantized to int8 or float8_e4m3fn; only INT8 has a zero point."""
    ratio = torch.where(scale == 0, 0.0, value / torch.where(scale == 0, 1.0, scale))
    if dtype == torch.int8:
        limited = ratio.nan_to_num(0.0, torch.inf, -torch.inf).clamp(INT8.qmin - zero_point, INT8.qmax - zero_point)
        return (limited.round() + zero_point).to(torch.int8)
    return ratio.clamp(FP8.qmin, FP8.qmax).to(dtype)


def _exact_sums(a: Tensor, w: Tensor) -> Tensor:
    """Return a w^T of int8 as int32, or float64, in which the sums of fewer than 2^39 products are exact."""
    if a.device.type == "cpu":
        return a.int() @ w.int().t()
    # cuBLAS takes more than 16 rows, and multiples of 8.
    if len(a) > 16 and a.shape[1] % 8 == 0 and len(w) % 8 == 0:
        return torch._int_mm(a, w.t())
    return a.double() @ w.double().t()


def linear(
    a: Tensor,
    w: Tensor,
    scale: float,
    scales: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    next_scale: Tensor | None,
    *,
    activation: str = "none",
    dtype: torch.dtype = torch.float16,
    parts: int = 1,
    zero_point: int = 0,
) -> Tensor:
    """Return y [P, M, N / P], or [M, N] for one part; see ``products.linear``."""
    total = _exact_sums(a, w).float() if a.dtype == torch.int8 else a.float() @ w.float().t()
    value = total * (scales * torch.tensor(scale, dtype=torch.float32))
    if bias is not None:
        value = value + bias.float()
    value = ACTIVATIONS[activation](value)
    if residual is not None:
        value = value + residual.float()
    separate = value.reshape(len(a), parts, -1).transpose(0, 1).contiguous()
    if next_scale is not None:
        separate = quantized(separate, next_scale.reshape(parts, 1, -1), dtype, zero_point)
    result = separate.to(dtype)
    return result[0] if parts == 1 else result


def normed(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    rms: bool = False,
    quantized_as: torch.dtype | None = None,
    next_scale: Tensor | None = None,
    zero_point: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Return the norm y of float32 rows h, and the quantized values of y; see ``norms``."""
    centred = h if rms else h - h.mean(1, keepdim=True)
    value = centred * (1.0 / torch.sqrt(centred.square().mean(1, keepdim=True) + eps)) * weight.float()
    if bias is not None:
        value = value + bias.float()
    return value, None if quantized_as is None or next_scale is None else quantized(
        value, next_scale, quantized_as, zero_point
    )
