"""Bounds of the result of an operation, from bounds of its operands.

Legend: |x| the largest magnitude in x; K the contracted length of a product. A product of x [.., K] and w [K, N] is at
most sqrt(K) |x| times the largest norm of a column of w (Cauchy-Schwarz).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from quantizer.numerics.float16 import FLOAT16_MAX

MASKS = -1e8
"""Lower values are masks: no activation is so low unless others are as high."""

# fmt: off
_KEEP = {
    f"aten::{name}"
    for name in (
        "abs", "_adaptive_avg_pool2d", "amax", "amin", "avg_pool2d", "cat", "clone", "constant_pad_nd",
        "copy_", "embedding", "flip", "gather", "gelu", "hardswish_", "index", "index_select",
        "lift_fresh", "masked_fill", "masked_fill_", "max_pool2d_with_indices", "maximum", "mean",
        "minimum", "native_dropout", "neg", "relu", "relu_", "repeat", "roll", "silu", "silu_", "stack",
        "_to_copy", "tril", "triu", "_unsafe_view", "where",
    )
}
# fmt: on
"""Operations whose result is at most as large as their operands."""

_SUMS = {f"aten::{name}" for name in ("add", "add_", "sub", "sub_", "rsub")}
_ONES = {
    f"aten::{name}"
    for name in ("_softmax", "_safe_softmax", "sigmoid", "sigmoid_", "tanh", "tanh_", "sin", "cos", "erf")
}
_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Products, with the place of their left operand."""

_ATTENTION = "aten::_scaled_dot_product_"
_LAYER_NORM = "aten::native_layer_norm"


def passes_masks_on(name: str) -> bool:
    """Return whether a mask among the operands of an operation remains a mask in its result."""
    return name in _KEEP or name in _SUMS


def result_bound(
    name: str,
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    bounds: Sequence[float],
    column: Callable[[int], float],
) -> float:
    """Return a bound of the first result of an operation; infinity for an operation without a known bound.

    Args:
        name: the operation, such as ``aten::mm``.
        args, keywords: its arguments.
        bounds: the bound of each floating tensor among the arguments, in order.
        column: a function that returns the largest norm of a column of an argument, by its place.
    """
    # Integers too, since a tensor may be filled with one; an axis or an index among them only loosens the bound.
    numbers = [abs(value) for value in args if type(value) in (int, float) and not is_mask(value)]
    factors: list[float] = [abs(value) for value in args if type(value) in (int, float)]
    factor: float = max([1.0, *(abs(value) for value in keywords.values() if type(value) in (int, float))])
    if name in _ONES:
        return 1.0
    if not bounds:
        return math.inf
    if name in _KEEP and not _divides_otherwise(name, args):
        return float(max([*bounds, *numbers]))
    if name in _SUMS:
        return factor * sum(bounds) + sum(factors)
    if name in ("aten::mul", "aten::mul_"):
        return math.prod([*bounds, *factors])
    if name in ("aten::div", "aten::div_") and len(args) > 1 and isinstance(args[1], int | float):
        return bounds[0] / abs(args[1]) if args[1] else math.inf
    if name == _LAYER_NORM:
        # The distance of a value of a row from the mean is at most sqrt(length) times the standard deviation.
        farthest: float = math.sqrt(math.prod(args[1]))
        return farthest * (bounds[1] if len(bounds) > 1 else 1.0) + sum(bounds[2:])
    if name in _PRODUCTS:
        first = _PRODUCTS[name]
        root: float = math.sqrt(args[first].shape[-1])
        return factor * (sum(bounds[:first]) + root * bounds[first] * column(first + 1))
    if name == "aten::convolution" and not args[6]:
        patch: int = math.prod(args[1].shape[1:])
        return patch * bounds[0] * bounds[1] + sum(bounds[2:])
    return bounds[2] if name.startswith(_ATTENTION) else math.inf


def largest_inside(name: str, args: Sequence[Any], bounds: Sequence[float], made: Sequence[Tensor]) -> float:
    """Return the largest value of a tensor that a target has inside an operation; 0 if none can be beyond float16."""
    if made[0].numel() == 0 or any(isinstance(value, Tensor) and value.numel() == 0 for value in args):
        # For example an expert without tokens.
        return 0.0
    if name == _LAYER_NORM and bounds[0] > math.sqrt(FLOAT16_MAX):
        # The last result is the reciprocal of the standard deviation; its -2nd power is the variance.
        smallest = float(made[-1].min())
        return smallest**-2 if smallest else math.inf
    if name.startswith(_ATTENTION):
        query, key = args[:2]
        if query.shape[-1] * bounds[0] * bounds[1] > FLOAT16_MAX:
            return float(query.norm(dim=-1).max() * key.norm(dim=-1).max())
    return 0.0


def _divides_otherwise(name: str, args: Sequence[Any]) -> bool:
    """Return whether an average pooling divides its sums by a number other than that of their terms."""
    divisor = 6
    return name == "aten::avg_pool2d" and len(args) > divisor and args[divisor] is not None


def beyond(bound: float) -> bool:
    """Return whether a bound is beyond float16; True for NaN, which bounds nothing."""
    return not bound <= FLOAT16_MAX


def is_mask(value: Any) -> bool:
    """Return whether a number is so low that it can only be that of a mask."""
    return isinstance(value, float) and value < MASKS
