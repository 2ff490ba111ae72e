"""Multiply-adds of one layer from the shapes of its tensors; None if the shapes do not determine them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

Shape = Sequence[int]


def matmul_work(left: Shape, output: Shape) -> int | None:
    """Return the multiply-adds of [.., M, K] times [.., K, N], either transposed, from the left operand and the output.

    Only the product of the left operand's last two sizes counts, so its orientation does not matter.
    """
    if len(left) < 2 or len(output) < 2:
        return None
    rows, size = output[-2], left[-1] * left[-2]
    if rows == 0 or size % rows:
        return None
    return prod(output) * (size // rows)


def convolution_work(weight: Shape, channels: int, output: Shape) -> int | None:
    """Return the multiply-adds of a convolution whose ``weight`` makes ``channels`` channels, in any layout.

    A transposed convolution swaps input and output: pass its input's channels, and its input as ``output``.
    """
    if channels == 0 or prod(weight) % channels:
        return None
    return prod(output) * (prod(weight) // channels)


def attention_work(query: Shape, key: Shape, value: Shape, output: Shape) -> int | None:
    """Return the multiply-adds of both products of a fused attention with output [.., S, D], in any orientation."""
    if len(output) < 2 or min(output) == 0:
        return None
    heads, rows, width = prod(output[:-2]), output[-2], output[-1]
    if prod(value) % (heads * width) or prod(query) % (heads * rows):
        return None
    columns, depth = prod(value) // (heads * width), prod(query) // (heads * rows)
    if prod(key) != heads * columns * depth:
        return None
    return heads * rows * columns * (depth + width)
