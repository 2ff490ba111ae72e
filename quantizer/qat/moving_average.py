"""Scales as moving averages: after each step a scale moves towards the one that the step's values need.

Legend: x [*] the operand; s its scale [], [C] or in blocks; z its zero point (0 where there is none).

    s' = max(max(x) / (qmax - z), -min(x) / (z - qmin))        the smallest scale that clips nothing
    s  <- MOMENTUM * s + (1 - MOMENTUM) * s'
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.common.distributed import all_reduce_tensor
from quantizer.numerics.granularity import beside, in_blocks
from quantizer.numerics.qtype import qtype
from quantizer.observe.site_statistics import read_mask, without_padding
from quantizer.proxy.operand_quantizer import OperandQuantizer

MOMENTUM = 0.9


class Padding:
    """The mask of the current batch, which tells real tokens from padding.

    Attributes:
        mask: [B, S]; None: all tokens are real.
    """

    def __init__(self) -> None:
        self.mask: Tensor | None = None
        self._doubted = False

    def read(self, keywords: Mapping[str, Any], args: tuple[Any, ...]) -> None:
        """Store the mask of a batch; if its meaning is doubtful, store None and warn once."""
        self.mask, doubt = read_mask(keywords, args)
        if doubt is not None and not self._doubted:
            self._doubted = True
            warnings.warn(doubt, stacklevel=2)

    def keep(self, proxy: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Store the mask of the batch with which ``proxy`` is called, as a forward pre-hook of it.

        It is a method, not a closure, so that a copy of the proxy has a copy of this object.
        """
        self.read(keywords, args)


class MovingAverage:
    """The moving average of one scale, and the quantizers of the operands that share it.

    It keeps the maximum of all values until the next ``step``, so that neither layers that are computed again for their
    gradients nor batches whose gradients are summed count twice. A pass counts if gradients are recorded, in train and
    in eval mode, because training in eval mode is training too: run evaluations under ``torch.no_grad()``.
    """

    def __init__(self, padding: Padding) -> None:
        self.quantizers: list[OperandQuantizer] = []
        self._padding = padding
        self._needed: Tensor | None = None

    def __call__(self, x: Tensor, quantizer: OperandQuantizer) -> None:
        if quantizer.of_samples:
            x = without_padding(x, self._padding.mask)
        if x.numel() == 0:
            return
        needed = least_scale(x, quantizer)
        # No scale can cover infinities or NaN, and the average would never lose them.
        needed = torch.where(needed.isfinite(), needed, 0)
        self._needed = needed if self._needed is None else torch.maximum(self._needed, needed)

    def step(self) -> None:
        """Move the scale towards the range of all values since the last step, of all ranks."""
        scale = self.quantizers[0].scale
        assert scale is not None
        needed = torch.zeros_like(scale) if self._needed is None else self._needed
        needed = all_reduce_tensor(needed, largest=True)
        self._needed = None
        # Without values, or with zeros alone, there is no range to follow.
        moved = torch.where(needed > 0, MOMENTUM * scale + (1 - MOMENTUM) * needed, scale)
        for quantizer in self.quantizers:
            assert quantizer.scale is not None
            quantizer.scale.copy_(moved)


def step(quantizers: Iterable[OperandQuantizer]) -> None:
    """Step every moving average among the watchers of ``quantizers`` once."""
    averages = {id(q.watcher): q.watcher for q in quantizers if isinstance(q.watcher, MovingAverage)}
    for average in averages.values():
        average.step()


def least_scale(x: Tensor, quantizer: OperandQuantizer) -> Tensor:
    """Return the smallest scale, of the shape of the quantizer's, with which no value of x is clipped."""
    scale, kind = quantizer.scale, qtype(quantizer.dtype)
    assert scale is not None
    zero = 0 if quantizer.zero_point is None else int(quantizer.zero_point)
    # Without a zero point int8 is symmetric: qmax alone decides the range, though the lowest code is -qmax - 1.
    low = -kind.qmax if quantizer.zero_point is None else kind.qmin - zero
    values = in_blocks(x.float(), quantizer.axis, quantizer.block_size)
    shape = beside(scale, x.dim(), quantizer.axis, quantizer.block_size).shape
    axes = [axis for axis in range(values.dim()) if not shape or shape[axis] == 1]
    needed = values.amax(axes) / max(kind.qmax - zero, 1)
    if low:
        needed = torch.maximum(needed, values.amin(axes) / low)
    return needed.clamp_min(0).reshape(scale.shape).to(scale.dtype)
