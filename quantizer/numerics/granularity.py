"""Scale granularity: which values share one scale.

Legend: x [.., A, ..] the values, A the size of ``axis``; B the block size.

====================  ==================  ==================================  ====================
granularity           arguments           scale                               x [6, 8] with
====================  ==================  ==================================  ====================
per tensor            neither             []                                  none: []
per axis              axis                [A]                                 axis 1: [8]
per block             axis, block_size    [.., A / B, ..], as many axes as x  axis 1, B 4: [6, 2]
====================  ==================  ==================================  ====================

These are the granularities of ONNX ``QuantizeLinear`` (https://onnx.ai/onnx/operators/onnx__QuantizeLinear.html).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def scale_shape(shape: Sequence[int], axis: int | None, block_size: int | None) -> tuple[int, ...]:
    """Return the shape of the scale of values [*shape]; axis and block size must fit the shape."""
    if axis is None:
        return ()
    if block_size is None:
        return (shape[axis],)
    blocks = list(shape)
    blocks[axis] //= block_size
    return tuple(blocks)


def in_blocks(x: Tensor, axis: int | None, block_size: int | None) -> Tensor:
    """Return x [.., A, ..] as a view [.., A / B, B, ..]; x itself without blocks."""
    if axis is None or block_size is None:
        return x
    axis %= x.dim()
    return x.view(*x.shape[:axis], x.shape[axis] // block_size, block_size, *x.shape[axis + 1 :])


def beside(scale: Tensor, ndim: int, axis: int | None, block_size: int | None) -> Tensor:
    """Return a scale or zero point in float32, broadcastable against ``in_blocks(x)`` for x with ``ndim`` axes."""
    if axis is None:
        return scale.float()
    axis %= ndim
    if block_size is not None:
        return scale.float().unsqueeze(axis + 1)
    return scale.float().reshape([-1 if d == axis else 1 for d in range(ndim)])


def scale_of_each(scale: Tensor, shape: Sequence[int], axis: int | None, block_size: int | None) -> Tensor:
    """Return the scale of each value, float32 [*shape]."""
    scales = torch.ones(*shape, device=scale.device)
    in_blocks(scales, axis, block_size).mul_(beside(scale, len(shape), axis, block_size))
    return scales


def in_memory_order(x: Tensor) -> Tensor:
    """Return x [*] permuted to a contiguous tensor if possible, for faster passes."""
    if x.is_contiguous() or x.layout != torch.strided:
        return x
    strides = x.stride()
    permuted = x.permute(sorted(range(x.dim()), key=lambda axis: -strides[axis]))
    return permuted if permuted.is_contiguous() else x
