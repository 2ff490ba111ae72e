"""The arguments of each operation's calls, whatever way they are passed."""

# ruff: noqa: A002 - the names of torch's arguments

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quantizer.proxy.lowered.kernels import Window

Arguments = tuple[Any, Any, Any, Window] | None
"""The activation, the weight, the bias or None, and the window; None for a call that no kernel makes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """An operation that kernels compute.

    Attributes:
        activation: the name of the operand that is quantized at each call; None: it is no number to quantize.
        weight: the name of the operand that is stored.
        channels: the axis of the weight that becomes the channels of the result.
        arguments: sorts the arguments of a call.
    """

    activation: str | None
    weight: str
    channels: int
    arguments: Callable[..., Arguments]


def _linear(input: Any, weight: Any, bias: Any = None) -> Arguments:
    return input, weight, bias, ()


def _matmul(input: Any, other: Any, *, out: Any = None) -> Arguments:
    return None if out is not None else (input, other, None, ())


def _mm(input: Any, mat2: Any, *, out: Any = None) -> Arguments:
    return None if out is not None else (input, mat2, None, ())


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1, out: Any = None) -> Arguments:
    return None if out is not None or beta != 1 or alpha != 1 else (mat1, mat2, input, ())


def _convolution(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: Any = 1
) -> Arguments:
    return input, weight, bias, (stride, padding, dilation, groups)


def _embedding(
    input: Any,
    weight: Any,
    padding_idx: Any = None,
    max_norm: Any = None,
    norm_type: Any = 2.0,
    scale_grad_by_freq: Any = False,
    sparse: Any = False,
) -> Arguments:
    return None if max_norm is not None else (input, weight, None, ())


CALLS: dict[str, Call] = {
    "linear": Call(activation="input", weight="weight", channels=0, arguments=_linear),
    "matmul": Call(activation="lhs", weight="rhs", channels=1, arguments=_matmul),
    "mm": Call(activation="lhs", weight="rhs", channels=1, arguments=_mm),
    "addmm": Call(activation="lhs", weight="rhs", channels=1, arguments=_addmm),
    "conv1d": Call(activation="input", weight="weight", channels=0, arguments=_convolution),
    "conv2d": Call(activation="input", weight="weight", channels=0, arguments=_convolution),
    "embedding": Call(activation=None, weight="weight", channels=0, arguments=_embedding),
}
"""The operations by their names in the catalogue."""
