"""The records of operands in calibration: the groups that share a range, and the ranges of their channels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from quantizer.observe.calibrators import Calibrator
from quantizer.proxy.weight import Weight

MOST_CALLS = 32
"""The most tensors of a pass whose ranges are kept apart, so that a long loop takes bounded memory."""

_APART = 2.0
"""How many times as large as the smallest range of a call the largest is where calls are told apart: with the range of
all of them, the call with the smallest loses one bit (6 dB). Below that they share one range, and a file one scale."""

_NUMBER_VARIES = "their number differs between batches"


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
            two layers alike, see ``numerics/weight_codes.py``.
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
        return "equalized" if self.alpha is None else f"SmoothQuant {self.alpha:g}"


@dataclass(kw_only=True, slots=True, eq=False)
class RangeGroup:
    """Operands that read the same tensors, and share one calibrator.

    A site that a pass calls several times reads a tensor in each call. Tensor n of a pass is the n-th that the group
    observes in it, whichever operand reads it first.

    Attributes:
        calibrator: of all tensors, divided by the factors of ``migration``.
        operands: their names, as ``SITE.OPERAND``.
        chosen: an amax that replaces the calibrator's own, and the name of its estimate (None: the calibrator's own).
        channels: the ranges of channels, for a migration (None: not kept, or ``channels_vary``).
        channels_vary: whether the number of channels differs between calls.
        migration: the migration of outliers that divides the tensor (None: there is none).
        parts: the range of each tensor of a pass by itself (empty: there is one, or ``together``).
        together: why the tensors of a pass cannot be told apart; empty if that needs no words (None: they can).
    """

    calibrator: Calibrator
    operands: list[str] = field(default_factory=list)
    chosen: tuple[float, str] | None = None
    channels: ChannelRange | None = None
    channels_vary: bool = False
    migration: Migration | None = None
    parts: list[RangeGroup] = field(default_factory=list)
    together: str | None = None

    @property
    def told_apart(self) -> bool:
        """True if the tensors of a pass have ranges of their own, as these differ; tensors of zeros do not count."""
        largest = [part.calibrator.largest for part in self.parts if part.calibrator.largest > 0]
        return bool(largest) and max(largest) >= _APART * min(largest)

    @property
    def ranges(self) -> list[RangeGroup]:
        """The ranges that are used: that of all tensors, and those of single ones where they are told apart."""
        return [self, *self.parts] if self.told_apart else [self]

    def of_tensor(self, number: int) -> RangeGroup:
        """Return the range of a tensor by its number in the pass, if the tensors are told apart; else that of all."""
        return self.parts[number] if self.told_apart and 0 <= number < len(self.parts) else self

    def migrated(self, migration: Migration, operands: list[str], make: Callable[[], Calibrator]) -> RangeGroup:
        """Return a range without values for the tensors divided by factors, of those of ``operands`` that read them."""
        parts = [RangeGroup(calibrator=make(), migration=migration) for _ in self.parts]
        return RangeGroup(calibrator=make(), operands=operands, migration=migration, parts=parts)

    def observe(self, x: Tensor, tensor: int) -> None:
        """Add the values of a tensor of the pass, divided by the factors already."""
        for each in (self, *(self.parts[tensor : tensor + 1] if tensor >= 0 else ())):
            each.calibrator.observe(x)

    def keep_together(self, why: str) -> None:
        """Give up to tell the tensors of a pass apart; of several reasons one stays, whichever came first."""
        self.together, self.parts = min(filter(None, (self.together, why)), default=""), []

    def add_tensor(self, calibrator: Calibrator) -> int:
        """Add one more tensor of the pass, of which ``calibrator`` is; return its number."""
        if self.together is None:
            self.parts = [*self._single(), RangeGroup(calibrator=calibrator)]
            self._bound()
        self.calibrator.merge(calibrator)
        return max(len(self.parts) - 1, 0)

    def append(self, other: RangeGroup) -> int:
        """Add the tensors of another group after those of this one; return the number of the first of them."""
        first = max(len(self.parts), 1)
        together = self.together if self.together is not None else other.together
        if together is None:
            self.parts = [*self._single(), *other._single()]
            self._bound()
        else:
            self.keep_together(together)
        self._add_values(other)
        return first

    def _single(self) -> list[RangeGroup]:
        """Return the range of each tensor by itself."""
        return self.parts or [replace(self, calibrator=self.calibrator.copy(), operands=[])]

    def _bound(self) -> None:
        if len(self.parts) > MOST_CALLS:
            self.keep_together(f"there are more than {MOST_CALLS} in a pass")

    def add_channels(self, seen: ChannelRange, tensor: int | None = None) -> None:
        """Add the channel ranges of more values, which are those of a tensor of the pass (None: of any)."""
        if tensor is not None and tensor < len(self.parts):
            self.parts[tensor].add_channels(seen)
        if not self.channels_vary:
            self.channels = seen if self.channels is None else self.channels.joined(seen)
            self.channels_vary = self.channels is None

    def add(self, other: RangeGroup) -> None:
        """Add the values of the same tensors of another pass, but not the operands of the other group."""
        if self.together is not None or other.together is not None:
            self.keep_together(other.together or self.together or "")
        elif len(self.parts) != len(other.parts):
            self.keep_together(_NUMBER_VARIES)
        for mine, theirs in zip(self.parts, other.parts, strict=False):
            mine.add(theirs)
        self._add_values(other)

    def _add_values(self, other: RangeGroup) -> None:
        self.calibrator.merge(other.calibrator)
        if other.channels is not None:
            self.add_channels(other.channels)
        elif other.channels_vary:
            self.channels, self.channels_vary = None, True
        self.chosen = self.chosen or other.chosen

    def copy(self) -> RangeGroup:
        """Return a copy; adding to it does not change the original."""
        parts = [part.copy() for part in self.parts]
        return replace(self, calibrator=self.calibrator.copy(), operands=list(self.operands), parts=parts)

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
        tensors: the tensor of its group that each call of a pass reads, -1 for a call that was not observed (None: no
            call yet; empty: not the same in all passes).
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
    tensors: tuple[int, ...] | None = None

    def read(self, call: int, tensor: int) -> None:
        """Add which tensor of its group a call reads."""
        before = self.tensors or ()
        self.tensors = (*before, *(-1 for _ in range(call - len(before))), tensor)

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
        if other.tensors is not None:
            self.tensors = other.tensors if self.tensors in (None, other.tensors) else ()

    def add_layer_before(self, name: str) -> None:
        """Add which convolution made the operand in one more call; empty: none did."""
        self.layer_before = name if self.layer_before in (None, name) else ""

    def saw_softmax(self, softmax: bool | None) -> None:
        """Add whether the operand was the output of a softmax in more calls (None: there were none)."""
        if softmax is not None:
            self.softmax = softmax and self.softmax is not False

    def tensor_of(self, call: int | None) -> int:
        """Return the tensor of its group that a call reads, by the number of the call in its pass; -1: not known."""
        tensors = self.tensors or ()
        return tensors[call] if call is not None and call < len(tensors) else -1

    @property
    def range(self) -> RangeGroup | None:
        """The group whose range is used."""
        return self.group if self.smoothed is None else self.smoothed
