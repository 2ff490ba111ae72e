"""Operands as calibration sees them: the group that shares a range, and the channels of a group."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace

import torch
from torch import Tensor

from quantizer.calibrators import Calibrator
from quantizer.proxy.weight import Weight

__all__ = ["ChannelRange", "Migration", "OperandRecord", "RangeGroup"]


@dataclass(frozen=True, slots=True)
class ChannelRange:
    """The least and the largest value of each channel, a channel being an index of the last axis: float32 [K] each."""

    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, x: Tensor) -> ChannelRange:
        """Return the channels of x [.., K], which is not empty."""
        low, high = torch.aminmax(x.detach().reshape(-1, x.shape[-1]), dim=0)
        return cls(low.float(), high.float())

    @property
    def magnitude(self) -> Tensor:
        """The largest magnitude of each channel, [K]."""
        return torch.maximum(self.low.abs(), self.high.abs())

    def joined(self, other: ChannelRange) -> ChannelRange | None:
        """Return the channels of both; None where their numbers differ."""
        if self.low.shape != other.low.shape:
            return None
        return ChannelRange(torch.minimum(self.low, other.low), torch.maximum(self.high, other.high))


@dataclass(frozen=True, kw_only=True, slots=True)
class Migration:
    """The migration of outliers of an activation x [.., K] into the weights W it meets: (x / s) (W * s) is x W.

    ``factors`` are s, float32 [K]; ``alpha`` is the share of the activation, see ``smooth.migration_factors``.
    """

    alpha: float
    factors: Tensor


@dataclass(kw_only=True, slots=True, eq=False)
class RangeGroup:
    """Operands that read one tensor, with their one calibrator.

    ``chosen`` is an amax that was taken instead of the calibrator's own, and the name of the estimate. ``channels`` are
    kept where a migration may want them (None: not kept, or ``channels_vary``: their number changes); ``migration`` is
    what the tensor is divided by before the calibrator sees it.
    """

    calibrator: Calibrator
    operands: list[str] = field(default_factory=list)
    chosen: tuple[float, str] | None = None
    channels: ChannelRange | None = None
    channels_vary: bool = False
    migration: Migration | None = None

    def add_channels(self, seen: ChannelRange) -> None:
        """Take in channels of more values."""
        if not self.channels_vary:
            self.channels = seen if self.channels is None else self.channels.joined(seen)
            self.channels_vary = self.channels is None

    def add(self, other: RangeGroup) -> None:
        """Take in the values of another group; who its operands are is not among them."""
        self.calibrator.merge(other.calibrator)
        if other.channels is not None:
            self.add_channels(other.channels)
        elif other.channels_vary:
            self.channels, self.channels_vary = None, True
        self.chosen = self.chosen or other.chosen

    def copy(self) -> RangeGroup:
        """Return a copy, to which more may be added."""
        return replace(self, calibrator=self.calibrator.copy(), operands=list(self.operands))

    def amax(self, dtype: str) -> float:
        """Return the magnitude that maps to the largest step of a format."""
        return self.calibrator.for_format(dtype).amax() if self.chosen is None else self.chosen[0]


@dataclass(kw_only=True, slots=True)
class OperandRecord:
    """The record of one operand: a weight, or an activation's group.

    Attributes:
        weight: the weight that it is.
        axis: the axis of the weight's output channels (None: it has none).
        inner: the axis of the weight that runs along the last axis of the activation (None: none does).
        group: the activation's group.
        softmax: it is what a softmax gave in every call, values from 0 to 1 (None: none seen yet).
        ends_branch: of an add: it is what a product gives, as it is, and the other operand skips that product.
        smoothed: the group that it shares a range with once outliers are migrated (None: they are not).
        left: why they are not, where they might have been.
    """

    weight: Weight | None = None
    axis: int | None = None
    inner: int | None = None
    group: RangeGroup | None = None
    softmax: bool | None = None
    ends_branch: bool = False
    smoothed: RangeGroup | None = None
    left: str | None = None

    def add(self, other: OperandRecord) -> None:
        """Take in what other calls say of it, beside its weight and its group."""
        self.axis = other.axis if self.axis is None else self.axis
        self.inner = other.inner if self.inner is None else self.inner
        self.saw_softmax(other.softmax)
        self.ends_branch = self.ends_branch or other.ends_branch

    def saw_softmax(self, softmax: bool | None) -> None:
        """Note whether more calls had what a softmax gave (None: there were none)."""
        if softmax is not None:
            self.softmax = softmax and self.softmax is not False

    @property
    def range(self) -> RangeGroup | None:
        """The group whose range is used."""
        return self.group if self.smoothed is None else self.smoothed
