"""Scales that follow what is rounded: after each step, a share of the way to the range of the values that went through.

Legend: x [*] the operand; s its scale [], [C] or in blocks; z its zero point (0 where there is none).

    s' = max(max(x) / (qmax - z), -min(x) / (z - qmin))        the least scale that clips nothing
    s  <- MOMENTUM * s + (1 - MOMENTUM) * s'
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch import nn

from quantizer.common.distributed import get_world_size
from quantizer.numerics.granularity import beside
from quantizer.numerics.granularity import in_blocks
from quantizer.numerics.qtype import qtype
from quantizer.observe.padding import read_mask
from quantizer.observe.padding import without_padding
from quantizer.proxy.operand_quantizer import OperandQuantizer

__all__ = ["MOMENTUM", "MovingAverage", "Padding", "least_scale", "step"]

MOMENTUM = 0.9


class Padding:
    """The mask of real tokens of the current batch.

    Attributes:
        mask: [B, S]; None: all of them.
    """

    def __init__(self) -> None:
        self.mask: Tensor | None = None
        self._doubted = False

    def read(self, keywords: Mapping[str, Any], args: tuple[Any, ...]) -> None:
        """Take the mask of a batch; where its meaning is doubtful none, and say so once."""
        self.mask, doubt = read_mask(keywords, args)
        if doubt is not None and not self._doubted:
            self._doubted = True
            warnings.warn(doubt, stacklevel=2)

    def keep(self, proxy: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Take the mask of the batch that ``proxy`` is called with: a forward pre-hook of it.

        A method and no function inside of another: a copy of the proxy has a copy of this object.
        """
        self.read(keywords, args)


class MovingAverage:
    """Watches the operands that share one scale.

    What it sees adds up to the next ``step``, however often the same values are shown: layers that are computed again
    for their gradients, and batches whose gradients are summed. A pass counts where gradients are recorded, whatever
    the mode of the model, because training in eval mode is training too: an evaluation belongs under
    ``torch.no_grad()``.

    Args:
        padding: of the model that is trained.
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
        # An infinity, or no number, says nothing of a range that a scale can cover, and would stay in it for good.
        needed = torch.where(needed.isfinite(), needed, 0)
        self._needed = needed if self._needed is None else torch.maximum(self._needed, needed)

    def step(self) -> None:
        """Move the scales by what was seen since the last step; by what all ranks saw."""
        scale = self.quantizers[0].scale
        assert scale is not None
        needed = torch.zeros_like(scale) if self._needed is None else self._needed
        if get_world_size() > 1:
            torch.distributed.all_reduce(needed, torch.distributed.ReduceOp.MAX)
        self._needed = None
        # Nothing seen, or zeros alone, say nothing of the range.
        moved = torch.where(needed > 0, MOMENTUM * scale + (1 - MOMENTUM) * needed, scale)
        for quantizer in self.quantizers:
            assert quantizer.scale is not None
            quantizer.scale.copy_(moved)


def step(quantizers: Iterable[OperandQuantizer]) -> None:
    """Move all moving averages among the watchers of ``quantizers`` by one step."""
    averages = {id(q.watcher): q.watcher for q in quantizers if isinstance(q.watcher, MovingAverage)}
    for average in averages.values():
        average.step()


def least_scale(x: Tensor, quantizer: OperandQuantizer) -> Tensor:
    """Return the least scale [*], of the shape of the quantizer's, with which nothing of x is clipped."""
    scale, kind = quantizer.scale, qtype(quantizer.dtype)
    assert scale is not None
    zero = 0 if quantizer.zero_point is None else int(quantizer.zero_point)
    # int8 is symmetric: its range is said by qmax alone, though its lowest step is one further.
    low = -kind.qmax if quantizer.zero_point is None else kind.qmin - zero
    values = in_blocks(x.float(), quantizer.axis, quantizer.block_size)
    shape = beside(scale, x.dim(), quantizer.axis, quantizer.block_size).shape
    axes = [axis for axis in range(values.dim()) if not shape or shape[axis] == 1]
    needed = values.amax(axes) / max(kind.qmax - zero, 1)
    if low:
        needed = torch.maximum(needed, values.amin(axes) / low)
    return needed.clamp_min(0).reshape(scale.shape).to(scale.dtype)
