"""Ranges against brute force, whatever the order of the data and however it is cut."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantizer.errors import CalibrationError, ConfigError
from quantizer.numerics.formats import QTYPES
from quantizer.numerics.granularity import in_memory_order
from quantizer.observe.calibrators import (
    BINS,
    CALIBRATORS,
    Calibrator,
    Histogram,
    MaxCalibrator,
    MseCalibrator,
    PercentileCalibrator,
    estimates,
    make_calibrator,
)

FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=32)
ORDINARY = st.floats(min_value=-1000, max_value=1000, width=32)


def filled(values: list[float], cuts: list[int] | None = None) -> Histogram:
    """A histogram of ``values``, taken in pieces that end at ``cuts``."""
    histogram = Histogram()
    edges = [0, *sorted(cuts or []), len(values)]
    for start, end in itertools.pairwise(edges):
        if end > start:
            piece = torch.tensor(values[start:end], dtype=torch.float32)
            histogram.add(piece, float(piece.abs().max()))
    return histogram


def brute(values: list[float]) -> tuple[int | None, list[int]]:
    """Exponent and counts by definition, in exact arithmetic; zeros apart from the others are in no bin here."""
    magnitudes = [abs(float(np.float32(value))) for value in values]
    top = max(magnitudes, default=0.0)
    if top == 0:
        return None, [0] * BINS
    exponent = max(math.frexp(top)[1] - 11, -127)
    counts = [0] * BINS
    for magnitude in magnitudes:
        counts[math.floor(math.ldexp(magnitude, -exponent))] += 1
    return exponent, counts


def assert_is(histogram: Histogram, values: list[float]) -> None:
    exponent, counts = brute(values)
    assert histogram.exponent == exponent
    assert histogram.total == len(values)
    got = histogram.counts.clone()
    # A batch of nothing but zeros is counted apart; zeros among other values stand in the first bin.
    got[0] += histogram.total - int(got.sum()) if exponent is not None else 0
    assert got.tolist() == counts


# -- the histogram -------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(values=st.lists(ORDINARY, min_size=1, max_size=60), data=st.data())
def test_any_order_and_batching_gives_the_brute_force_counts(values: list[float], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(values))
    cuts = data.draw(st.lists(st.integers(0, len(values)), max_size=8))
    assert_is(filled(shuffled, cuts), values)


@settings(max_examples=100, deadline=None)
@given(shards=st.lists(st.lists(ORDINARY, max_size=20), min_size=1, max_size=5), data=st.data())
def test_any_sharding_gives_the_brute_force_counts(shards: list[list[float]], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shards))))
    merged = Histogram()
    for index in order:
        merged.merge(filled(shards[index]))
    assert_is(merged, [value for shard in shards for value in shard])


@settings(max_examples=100, deadline=None)
@given(values=st.lists(FLOATS, min_size=1, max_size=30), data=st.data())
def test_a_huge_dynamic_range(values: list[float], data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(values)), max_size=5))
    assert_is(filled(values, cuts), values)


def test_growing_merges_pairs_of_bins() -> None:
    histogram = filled([float(value) for value in range(1, 2000)])
    assert histogram.exponent == 0
    histogram.add(torch.tensor([5000.0]), 5000.0)
    assert histogram.exponent == 2
    assert histogram.counts[:3].tolist() == [3, 4, 4]
    assert histogram.total == 2000


@pytest.mark.parametrize("doublings", [1, 10, 11, 12, 60, 200])
def test_growing_far(doublings: int) -> None:
    small = 2.0**-100
    values = [small, small / 2, small / 4096, 0.0]
    histogram = filled(values)
    top = math.ldexp(small, doublings)
    histogram.add(torch.tensor([top]), top)
    assert_is(histogram, [*values, top])


def test_a_smaller_batch_keeps_the_wider_bins() -> None:
    histogram = filled([1000.0, 1e-3], [1])
    assert histogram.exponent == math.frexp(1000.0)[1] - 11
    assert histogram.counts[0] == 1


def test_counts_do_not_saturate() -> None:
    histogram = Histogram()
    ones = torch.ones(1 << 16)
    for _ in range(300):
        histogram.add(ones, 1.0)
    # More than 2**24, beyond which float32 counts stand still.
    assert histogram.total == 300 << 16
    assert histogram.counts.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types(dtype: torch.dtype) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    histogram = Histogram()
    histogram.add(x, float(x.abs().max()))
    assert_is(histogram, x.float().tolist())


def test_float64_just_below_a_power_of_two() -> None:
    # As float32 it is 2.0, which has no place in bins made for less than 2.
    x = torch.tensor([2.0 - 1e-12, 0.5], dtype=torch.float64)
    calibrator = PercentileCalibrator(percentile=50)
    calibrator.observe(x)
    assert calibrator.histogram is not None
    assert calibrator.histogram.counts.shape == (BINS,)
    assert calibrator.histogram.total == 2


@pytest.mark.parametrize("value", [2.0**-149, 2.0**-126, 3.4028234663852886e38])
def test_the_smallest_and_largest_values(value: float) -> None:
    histogram = filled([value, value / 2, 0.0])
    assert_is(histogram, [value, float(np.float32(value / 2)), 0.0])
    assert math.isfinite(histogram.quantile(1.0))


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.floats(min_value=-100, max_value=100, width=32), min_size=1, max_size=80),
    scale=st.floats(min_value=2.0**-10, max_value=2.0**4),
)
def test_sqnr_is_that_of_the_bin_centres(values: list[float], scale: float) -> None:
    histogram = filled(values)
    exponent, counts = brute(values)
    if exponent is None:
        assert histogram.sqnr_db(scale, "int8") == math.inf
        return
    signal = noise = 0.0
    for index, count in enumerate(counts):
        centre = (index + 0.5) * 2.0**exponent
        # The operators divide and multiply in float32.
        step, size = np.float32(centre) / np.float32(scale), np.float32(scale)
        rounded = float(np.float32(np.clip(np.round(step), -128, 127)) * size)
        signal += count * centre**2
        noise += count * (centre - rounded) ** 2
    expected = math.inf if noise == 0 else 10 * math.log10(signal / noise)
    assert histogram.sqnr_db(scale, "int8") == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_sqnr_is_near_that_of_the_values_themselves() -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    histogram = filled(x.tolist())
    for scale in (0.02, 0.035, 0.1):
        rounded = (x / scale).round().clamp(-128, 127) * scale
        true = 10 * math.log10(float(x.square().sum() / (x - rounded).square().sum()))
        assert histogram.sqnr_db(scale, "int8") == pytest.approx(true, abs=0.2)


@settings(max_examples=100, deadline=None)
@given(values=st.lists(ORDINARY, min_size=1, max_size=60), share=st.floats(min_value=0, max_value=1))
def test_share_above_is_a_lower_bound_to_one_bin(values: list[float], share: float) -> None:
    histogram = filled(values)
    top = max(map(abs, values))
    amax = share * top
    width = 0.0 if histogram.exponent is None else 2.0**histogram.exponent
    above = sum(abs(value) >= amax for value in values) / len(values)
    well_above = sum(abs(value) > amax + width for value in values) / len(values)
    assert (
        well_above - 1e-12
        <= histogram.share_above(amax)
        <= max(above, sum(abs(v) >= amax for v in values) / len(values))
    )


def test_share_above_of_known_values() -> None:
    histogram = filled([0.25, 0.5, 1.0])
    assert [histogram.share_above(amax) for amax in (0.2, 0.3, 0.7, 1.1)] == [1.0, 2 / 3, 1 / 3, 0.0]


# -- percentile ----------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(ORDINARY, min_size=1, max_size=80),
    percentile=st.one_of(st.sampled_from([50.0, 99.0, 99.99, 100.0]), st.floats(min_value=0.01, max_value=100)),
)
def test_percentile_is_numpys_to_one_bin(values: list[float], percentile: float) -> None:
    calibrator = PercentileCalibrator(percentile=percentile)
    calibrator.observe(torch.tensor(values, dtype=torch.float32))
    magnitudes = np.abs(np.array(values, dtype=np.float32)).astype(np.float64)
    expected = float(np.percentile(magnitudes, percentile, method="inverted_cdf"))
    assert calibrator.histogram is not None
    width = 0.0 if calibrator.histogram.exponent is None else 2.0**calibrator.histogram.exponent
    assert expected <= calibrator.amax() * (1 + 1e-12)
    assert calibrator.amax() <= expected + width * (1 + 1e-9)


@pytest.mark.parametrize("percentile", [99.0, 99.9, 99.99])
def test_percentile_of_many_values(percentile: float) -> None:
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(1))
    calibrator = PercentileCalibrator(percentile=percentile)
    for piece in x.split(7777):
        calibrator.observe(piece)
    assert calibrator.amax() == pytest.approx(float(np.percentile(x.abs().numpy(), percentile)), abs=0.01)


def test_zeros_in_a_batch_of_their_own_count_as_zeros_among_others() -> None:
    zeros, ones = torch.zeros(10), torch.ones(5)
    apart, together = PercentileCalibrator(percentile=50), PercentileCalibrator(percentile=50)
    apart.observe(zeros)
    apart.observe(ones)
    together.observe(torch.cat([zeros, ones]))
    assert apart.amax() == together.amax() == 2.0**-10


@settings(max_examples=50, deadline=None)
@given(values=st.lists(FLOATS, min_size=1, max_size=40))
def test_percentile_100_is_max(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    both = [PercentileCalibrator(percentile=100), MaxCalibrator()]
    for calibrator in both:
        calibrator.observe(x)
    assert both[0].amax() == both[1].amax() == float(x.abs().max())


def test_percentile_100_is_max_also_of_bounds_without_values() -> None:
    found, largest = make_calibrator("percentile", percentile=100), make_calibrator("max")
    for calibrator in (found, largest):
        calibrator.observe(torch.linspace(-1, 1, 1001))
        calibrator.widen(-7.0, 3.0)
    assert found.amax() == largest.amax() == 7.0


def test_a_restored_histogram_goes_on_as_the_one_that_it_was() -> None:
    whole = filled([0.0, 0.0, 1.0, -3.0, 0.5], cuts=[2])
    assert whole.zeros == 2
    again = Histogram.restored(whole.counts, whole.exponent, whole.zeros)
    for histogram in (whole, again):
        histogram.add(torch.tensor([5.0, 0.25]), 5.0)
    assert (again.exponent, again.zeros, again.total) == (whole.exponent, whole.zeros, whole.total) == (-8, 2, 7)
    assert torch.equal(again.counts, whole.counts)
    assert Histogram.restored(torch.zeros(BINS, dtype=torch.int64), None, 4).total == 4


def test_what_is_held_exactly_has_no_noise() -> None:
    histogram = filled([1.0])
    (centre,) = histogram.centres()[histogram.counts > 0].tolist()
    assert histogram.sqnr_db(centre, "int8") == math.inf
    assert math.isfinite(histogram.sqnr_db(centre * 0.4, "int8"))


def test_centres_are_float64() -> None:
    centres = filled([1.0]).centres()
    assert centres.dtype == torch.float64
    assert centres[:2].tolist() == [2.0**-11, 3 * 2.0**-11]


@pytest.fixture
def default_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("default_float64")
def test_torchs_default_type_moves_no_bin() -> None:
    largest = 2.0 - 2.0**-40  # 2 in float32, as which it is counted
    histogram = Histogram()
    histogram.add(torch.tensor([largest]), largest)
    assert histogram.exponent == -9
    assert histogram.counts.shape == (BINS,)


@pytest.mark.usefixtures("default_float64")
def test_torchs_default_type_hides_no_value_that_float32_does_not_hold() -> None:
    with pytest.raises(CalibrationError, match="exceeds float32"):
        make_calibrator("max").observe(torch.tensor([1e300]))


def test_bounds_without_values_widen_the_range_on_both_sides() -> None:
    calibrator = make_calibrator("max")
    calibrator.observe(torch.tensor([-1.0, 2.0]))
    seen = []
    for low, high in ((-3.0, 1.0), (0.0, 5.0), (-0.5, 0.5)):
        assert calibrator.amax() == calibrator.largest
        calibrator.widen(low, high)
        seen.append((calibrator.minimum, calibrator.maximum, calibrator.amax(), calibrator.count))
    assert seen == [(-3.0, 2.0, 3.0, 2), (-3.0, 5.0, 5.0, 2), (-3.0, 5.0, 5.0, 2)]


@pytest.mark.parametrize("values", [[-1.0, 1e300], [-1e300, 1.0]])
def test_a_value_that_float32_does_not_hold_on_either_side(values: list[float]) -> None:
    calibrator = make_calibrator("max")
    with pytest.raises(CalibrationError, match=r"the value 1e\+300 among the values, shape \(2,\), exceeds float32"):
        calibrator.observe(torch.tensor(values, dtype=torch.float64))
    assert calibrator.count == 0


@pytest.mark.parametrize("name", ["mse", "entropy"])
def test_an_estimate_for_another_format_is_that_of_the_format(name: str) -> None:
    seen, other = make_calibrator(name), make_calibrator(name, dtype="int4")
    for calibrator in (seen, other):
        calibrator.observe(torch.randn(20_000, generator=torch.Generator().manual_seed(0)))
    assert seen.for_format("int8") is seen
    assert seen.for_format("int4").amax() == other.amax() != seen.amax()
    assert seen.for_format("int4").for_format("int8").amax() == seen.amax()
    assert make_calibrator("max").for_format("int4").amax() == 0.0


def test_the_estimates_that_are_compared_are_those_of_the_calibrators() -> None:
    seen = make_calibrator("max", histogram=True)
    seen.observe(torch.randn(400_000, generator=torch.Generator().manual_seed(0)))
    expected = {
        "max": seen.largest,
        "percentile 99.999": seen.seen_as("percentile", percentile=99.999).amax(),
        "percentile 99.99": seen.seen_as("percentile", percentile=99.99).amax(),
        "percentile 99.9": seen.seen_as("percentile", percentile=99.9).amax(),
        "mse": seen.seen_as("mse", dtype="int4").amax(),
        "entropy": seen.seen_as("entropy", dtype="int4").amax(),
    }
    assert dict(estimates(seen, QTYPES["int4"])) == expected
    assert len(set(expected.values())) == len(expected)
    of_fp8 = dict(estimates(seen, QTYPES["fp8"]))
    assert of_fp8.keys() == expected.keys() - {"entropy"}
    assert of_fp8["mse"] == seen.seen_as("mse", dtype="fp8").amax() != expected["mse"]


def test_percentile_never_exceeds_the_largest_value() -> None:
    calibrator = PercentileCalibrator(percentile=99.99)
    calibrator.observe(torch.full((10,), 1.2345))
    assert calibrator.amax() == calibrator.largest == float(torch.tensor(1.2345))


@pytest.mark.parametrize("percentile", [0, -1, 100.001, math.nan, math.inf])
def test_percentile_out_of_bounds(percentile: float) -> None:
    with pytest.raises(ValueError, match=rf"percentile is {percentile}; expected a number in \(0, 100\]"):
        PercentileCalibrator(percentile=percentile)


# -- mse ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", [3.0, 30.0])
def test_mse_takes_the_edge_of_the_range_with_the_least_error(tail: float) -> None:
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    x[0] = tail * x.abs().max()
    calibrator = MseCalibrator()
    calibrator.observe(x)
    histogram = calibrator.histogram
    assert isinstance(histogram, Histogram)
    assert histogram.exponent is not None
    width, centres = 2.0**histogram.exponent, histogram.centres()
    scales = (torch.arange(1, BINS + 1, dtype=torch.float64) * width / 127)[:, None]
    rounded = (centres / scales).round().clamp(max=127) * scales
    errors = (histogram.counts * (centres - rounded) ** 2).sum(1)
    bins = calibrator.amax() / width
    assert bins == int(bins)
    assert float(errors[int(bins) - 1]) == pytest.approx(float(errors.min()), rel=1e-9)
    assert float(errors[int(bins) - 2]) > float(errors.min()) * (1 + 1e-6)


def rounding_error(x: Tensor, amax: float) -> float:
    scale = amax / 127
    return float(((x / scale).round().clamp(-128, 127) * scale - x).double().square().sum())


@pytest.mark.parametrize(
    ("shape", "outliers"),
    [
        *(("normal", 0), ("laplace", 1), ("uniform", 20)),
        *(pytest.param("normal", outliers, marks=pytest.mark.nightly) for outliers in (1, 20)),
        *(pytest.param("laplace", outliers, marks=pytest.mark.nightly) for outliers in (0, 20)),
        *(pytest.param("uniform", outliers, marks=pytest.mark.nightly) for outliers in (0, 1)),
    ],
)
def test_mse_is_as_good_as_trying_every_range_on_the_values_themselves(shape: str, outliers: int) -> None:
    generator = torch.Generator().manual_seed(outliers)
    uniform = torch.rand(20_000, generator=generator) * 2 - 1
    x = {
        "normal": torch.randn(400_000, generator=generator),
        "laplace": -uniform.sign() * torch.log1p(-uniform.abs()),
        "uniform": uniform,
    }[shape]
    x[:outliers] = 50.0
    calibrator = MseCalibrator()
    calibrator.observe(x)
    largest = float(x.abs().max())
    best = min(rounding_error(x, largest * step / 1000) for step in range(5, 1001))
    assert rounding_error(x, calibrator.amax()) <= best * 1.01


def test_mse_clips_nothing_where_the_values_lie_on_the_levels() -> None:
    calibrator = MseCalibrator()
    calibrator.observe(torch.arange(128) / 127)
    assert calibrator.amax() == 1.0


def test_mse_clips_what_is_rare_and_keeps_what_weighs() -> None:
    rare, heavy = MseCalibrator(), MseCalibrator()
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    rare.observe(torch.cat([x, torch.tensor([8.0])]))
    heavy.observe(torch.cat([x, torch.full((1_000,), 50.0)]))
    assert rare.amax() < 6
    assert heavy.amax() == pytest.approx(50, rel=0.01)


# -- all of them -------------------------------------------------------------------------------------------------------

KINDS = ["entropy", "max", "mse", "percentile"]


@pytest.mark.parametrize("kind", KINDS)
def test_before_any_value(kind: str) -> None:
    calibrator = make_calibrator(kind)
    assert calibrator.amax() == 0
    assert calibrator.count == 0


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_first(kind: str) -> None:
    calibrator = make_calibrator(kind)
    calibrator.observe(torch.zeros(5))
    assert calibrator.amax() == 0
    calibrator.observe(torch.tensor([1.0, -2.0]))
    # Entropy clips one of two values; all others keep both.
    assert calibrator.amax() == pytest.approx(1.0 if kind == "entropy" else 2.0, rel=1e-2)
    assert (calibrator.minimum, calibrator.maximum, calibrator.count) == (-2.0, 1.0, 7)


@pytest.mark.parametrize("kind", KINDS)
def test_empty_tensors(kind: str) -> None:
    calibrator = make_calibrator(kind)
    calibrator.observe(torch.zeros(0, 4))
    assert calibrator.count == 0
    calibrator.observe(torch.tensor(-3.0))
    assert calibrator.minimum == -3.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("bad", "message"),
    [(math.nan, "NaN among the values"), (math.inf, "an infinite value among"), (-math.inf, "an infinite value among")],
)
def test_values_that_are_not_finite_are_refused_whole(kind: str, bad: float, message: str) -> None:
    calibrator = make_calibrator(kind, histogram=True)
    calibrator.observe(torch.tensor([1.0, -0.5]))
    before = _state(calibrator)
    with pytest.raises(CalibrationError, match=rf"{message}.*shape \(2, 2\)"):
        calibrator.observe(torch.tensor([[5.0, bad], [1.0, -7.0]]))
    assert _state(calibrator) == before


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=50, deadline=None)
@given(values=st.lists(ORDINARY, min_size=2, max_size=40), cut=st.integers(0, 40))
def test_merging_is_observing_all(kind: str, values: list[float], cut: int) -> None:
    pieces = [torch.tensor(part, dtype=torch.float32) for part in (values[:cut], values[cut:])]
    whole, parts = make_calibrator(kind, histogram=True), [make_calibrator(kind, histogram=True) for _ in pieces]
    for part, piece in zip(parts, pieces, strict=True):
        whole.observe(piece)
        part.observe(piece)
    parts[0].merge(parts[1])
    assert parts[0].amax() == whole.amax()
    assert _state(parts[0]) == _state(whole)


@pytest.mark.parametrize("kind", KINDS)
def test_the_observed_tensor_is_not_changed(kind: str) -> None:
    x = torch.randn(4, 5, requires_grad=True)
    before = x.detach().clone()
    calibrator = make_calibrator(kind, histogram=True)
    calibrator.observe(x)
    assert torch.equal(x.detach(), before)
    assert calibrator.histogram is not None
    assert not calibrator.histogram.counts.requires_grad


def test_a_histogram_goes_on_outside_of_inference_mode() -> None:
    values = torch.randn(64, generator=torch.Generator().manual_seed(0))
    calibrator, other = make_calibrator("percentile"), make_calibrator("percentile")
    with torch.inference_mode():
        calibrator.observe(values)
    calibrator.observe(3 * values)
    other.observe(torch.cat([values, 3 * values]))
    assert calibrator.histogram is not None
    assert other.histogram is not None
    assert torch.equal(calibrator.histogram.counts, other.histogram.counts)


def test_a_histogram_that_starts_late() -> None:
    calibrator = PercentileCalibrator()
    calibrator.histogram = None
    x = torch.tensor([1.0, 3.0])
    calibrator.observe(x)
    calibrator.start_histogram(x)
    calibrator.start_histogram(x)
    assert calibrator.histogram is not None
    assert calibrator.histogram.total == 2
    calibrator.observe(x)
    assert calibrator.histogram.total == 4


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_order_of_axes_in_memory_is_found(order: tuple[int, ...]) -> None:
    x = torch.randn(2, 3, 4).permute(order)
    found = in_memory_order(x)
    assert found.is_contiguous()
    assert found.data_ptr() == x.data_ptr()
    gaps = x[..., ::2]
    assert sorted(in_memory_order(gaps).flatten().tolist()) == sorted(gaps.flatten().tolist())


def test_the_base_class_has_no_formula() -> None:
    with pytest.raises(NotImplementedError):
        Calibrator().amax()


def test_an_estimate_is_made_once_for_the_same_values() -> None:
    made = []

    class Counted(MaxCalibrator):
        def estimate(self) -> float:
            made.append(self.largest)
            return self.largest

    calibrator = Counted()
    calibrator.observe(torch.tensor([5.0, 3.0]))
    assert [calibrator.amax(), calibrator.amax()] == [5.0, 5.0]
    assert made == [5.0]


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="unknown calibrator 'entropi'; known: entropy, max, mse, percentile"):
        make_calibrator("entropi")


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="calibrator 'max' is registered twice"):
        CALIBRATORS.add("max")(MaxCalibrator)
    assert CALIBRATORS["max"] is MaxCalibrator


def _state(calibrator: Calibrator) -> Any:
    histogram = calibrator.histogram
    assert histogram is not None
    counts: Tensor = histogram.counts.clone()
    if histogram.exponent is not None:
        counts[0] += histogram.total - int(counts.sum())
    return (
        calibrator.minimum,
        calibrator.maximum,
        calibrator.count,
        histogram.exponent,
        counts.tolist(),
        histogram.total,
    )
