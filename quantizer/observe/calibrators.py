"""Calibrators: estimators of a range from a streaming histogram of magnitudes.

Legend: w = 2**exponent the bin width; bin i counts the values with i * w <= |x| < (i + 1) * w; counts are 64-bit.

The width is a power of two and grows by doubling, which merges bins pairwise. Since floor(floor(|x| / w) / 2) =
floor(|x| / 2w), the merged histogram equals one of the final width from the start: the result depends neither on the
order of the data nor on its division into batches. Memory is bounded by the number of bins.

``max`` uses the largest magnitude, ``percentile`` covers a share of the values and clips the others, ``mse`` minimizes
the mean squared quantization error, and ``entropy`` minimizes the divergence of the quantized histogram.
"""

from __future__ import annotations

import copy
import ctypes
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from quantizer.errors import CalibrationError
from quantizer.numerics.formats import QType, qtype
from quantizer.numerics.granularity import in_memory_order
from quantizer.numerics.torch_operators import fake_quantize
from quantizer.utils import devices
from quantizer.utils import registry as choices
from quantizer.utils.registry import Registry, named_in_errors

BINS = 2048

_PIECE = 2**17
"""The number of values counted at a time on a CPU: cached memory takes a third of the time of uncached memory."""

_FINEST = -127
"""The exponent of the smallest width whose inverse is finite in float32."""


class Histogram:
    """Counts of |x| in ``BINS`` bins, whose width depends on the largest value so far.

    Attributes:
        exponent: log2 of the bin width; None until a value other than zero is observed.
    """

    def __init__(self) -> None:
        self._counts = torch.zeros(BINS, dtype=torch.int64)
        # Further counts on a GPU, which are copied when they are read.
        self._on_device: Tensor | None = None
        self.exponent: int | None = None
        self._zeros = 0
        # Replaced and not cleared when values are added, because copies share it.
        self._figures: dict[object, float] = {}

    @classmethod
    def restored(cls, counts: Tensor, exponent: int | None, zeros: int) -> Histogram:
        """Return a histogram with the given ``counts`` int64 [BINS], ``exponent`` and ``zeros``."""
        histogram = cls()
        histogram.counts, histogram.exponent, histogram._zeros = counts.clone(), exponent, zeros
        return histogram

    @property
    def counts(self) -> Tensor:
        """The counts, int64 [BINS], on the CPU."""
        if self._on_device is not None:
            self.counts = self._counts + self._on_device.cpu()
        return self._counts

    @counts.setter
    def counts(self, counts: Tensor) -> None:
        self._counts, self._on_device = counts, None

    @property
    def zeros(self) -> int:
        """The number of values in batches of zeros only, which the bins do not count."""
        return self._zeros

    @property
    def total(self) -> int:
        return int(self._figure("total", lambda: int(self.counts.sum()) + self._zeros))

    def _figure(self, key: object, compute: Callable[[], float]) -> float:
        """Return a figure of the counts, computed once until values are added."""
        if key not in self._figures:
            self._figures[key] = compute()
        return self._figures[key]

    def add(self, x: Tensor, amax: float) -> None:
        """Count the values of x [*]; ``amax`` is their largest magnitude, which must be finite."""
        self._figures = {}
        if amax == 0:
            self._zeros += x.numel()
            return
        # The values are counted as float32, and a float64 amax may round up to the next power of two there.
        self._grow(_exponent_for(_as_float32(amax)))
        assert self.exponent is not None
        size = _PIECE if x.device.type == "cpu" else x.numel()
        for piece in torch.split(in_memory_order(x.detach()).flatten(), size):
            # Scaling by a power of two is exact, so truncation toward 0 gives the bin, with the value's sign. 16 bits
            # suffice, and make the next passes faster.
            bins = piece.float().mul(2.0**-self.exponent).to(torch.int16).abs_()
            self._add(torch.bincount(bins, minlength=BINS))

    def _add(self, counts: Tensor) -> None:
        # Not in place: a tensor made in inference mode cannot be changed in place outside of it.
        if not devices.is_apart(counts.device):
            self.counts = self.counts + counts
        elif self._on_device is not None and self._on_device.device == counts.device:
            self._on_device = self._on_device + counts
        else:
            self._counts, self._on_device = self.counts, counts

    def merge(self, other: Histogram) -> None:
        self._figures = {}
        self._zeros += other._zeros
        if other.exponent is None:
            return
        self._grow(other.exponent)
        assert self.exponent is not None
        # Not in place: copies of this histogram share the tensor of counts.
        self.counts = self.counts + _coarsened(other.counts, self.exponent - other.exponent)

    def centres(self) -> Tensor:
        """Return the center of each bin, float64 [BINS]; zeros are in the first bin."""
        width = 2.0 ** (self.exponent or 0)
        return (torch.arange(BINS, dtype=torch.float64) + 0.5) * width

    def quantile(self, share: float) -> float:
        """Return the upper edge of the bin below which ``share`` of all values lie."""
        if self.exponent is None:
            return 0.0
        rank = math.ceil(share * self.total) - self._zeros
        cumulative = torch.cumsum(self.counts, 0)
        place = int(torch.searchsorted(cumulative, torch.tensor(rank, dtype=torch.int64)))
        return float((min(place, BINS - 1) + 1) * 2.0**self.exponent)

    def share_above(self, amax: float) -> float:
        """Return the share of all values in bins entirely above ``amax``, 0 to 1."""
        if self.exponent is None:
            return 0.0
        first = math.ceil(amax * 2.0**-self.exponent)
        return self._figure(("above", first), lambda: int(self.counts[first:].sum())) / self.total

    def sqnr_db(self, scale: float, dtype: str) -> float:
        """Return the SQNR in dB of all values, quantized to ``dtype`` with ``scale``, from the bin centers."""
        if self.exponent is None:
            return math.inf
        return self._figure(("sqnr", scale, dtype), lambda: self._sqnr_db(scale, dtype))

    def _sqnr_db(self, scale: float, dtype: str) -> float:
        centres = self.centres().float()
        rounded = fake_quantize(centres, torch.tensor(scale, dtype=torch.float32), dtype)
        noise = float((self.counts.double() * (centres.double() - rounded.double()) ** 2).sum())
        signal = self._figure("signal", lambda: float((self.counts.double() * centres.double() ** 2).sum()))
        return 10 * math.log10(signal / noise) if noise > 0 else math.inf

    def _grow(self, exponent: int) -> None:
        if self.exponent is None:
            self.exponent = exponent
        elif exponent > self.exponent:
            self.counts = _coarsened(self.counts, exponent - self.exponent)
            self.exponent = exponent


def _as_float32(value: float) -> float:
    """Return a value rounded to float32; infinite beyond its range."""
    return ctypes.c_float(value).value


def _exponent_for(amax: float) -> int:
    """Return the smallest exponent e, at least ``_FINEST``, such that ``BINS`` bins of width 2**e contain amax."""
    _, exponent = math.frexp(amax)  # amax = mantissa * 2**exponent, 0.5 <= mantissa < 1
    return max(exponent - int(math.log2(BINS)), _FINEST)


def _coarsened(counts: Tensor, doublings: int) -> Tensor:
    for _ in range(min(doublings, int(math.log2(BINS)))):
        merged = counts.reshape(-1, 2).sum(1)
        counts = torch.cat([merged, torch.zeros_like(merged)])
    if doublings > int(math.log2(BINS)):
        total = counts.sum()
        counts = torch.zeros_like(counts)
        counts[0] = total
    return counts


CALIBRATORS: Registry[type[Calibrator]] = choices.CALIBRATORS
"""The calibrators by name; ``@CALIBRATORS.add("name")`` adds a subclass of ``Calibrator`` that has ``estimate()``."""


class Calibrator:
    """Statistics of one operand's values in bounded memory, and the range estimated from them.

    The base class checks the data and keeps minimum, maximum and optionally a histogram. A subclass defines one
    formula, ``estimate``.

    Args:
        histogram: keep a histogram of |x|. Operands of residual adds need one with every calibrator, for their SQNR.
    """

    def __init__(self, *, histogram: bool = False) -> None:
        self.minimum = math.inf
        self.maximum = -math.inf
        self.count = 0
        self.histogram = Histogram() if histogram else None
        self._estimated: tuple[int, float] | None = None

    def observe(self, x: Tensor) -> None:
        """Add the values of x [*] (any floating dtype and device).

        Raises:
            CalibrationError: x has a value that is NaN or infinite, in its own type or in float32. No value is added.
        """
        if x.numel() == 0:
            return
        # Both bounds in one copy: on a GPU each copy waits for all operations before it.
        low, high = torch.stack(torch.aminmax(in_memory_order(x.detach()))).tolist()
        if not (math.isfinite(low) and math.isfinite(high)):
            problem = "NaN" if math.isnan(low) or math.isnan(high) else "an infinite value"
            raise CalibrationError(f"{problem} among the values, shape {tuple(x.shape)}")
        if math.isinf(_as_float32(max(-low, high))):
            raise CalibrationError(
                f"the value {max(-low, high):.3g} among the values, shape {tuple(x.shape)}, exceeds float32, the type "
                "of scales"
            )
        self.minimum = min(self.minimum, low)
        self.maximum = max(self.maximum, high)
        self.count += x.numel()
        if self.histogram is not None:
            self.histogram.add(x, max(abs(low), abs(high)))

    def start_histogram(self, x: Tensor) -> None:
        """Start a histogram with x [*], the values observed last, if there is none yet."""
        if self.histogram is None and x.numel():
            self.histogram = Histogram()
            self.histogram.add(x, float(x.detach().abs().max()))

    def copy(self) -> Calibrator:
        """Return a copy that can observe more values without changing this calibrator."""
        other = copy.copy(self)
        other.histogram = copy.copy(self.histogram)
        return other

    def widen(self, low: float, high: float) -> None:
        """Extend minimum and maximum to ``low`` and ``high``, without counting values."""
        self._estimated = None
        self.minimum = min(self.minimum, low)
        self.maximum = max(self.maximum, high)

    def merge(self, other: Calibrator) -> None:
        """Add the statistics of another calibrator of the same kind."""
        self.minimum = min(self.minimum, other.minimum)
        self.maximum = max(self.maximum, other.maximum)
        self.count += other.count
        if other.histogram is not None:
            self.histogram = self.histogram or Histogram()
            self.histogram.merge(other.histogram)

    @property
    def largest(self) -> float:
        """The largest magnitude observed; 0 before any value."""
        return max(abs(self.minimum), abs(self.maximum)) if self.count else 0.0

    def seen_as(self, name: str, **options: Any) -> Calibrator:
        """Return a calibrator of the registered ``name`` with the statistics of this one.

        Both share a histogram: observe no more data with either.

        Raises:
            CalibrationError: ``name`` needs a histogram, and this calibrator has none.
        """
        other = make_calibrator(name, **options)
        if other.histogram is not None and self.histogram is None:
            raise CalibrationError(f"calibrator {name!r} needs a histogram of the values, but calibration kept none")
        other.minimum, other.maximum, other.count = self.minimum, self.maximum, self.count
        other.histogram = self.histogram
        return other

    def for_format(self, dtype: str) -> Calibrator:
        """Return a calibrator with the same statistics for another format; itself if the format does not matter."""
        return self

    def amax(self) -> float:
        """Return the magnitude that maps to the largest integer of the format, cached until new data arrive."""
        if self._estimated is None or self._estimated[0] != self.count:
            self._estimated = (self.count, self._checked_estimate())
        return self._estimated[1]

    def estimate(self) -> float:
        """Compute ``amax``."""
        raise NotImplementedError(f"{type(self).__name__} does not define estimate()")

    def _checked_estimate(self) -> float:
        name = type(self).__name__
        with named_in_errors(f"calibrator {name}"):
            estimated = self.estimate()
        if not isinstance(estimated, Real) or not 0 <= float(estimated) < math.inf:
            raise CalibrationError(
                f"calibrator {name}: estimate() returned {estimated!r}; expected a finite number of at least 0"
            )
        return float(estimated)


def make_calibrator(name: str, *, histogram: bool = False, **options: Any) -> Calibrator:
    """Return a new calibrator of the registered ``name``; ``options`` are its own keywords (``percentile=99.99``)."""
    with named_in_errors(f"calibrator {name!r}"):
        return CALIBRATORS[name](histogram=histogram, **options)


OF_FORMAT = frozenset({"mse", "entropy"})
"""The calibrators that estimate quantization errors and therefore need the ``dtype`` of the operand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A calibrator by its registered name, with its options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name and the values of the options, as shown in the coverage."""
        return " ".join([self.name, *(f"{value:g}" for value in self.options.values())])

    def amax(self, calibrator: Calibrator, dtype: str) -> float:
        """Return the estimate from the statistics of a calibrator, for operands in the format ``dtype``.

        Raises:
            CalibrationError: the estimate needs a histogram, and ``calibrator`` has none.
        """
        of_format = {"dtype": dtype} if self.name in OF_FORMAT else {}
        return calibrator.seen_as(self.name, **self.options, **of_format).amax()


CANDIDATES = (
    Estimate(name="max"),
    Estimate(name="percentile", options={"percentile": 99.999}),
    Estimate(name="percentile", options={"percentile": 99.99}),
    Estimate(name="percentile", options={"percentile": 99.9}),
    Estimate(name="mse"),
    Estimate(name="entropy"),
)
"""The estimates that are compared, wider ones first."""


def estimates(calibrator: Calibrator, dtype: QType) -> Iterator[tuple[str, float]]:
    """Yield the name and amax of each candidate; float formats omit ``entropy``, which needs uniform quantized values.

    Raises:
        CalibrationError: ``calibrator`` has no histogram.
    """
    for candidate in CANDIDATES:
        if candidate.name == "entropy" and dtype.is_float:
            continue
        yield candidate.label, candidate.amax(calibrator, dtype.name)


@CALIBRATORS.add("max")
class MaxCalibrator(Calibrator):
    """The largest magnitude observed: no value is clipped."""

    def estimate(self) -> float:
        return self.largest


@CALIBRATORS.add("percentile")
class PercentileCalibrator(Calibrator):
    """The magnitude below which ``percentile`` percent of the values lie, rounded up to a bin edge.

    Args:
        percentile: in (0, 100]; 100 equals ``max``.
        histogram: ignored, for the common signature; this calibrator always keeps a histogram.
    """

    def __init__(self, *, percentile: float = 99.99, histogram: bool = True) -> None:
        super().__init__(histogram=True)
        if not 0 < percentile <= 100:
            raise ValueError(f"percentile is {percentile}; expected a number in (0, 100]")
        self.percentile = percentile

    def estimate(self) -> float:
        assert isinstance(self.histogram, Histogram)
        if self.percentile == 100:
            return self.largest
        return min(self.histogram.quantile(self.percentile / 100), self.largest)


@CALIBRATORS.add("mse")
class MseCalibrator(Calibrator):
    """The amax with the least sum over bins of count * (x - Q(x))**2, where x is the center of a bin.

    It balances the clipping of a few outliers against a finer scale for all other values. Candidates are the upper
    edges of all bins up to the largest value.

    Args:
        dtype: the format of the operand.
        histogram: ignored, for the common signature; this calibrator always keeps a histogram.
    """

    def __init__(self, *, dtype: str = "int8", histogram: bool = True) -> None:
        super().__init__(histogram=True)
        self.dtype = qtype(dtype)

    def for_format(self, dtype: str) -> Calibrator:
        return self if dtype == self.dtype.name else self.seen_as("mse", dtype=dtype)

    def estimate(self) -> float:
        histogram = self.histogram
        assert isinstance(histogram, Histogram)
        if histogram.exponent is None:
            return self.largest
        errors = squared_errors(histogram.counts, self.dtype.magnitudes)
        used = int(histogram.counts.nonzero().max()) + 1
        best = int(errors[:used].argmin()) + 1
        return min(best * 2.0**histogram.exponent, self.largest)


@lru_cache(maxsize=8)
def _nearest_bins(bins: int, magnitudes: tuple[float, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return what ``squared_errors`` needs of levels for each range.

    Returns:
        the first bin nearest to each level, int64 [bins, L + 1], the last column ``bins``; twice the levels in bin
        widths, float64 [bins, L]; and their squares.
    """
    levels = torch.tensor(magnitudes, dtype=torch.float64)
    scales = torch.arange(1, bins + 1, dtype=torch.float64) / levels[-1]
    borders = (levels[1:] + levels[:-1]) / 2
    # The first bin whose centre is at or above the border between two levels.
    starts = torch.ceil(borders[None, :] * scales[:, None] - 0.5).long().clamp(0, bins)
    starts = torch.nn.functional.pad(torch.nn.functional.pad(starts, (1, 0)), (0, 1), value=bins)
    values = levels[None, :] * scales[:, None]
    return starts, 2 * values, values**2


def squared_errors(counts: Tensor, levels: Tensor) -> Tensor:
    """Return the sum of squared errors for the range of the first 1, 2, .. bins, in squared bin widths: float64 [bins].

    Legend: counts [bins]; levels [L] the magnitudes of the format, ascending from 0. With a range of i bins, the level
    l represents the value l * i / max(levels), in bin widths.

    The bins nearest to a level are contiguous, so their error follows from prefix sums of count, count * x and count *
    x**2: a range takes O(L) time instead of O(bins).
    """
    bins, counts = len(counts), counts.double()
    centres = torch.arange(bins, dtype=torch.float64) + 0.5
    starts, twice, squares = _nearest_bins(bins, tuple(levels.tolist()))
    number, first, second = (
        torch.cat([values.new_zeros(1), values.cumsum(0)])[starts].diff(dim=1)
        for values in (counts, counts * centres, counts * centres**2)
    )
    # Few results of this size, because new memory takes longer than the arithmetic.
    return second.sub_(first.mul_(twice)).add_(number.mul_(squares)).sum(1)


@CALIBRATORS.add("entropy")
class EntropyCalibrator(Calibrator):
    """The amax with the least Kullback-Leibler divergence between the clipped and the quantized histogram.

    Source: Migacz, "8-bit inference with TensorRT", GTC 2017. For a range of i bins, P is the first i bins of the
    histogram, with the counts of all other bins added to the last of them. Q is the same bins without these counts,
    quantized to the levels of the format and spread over the non-empty bins. The estimate is the range with the least
    KL(P || Q), of all ranges with at least as many bins as there are levels. As in NVIDIA's toolkits, the first bin,
    which contains the zeros, gets the count of the second, and the largest of equally good ranges wins.

    A range that clips values and ends in an empty bin has an infinite divergence. The range that ends at the last
    non-empty bin before it clips the same values, so usually no candidate is lost. If a lone outlier leaves all other
    values in fewer bins than there are levels (less than an eighth of the bins), only the full range would remain.
    Therefore that shorter range is also a candidate; each of its bins has its own level.

    Args:
        dtype: the integer format of the operand.
        histogram: ignored, for the common signature; this calibrator always keeps a histogram.

    Raises:
        ValueError: ``dtype`` is not an integer format.
    """

    def __init__(self, *, dtype: str = "int8", histogram: bool = True) -> None:
        super().__init__(histogram=True)
        kind = qtype(dtype)
        if kind.is_float:
            raise ValueError(
                f"calibrator entropy needs uniform quantized values, which {dtype} lacks; expected an integer format"
            )
        self.dtype = dtype
        self.levels = kind.qmax + 1

    def for_format(self, dtype: str) -> Calibrator:
        return self if dtype == self.dtype else self.seen_as("entropy", dtype=dtype)

    def estimate(self) -> float:
        histogram = self.histogram
        assert isinstance(histogram, Histogram)
        if histogram.exponent is None:
            return self.largest
        used = int(histogram.counts.nonzero().max()) + 1
        if used <= self.levels:
            return self.largest
        counts = histogram.counts[:used].clone()
        counts[0] = counts[1]
        ends = ranges(counts, self.levels)
        candidates = divergences(counts, self.levels, ends)
        last_least = len(candidates) - 1 - int(candidates.flip(0).argmin())
        return min(int(ends[last_least]) * 2.0**histogram.exponent, self.largest)


def ranges(counts: Tensor, levels: int) -> Tensor:
    """Return the candidate ranges in bins, ascending; the first ends at the last value within ``levels`` bins, if any.

    There must be more counts than levels.
    """
    ends = torch.arange(levels, len(counts) + 1)
    inside = counts[:levels].nonzero()
    if len(inside):
        ends[0] = int(inside.max()) + 1
    return ends


def divergences(counts: Tensor, levels: int, ends: Tensor) -> Tensor:
    """Return KL(P || Q) for the ranges of ``ends`` [R] bins, float64 [R].

    Legend: c_k the counts. For a range of i bins, P is c_0 .. c_{i-1} with all other counts added to the last. The bins
    k with floor(k * levels / i) = g share the level g; with fewer bins than levels each bin has its own. Q is the mean
    count of the non-empty bins of a level, in each of these bins.

    All sums over the bins of a level are differences of prefix sums, so a range takes O(levels) time instead of O(i).
    """
    counts = counts.double()
    used = ends.clamp(max=levels)[:, None]
    # The first bin of each level: the least k with k * levels >= g * i. A level that is not used has no bins.
    starts = (torch.arange(levels + 1)[None, :].minimum(used) * ends[:, None] + used - 1) // used
    counts_of_level = _differences(counts, starts)
    means = counts_of_level / _differences((counts > 0).double(), starts).clamp(min=1)
    total = counts.sum()
    inside = counts_of_level.sum(1)
    beyond = total - inside
    last = counts[ends - 1]
    # sum_k p_k log p_k; the last bin includes the clipped counts.
    entropy = _prefix(_x_log_x(counts))[ends] - _x_log_x(last) + _x_log_x(last + beyond)
    # sum_k p_k log q_k: all bins of a level have one q.
    cross = torch.special.xlogy(counts_of_level, means).sum(1)
    # The clipped counts are in the last bin of P. If its own count is 0, Q is 0 there, and the divergence infinite.
    mean_of_last = means.gather(1, used - 1).squeeze(1)
    level_of_last = torch.where(last > 0, mean_of_last, torch.zeros_like(last))
    cross = cross + torch.where(beyond > 0, beyond * level_of_last.log(), torch.zeros_like(beyond))
    # Normalization: P sums to the total, Q to the counts inside the range.
    divergence: Tensor = (entropy - cross) / total - total.log() + inside.log()
    return divergence


def _prefix(values: Tensor) -> Tensor:
    """Return the sums of the first 0, 1, .. values."""
    return torch.cat([values.new_zeros(1), values.cumsum(0)])


def _differences(values: Tensor, starts: Tensor) -> Tensor:
    """Return the sums [R, L] of the values from each of the starts [R, L + 1] to the next."""
    sums: Tensor = _prefix(values)[starts].diff(dim=1)
    return sums


def _x_log_x(values: Tensor) -> Tensor:
    result: Tensor = torch.special.xlogy(values, values)
    return result
