"""The records of operands in calibration: the groups that share a range, and the ranges of their channels."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace

import torch
from torch import Tensor

from quantizer.calibrators import Calibrator
from quantizer.proxy.weight import Weight

__all__ = ["ChannelRange", "Migration", "OperandRecord", "RangeGroup", "RoundedWeight"]


@dataclass(frozen=True, slots=True)
class ChannelRange:
    """The minimum and the maximum of each channel (index of the last axis, or of another), float32 [K] each."""

    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, x: Tensor, axis: int = -1) -> ChannelRange:
        """Return the channel ranges of x [.., K, ..], which must not be empty, along an axis."""
        if axis == -1:
            low, high = torch.aminmax(x.detach().reshape(-1, x.shape[-1]), dim=0)
        else:
            others = [d for d in range(x.dim()) if d != axis % x.dim()]
            low, high = x.detach().amin(others), x.detach().amax(others)
        return cls(low.float(), high.float())

    @property
    def magnitude(self) -> Tensor:
        """The largest magnitude of each channel, [K]."""
        return torch.maximum(self.low.abs(), self.high.abs())

    def joined(self, other: ChannelRange) -> ChannelRange | None:
        """Return the channel ranges of both together; None if the numbers of channels differ."""
        if self.low.shape != other.low.shape:
            return None
        # Those of a file are on the CPU, wherever the model is.
        low, high = other.low.to(self.low.device), other.high.to(self.high.device)
        return ChannelRange(torch.minimum(self.low, low), torch.maximum(self.high, high))


@dataclass(frozen=True, kw_only=True, slots=True)
class Migration:
    """The migration of outliers of an activation x [.., K] into the weights W of its products: (x / s) (W * s) is x W.

    Attributes:
        alpha: the share of the activation, see ``smoothquant.migration_factors``; None: the factors make the weights of
            two layers alike, see ``numerics/equalization.py``.
        factors: s, float32 [K].
        axis: the axis of x.
        weight_axis: the axis of W; None: the one that is multiplied with the last axis of x.
    """

    alpha: float | None
    factors: Tensor
    axis: int = -1
    weight_axis: int | None = None

    @property
    def axes(self) -> tuple[int, int | None]:
        """``axis`` and ``weight_axis``."""
        return self.axis, self.weight_axis

    @property
    def text(self) -> str:
        """The text for the coverage."""
        return "equalized" if self.alpha is None else f"smooth {self.alpha:g}"


@dataclass(kw_only=True, slots=True, eq=False)
class RangeGroup:
    """Operands that read the same tensor, and share one calibrator.

    Attributes:
        calibrator: of the tensor, divided by the factors of ``migration``.
        operands: their names, as ``SITE.OPERAND``.
        chosen: an amax that replaces the calibrator's own, and the name of its estimate (None: the calibrator's own).
        channels: the ranges of channels, for a migration (None: not kept, or ``channels_vary``).
        channels_vary: whether the number of channels differs between calls.
        migration: the migration of outliers that divides the tensor (None: there is none).
    """

    calibrator: Calibrator
    operands: list[str] = field(default_factory=list)
    chosen: tuple[float, str] | None = None
    channels: ChannelRange | None = None
    channels_vary: bool = False
    migration: Migration | None = None

    def add_channels(self, seen: ChannelRange) -> None:
        """Add the channel ranges of more values."""
        if not self.channels_vary:
            self.channels = seen if self.channels is None else self.channels.joined(seen)
            self.channels_vary = self.channels is None

    def add(self, other: RangeGroup) -> None:
        """Add the values of another group, but not its operands."""
        self.calibrator.merge(other.calibrator)
        if other.channels is not None:
            self.add_channels(other.channels)
        elif other.channels_vary:
            self.channels, self.channels_vary = None, True
        self.chosen = self.chosen or other.chosen

    def copy(self) -> RangeGroup:
        """Return a copy; adding to it does not change the original."""
        return replace(self, calibrator=self.calibrator.copy(), operands=list(self.operands))

    def amax(self, dtype: str) -> float:
        """Return the magnitude that maps to the largest code of a format."""
        return self.calibrator.for_format(dtype).amax() if self.chosen is None else self.chosen[0]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoundedWeight:
    """The rounding that was chosen for a weight.

    Attributes:
        codes: the codes, int8 [*]; None: the nearest ones.
        text: how they were chosen.
        amax: the ranges that belong to the codes, float32 in the shape of the scale; None: those of the calibrator.
    """

    codes: Tensor | None
    text: str
    amax: Tensor | None = None


@dataclass(kw_only=True, slots=True)
class OperandRecord:
    """The record of one operand: a weight, or an activation's group.

    Attributes:
        weight: the weight (None: an activation).
        axis: the axis of the weight's output channels (None: it has none).
        inner: the axis of the weight that is multiplied with the last axis of the activation (None: none is).
        group: the activation's group (None: a weight).
        softmax: whether the operand is the output of a softmax, 0 to 1, in every call (None: no call yet).
        ends_branch: whether this operand of an add is the direct result of a product, and the other operand is not.
        smoothed: the group that the operand shares a range with after migration of outliers (None: no migration).
        left: why there is no migration, if there could have been one.
        rounded: how the weight is rounded (None: to nearest, without a choice).
        layer_before: the convolution that made the operand, only operations on single channels in between (empty: none
            did, or not in every call; None: no call yet).
        spread: float32 [C], the factors of a weight's output channels that share one scale (None: they are 1).
    """

    weight: Weight | None = None
    axis: int | None = None
    inner: int | None = None
    group: RangeGroup | None = None
    softmax: bool | None = None
    ends_branch: bool = False
    smoothed: RangeGroup | None = None
    left: str | None = None
    rounded: RoundedWeight | None = None
    layer_before: str | None = None
    spread: Tensor | None = None

    def add(self, other: OperandRecord) -> None:
        """Add the record of other calls, except for weight and group."""
        self.axis = other.axis if self.axis is None else self.axis
        self.inner = other.inner if self.inner is None else self.inner
        self.saw_softmax(other.softmax)
        self.ends_branch = self.ends_branch or other.ends_branch
        if other.layer_before is not None:
            self.add_layer_before(other.layer_before)
        self.smoothed, self.left = self.smoothed or other.smoothed, self.left or other.left
        self.spread = other.spread if self.spread is None else self.spread

    def add_layer_before(self, name: str) -> None:
        """Add which convolution made the operand in one more call; empty: none did."""
        self.layer_before = name if self.layer_before in (None, name) else ""

    def saw_softmax(self, softmax: bool | None) -> None:
        """Add whether the operand was the output of a softmax in more calls (None: there were none)."""
        if softmax is not None:
            self.softmax = softmax and self.softmax is not False

    @property
    def range(self) -> RangeGroup | None:
        """The group whose range is used."""
        return self.group if self.smoothed is None else self.smoothed
