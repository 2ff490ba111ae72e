"""Multiply-adds of one layer from the shapes of its tensors; None where the shapes do not tell them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

__all__ = ["attention_work", "convolution_work", "matmul_work"]

Shape = Sequence[int]


def matmul_work(left: Shape, output: Shape) -> int | None:
    """Of [.., M, K] times [.., K, N], either of them transposed: what is multiplied for each of ``output`` [.., M, N].

    Only the size of the left operand's last two axes counts, so that its orientation does not.
    """
    if len(left) < 2 or len(output) < 2:
        return None
    rows, size = output[-2], left[-1] * left[-2]
    if rows == 0 or size % rows:
        return None
    return prod(output) * (size // rows)


def convolution_work(weight: Shape, channels: int, output: Shape) -> int | None:
    """Of a convolution whose ``weight`` makes ``channels`` channels, in any layout and with any groups.

    A transposed convolution reads what another writes: give it its input's channels, and its input as ``output``.
    """
    if channels == 0 or prod(weight) % channels:
        return None
    return prod(output) * (prod(weight) // channels)


def attention_work(query: Shape, key: Shape, value: Shape, output: Shape) -> int | None:
    """Of both products of a fused attention whose output is [.., S, D]: the operands may be turned in any way."""
    if len(output) < 2 or min(output) == 0:
        return None
    heads, rows, width = prod(output[:-2]), output[-2], output[-1]
    if prod(value) % (heads * width) or prod(query) % (heads * rows):
        return None
    columns, depth = prod(value) // (heads * width), prod(query) // (heads * rows)
    if prod(key) != heads * columns * depth:
        return None
    return heads * rows * columns * (depth + width)
