"""A linear layer of 8-bit operands in one Triton kernel, for GPUs; see ``numerics/triton_kernels``.

The kernel is an operator of torch, so that a compiled graph contains it. A zero point z of a is in the bias, because

    s (a - z) w^T t + b = s a w^T t + (b - s z t sum_k w)
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantizer.proxy.integer_kernels import Activation, ActivationProduct, Window

_NAME = "quantizer::triton_linear"

torch.library.define(_NAME, "(Tensor codes, Tensor weight, float s, Tensor t, Tensor? bias, ScalarType out) -> Tensor")


@torch.library.impl(_NAME, ("CPU", "CUDA"))
def _linear(codes: Tensor, weight: Tensor, s: float, t: Tensor, bias: Tensor | None, out: torch.dtype) -> Tensor:
    # Triton is imported only where its kernels run.
    from quantizer.numerics.triton_kernels.products import Epilogue, linear
    from quantizer.numerics.triton_kernels.tiles import first_tile

    return linear(codes, weight, s, t, bias, None, None, Epilogue(dtype=out), first_tile(len(codes)))


def _without_data(codes: Tensor, weight: Tensor, s: float, t: Tensor, bias: Tensor | None, out: torch.dtype) -> Tensor:
    return codes.new_empty((len(codes), len(weight)), dtype=out)


torch.library.register_fake(_NAME, _without_data)


class TritonLinear(ActivationProduct):
    """Triton's linear of INT8 or FP8 with a range from calibration.

    Args:
        weight: codes [N, K].
        scales: t, float32.
        activation: makes a.
    """

    name = _NAME

    def __init__(self, weight: Tensor, scales: Tensor, activation: Activation) -> None:
        self._weight, self._scales, self._activation = weight, scales, activation
        self._sums = weight.float().sum(1) * scales

    def __call__(self, x: Tensor, bias: Tensor | None, window: Window, out: torch.dtype = torch.float32) -> Tensor:
        codes, shift = self._activation.stored_codes(x)
        step = self._activation.step
        if shift:
            moved = self._sums * (-step * shift)
            bias = moved if bias is None else bias + moved
        flat = codes.reshape(-1, codes.shape[-1]).contiguous()
        result: Tensor = torch.ops.quantizer.triton_linear(flat, self._weight, step, self._scales, bias, out)
        return result.reshape(*x.shape[:-1], len(self._weight))
