"""Records of operands in calibration: range groups, ranges per channel, and SmoothQuant factors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from quantizer.observe.calibrators import Calibrator
from quantizer.proxy.weight import Weight

MOST_CALLS = 512
"""The largest number of tensors of a pass with ranges of their own, so that long loops use bounded memory.

A model may have one activation module for all layers: that of YOLO26n has 109 tensors.
"""

_APART = 2.0
"""The ratio of the largest to the smallest range from which calls have ranges of their own.

With a common range the call with the smallest would lose one bit (6 dB). Below this ratio calls share one range, and a
file has one scale.
"""

_NUMBER_VARIES = "their number differs between batches"


@dataclass(frozen=True, slots=True)
class ChannelRange:
    """The minimum and the maximum of each channel (index of one axis), float32 [K] each."""

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
        # Ranges from a file are on the CPU.
        low, high = other.low.to(self.low.device), other.high.to(self.high.device)
        return ChannelRange(torch.minimum(self.low, low), torch.maximum(self.high, high))


@dataclass(frozen=True, kw_only=True, slots=True)
class Migration:
    """The migration of activation outliers into weights (SmoothQuant): x W = (x / s) (W * s) for x [.., K].

    Attributes:
        alpha: the migration strength, see ``smoothquant.migration_factors``; None: the factors equalize the weights of
            two layers, see ``numerics/weight_codes.py``.
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
        return self.axis, self.weight_axis

    @property
    def text(self) -> str:
        """The note for the coverage."""
        return "equalized" if self.alpha is None else f"SmoothQuant {self.alpha:g}"


@dataclass(kw_only=True, slots=True, eq=False)
class RangeGroup:
    """Operands that read the same tensors and share one calibrator.

    A site that a pass calls several times reads one tensor per call. Tensor n of a pass is the n-th that the group
    observes in it, whichever operand reads it first.

    Attributes:
        calibrator: the statistics of all tensors, divided by the factors of ``migration``.
        operands: their names, as ``SITE.OPERAND``.
        chosen: an amax that replaces the calibrator's, and the name of its estimate (None: the calibrator's own).
        channels: the ranges of channels, for SmoothQuant (None: not recorded, or ``channels_vary``).
        channels_vary: whether the number of channels differs between calls.
        migration: the factors that divide the tensor (None: there are none).
        parts: the range of each tensor of a pass (empty: there is one tensor, or ``together``).
        together: why the tensors of a pass share a range; empty if no note is needed (None: they have their own
            ranges).
        results: the number of the tensor whose range each tensor has (empty: its own). Tensors that derive from one
            result of a convolution have the range of the whole result, which is a further tensor.
    """

    calibrator: Calibrator
    operands: list[str] = field(default_factory=list)
    chosen: tuple[float, str] | None = None
    channels: ChannelRange | None = None
    channels_vary: bool = False
    migration: Migration | None = None
    parts: list[RangeGroup] = field(default_factory=list)
    together: str | None = None
    results: tuple[int, ...] = ()

    @property
    def _used(self) -> list[RangeGroup]:
        """The ranges of results and of other tensors."""
        return [self.parts[number] for number in sorted({*map(self.range_of, range(len(self.parts)))})]

    @property
    def told_apart(self) -> bool:
        """True if the tensors of a pass have ranges of their own; tensors of zeros do not count."""
        largest = [part.calibrator.largest for part in self._used if part.calibrator.largest > 0]
        return bool(largest) and max(largest) >= _APART * min(largest)

    @property
    def ranges(self) -> list[RangeGroup]:
        """The used ranges: of all tensors together, and of each tensor if they have their own."""
        return [self, *self._used] if self.told_apart else [self]

    def range_of(self, number: int) -> int:
        """Return the number of the tensor whose range tensor ``number`` has: itself, or the result that it is from."""
        return self.results[number] if 0 <= number < len(self.results) else number

    def of_tensor(self, number: int) -> RangeGroup:
        """Return the own range of tensor ``number`` of the pass, or the common range if tensors share one."""
        own = self.told_apart and 0 <= number < len(self.parts)
        return self.parts[self.range_of(number)] if own else self

    def migrated(self, migration: Migration, operands: list[str], make: Callable[[], Calibrator]) -> RangeGroup:
        """Return an empty range group for the tensors divided by SmoothQuant factors, read by ``operands``."""
        parts = [RangeGroup(calibrator=make(), migration=migration) for _ in self.parts]
        return RangeGroup(
            calibrator=make(),
            operands=operands,
            migration=migration,
            parts=parts,
            results=self.results,
        )

    def selected(self, numbers: Sequence[int], operands: list[str], *, has_results: bool) -> RangeGroup:
        """Return a group of some tensors of the pass, in the given order, which ``operands`` read.

        Args:
            numbers: the tensors; all of them with ``has_results``.
            operands: the names of their operands.
            has_results: whether tensors that derive from one result keep a common range.
        """
        parts = [self.parts[number].copy() for number in numbers]
        first, *others = [part for number, part in zip(numbers, parts, strict=True) if not self._is_whole(number)]
        group = replace(first.copy(), parts=parts if len(parts) > 1 else [])
        for part in others:
            group._add_values(part)
        chosen = self.chosen if len(parts) > 1 else group.chosen
        group.operands, group.chosen = operands, chosen
        if has_results and self.results:
            group.results = tuple(numbers.index(self.range_of(number)) for number in numbers)
        return group

    def _is_whole(self, number: int) -> bool:
        """Return whether a tensor is a whole result, whose values other tensors have."""
        return any(result == number and other != number for other, result in enumerate(self.results))

    def observe(self, x: Tensor, tensor: int) -> None:
        """Add the values of a tensor of the pass, already divided by the factors."""
        own = (
            [self.parts[number] for number in {tensor, self.range_of(tensor)}] if 0 <= tensor < len(self.parts) else []
        )
        for each in (self, *own):
            each.calibrator.observe(x)

    def keep_together(self, why: str) -> None:
        """Let all tensors of a pass share one range; of several reasons the first in sort order is kept."""
        self.together, self.parts, self.results = min(filter(None, (self.together, why)), default=""), [], ()

    def join_result(self, first: int, other: int) -> int:
        """Let two tensors of one result have a common range; return the number of the result."""
        results = [self.range_of(number) for number in range(len(self.parts))]
        whole, added = results[first], self.parts[results[other]]
        if whole == results[other]:
            return whole
        if whole == first:
            whole = len(self.parts)
            self.parts = [*self.parts, RangeGroup(calibrator=self.parts[first].calibrator.copy())]
            results.append(whole)
        self.parts[whole].calibrator.merge(added.calibrator)
        former = results[other]
        self.results = tuple(
            whole if number in (first, other) or to == former else to for number, to in enumerate(results)
        )
        return whole

    def add_tensor(self, calibrator: Calibrator) -> int:
        """Add one more tensor of the pass, observed by ``calibrator``; return its index."""
        if self.together is None:
            self.parts = [*self._single(), RangeGroup(calibrator=calibrator)]
            self.results = self.results and (*self.results, len(self.parts) - 1)
            self._bound()
        self.calibrator.merge(calibrator)
        return max(len(self.parts) - 1, 0)

    def append(self, other: RangeGroup) -> int:
        """Add the tensors of another group after the own ones; return the index of the first of them."""
        first = max(len(self.parts), 1)
        together = self.together if self.together is not None else other.together
        if together is None:
            mine, theirs = self._single(), other._single()
            if self.results or other.results:
                numbers = [first + other.range_of(number) for number in range(len(theirs))]
                self.results = (*map(self.range_of, range(first)), *numbers)
            self.parts = [*mine, *theirs]
            self._bound()
        else:
            self.keep_together(together)
        self._add_values(other)
        return first

    def _single(self) -> list[RangeGroup]:
        return self.parts or [replace(self, calibrator=self.calibrator.copy(), operands=[])]

    def _bound(self) -> None:
        if len(self.parts) > MOST_CALLS:
            self.keep_together(f"a pass has more than {MOST_CALLS} calls")

    def add_channels(self, channels: ChannelRange, tensor: int | None = None) -> None:
        """Add the channel ranges of more values, of tensor ``tensor`` of the pass (None: of any)."""
        if tensor is not None and tensor < len(self.parts):
            self.parts[tensor].add_channels(channels)
        if not self.channels_vary:
            self.channels = channels if self.channels is None else self.channels.joined(channels)
            self.channels_vary = self.channels is None

    def add(self, other: RangeGroup) -> None:
        """Add the values of the same tensors of another pass, but not the operands of the other group."""
        if self.together is not None or other.together is not None:
            self.keep_together(other.together or self.together or "")
        elif len(self.parts) != len(other.parts) or self.results != other.results:
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
        """Return the magnitude that maps to the largest integer of a format."""
        return self.calibrator.for_format(dtype).amax() if self.chosen is None else self.chosen[0]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoundedWeight:
    """The chosen rounding of a weight.

    Attributes:
        codes: the integers, int8 [*]; None: rounding to nearest.
        text: a note on how they were chosen.
        amax: the ranges that belong to the integers, float32 in the shape of the scale; None: those of the calibrator.
    """

    codes: Tensor | None
    text: str
    amax: Tensor | None = None


@dataclass(kw_only=True, slots=True)
class OperandRecord:
    """The record of one operand: a weight, or the range group of an activation.

    Attributes:
        weight: the weight (None: an activation).
        axis: the axis of the weight's output channels (None: it has none).
        inner: the axis of the weight that is multiplied with the last axis of the activation (None: none).
        group: the activation's group (None: a weight).
        softmax: whether the operand is the output of a softmax, 0 to 1, in every call (None: no call yet).
        ends_branch: whether this operand of an add is the direct output of a layer, and the other operand is not.
        smoothed: the range group after SmoothQuant (None: not smoothed).
        left: why the operand is not smoothed, if it could have been.
        rounded: the chosen rounding of the weight (None: to nearest).
        layer_before: the convolution that computed the operand, with only channelwise operations in between (empty:
            none, or not in every call; None: no call yet).
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
        tensors = [*(self.tensors or ()), *(-1 for _ in range(call + 1 - len(self.tensors or ())))]
        if tensors[call] < 0:
            tensors[call] = tensor
        self.tensors = tuple(tensors)

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
        """Record the convolution that computed the operand in one more call; empty: none."""
        self.layer_before = name if self.layer_before in (None, name) else ""

    def saw_softmax(self, softmax: bool | None) -> None:
        """Record whether the operand was the output of a softmax in more calls (None: no calls)."""
        if softmax is not None:
            self.softmax = softmax and self.softmax is not False

    def tensor_of(self, call: int | None) -> int:
        """Return the tensor of its group that call ``call`` of a pass reads; -1: unknown."""
        tensors = self.tensors or ()
        return tensors[call] if call is not None and call < len(tensors) else -1

    @property
    def range(self) -> RangeGroup | None:
        return self.group if self.smoothed is None else self.smoothed
