"""A linear layer of 8-bit operands in one Triton kernel, for GPUs; see ``numerics/triton_kernels``.

The kernel is an operator of torch, so that a compiled graph contains it. A zero point z of a is in the bias, because

    s (a - z) w^T t + b = s a w^T t + (b - s z t sum_k w)
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from quantizer.proxy.integer_kernels import Activation, ActivationProduct, Kernel, Window

_NAME = "quantizer::triton_linear"

torch.library.define(_NAME, "(Tensor codes, Tensor weight, Tensor scales, Tensor? bias, ScalarType out) -> Tensor")


@torch.library.impl(_NAME, ("CPU", "CUDA"))
def _linear(codes: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, out: torch.dtype) -> Tensor:
    # Triton is imported only where its kernels run.
    from quantizer.numerics.triton_kernels.products import Epilogue, linear
    from quantizer.numerics.triton_kernels.tiles import first_tile

    # Triton launches on the current device.
    device_of: Any = torch.cuda.device_of
    with device_of(codes):
        return linear(codes, weight, 1.0, scales, bias, None, None, Epilogue(dtype=out), first_tile(len(codes)))


def _without_data(codes: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, out: torch.dtype) -> Tensor:
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
        self._weight, self._weight_scales = weight, scales
        self._set(activation)

    def _set(self, activation: Activation) -> None:
        # Tensors, because numbers would be constants of a compiled graph: one graph for each layer.
        self._activation, self._scales = activation, self._weight_scales * activation.step
        point = activation.stored_point
        self._shift = None if point == 0 else self._weight.float().sum(1) * self._scales * -point

    def of_calls(self, number: int) -> list[Kernel]:
        """Return kernels with the ranges of the first ``number`` calls."""
        kernels: list[Kernel] = []
        for call in range(number):
            kernel = copy.copy(self)
            kernel._set(self._activation.of_call(call))
            kernels.append(kernel)
        return kernels

    def __call__(self, x: Tensor, bias: Tensor | None, window: Window, out: torch.dtype = torch.float32) -> Tensor:
        codes = self._activation.stored_codes(x)
        if self._shift is not None:
            bias = self._shift if bias is None else bias + self._shift
        flat = codes.reshape(-1, codes.shape[-1]).contiguous()
        result: Tensor = torch.ops.quantizer.triton_linear(flat, self._weight, self._scales, bias, out)
        return result.reshape(*x.shape[:-1], len(self._weight))
