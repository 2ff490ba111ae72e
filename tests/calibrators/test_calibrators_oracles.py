"""Entropy, mse, max and percentile against brute force and against the calibrators of Model Optimizer."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantizer.errors import CalibrationError
from quantizer.observe.calibrators import (
    Calibrator,
    EntropyCalibrator,
    divergences,
    make_calibrator,
    ranges,
    squared_errors,
)

COUNTS = st.lists(st.one_of(st.just(0), st.integers(0, 1000)), min_size=6, max_size=40)

COUNT = 100_003
"""No percentile falls between two values: where one does, rounding in a sum of shares decides elsewhere."""

SHAPES = ("normal", "laplace", "relu", "outliers")


def values(shape: str) -> Tensor:
    """Values whose largest is just below a power of two, where our bins and those of others are as wide."""
    generator = torch.Generator().manual_seed(SHAPES.index(shape))
    x = torch.randn(COUNT, generator=generator)
    if shape == "laplace":
        uniform = torch.rand(COUNT, generator=generator) * 2 - 1
        x = -uniform.sign() * torch.log1p(-uniform.abs())
    elif shape == "relu":
        x = x.relu()
    elif shape == "outliers":
        x[:20] = 50.0
    return x / x.abs().max() * (4 - 2**-20)


# -- brute force -------------------------------------------------------------------------------------------------------


def divergence_by_definition(counts: list[int], size: int, levels: int) -> float:
    """KL(P || Q) for the range of the first ``size`` bins, as the method is described."""
    p = [float(count) for count in counts[:size]]
    q = [0.0] * size
    levels = min(levels, size)
    for level in range(levels):
        inside = [k for k in range(size) if k * levels // size == level and counts[k] > 0]
        for k in inside:
            q[k] = sum(counts[k] for k in inside) / len(inside)
    p[-1] += sum(counts[size:])
    if any(a > 0 and b == 0 for a, b in zip(p, q, strict=True)):
        return math.inf
    terms = [a / sum(p) * math.log((a / sum(p)) / (b / sum(q))) for a, b in zip(p, q, strict=True) if a > 0]
    return math.fsum(terms)


@settings(max_examples=200, deadline=None)
@given(counts=COUNTS, levels=st.integers(2, 5))
def test_divergences_by_definition(counts: list[int], levels: int) -> None:
    counts[1] += 1  # something must be there
    counts[0] = counts[1]
    sizes = list(range(2, len(counts) + 1))
    found = divergences(torch.tensor(counts), levels, torch.tensor(sizes))
    expected = [divergence_by_definition(counts, size, levels) for size in sizes]
    assert found.tolist() == pytest.approx(expected, abs=1e-9)


@settings(max_examples=200, deadline=None)
@given(counts=COUNTS, levels=st.integers(2, 5))
def test_no_range_that_is_left_out_would_be_better(counts: list[int], levels: int) -> None:
    """Beside the ranges of fewer bins than levels that clip more, which the method leaves out."""
    counts[1] += 1
    counts[0] = counts[1]
    counts[-1] += 1
    ends = ranges(torch.tensor(counts), levels).tolist()
    assert ends[1:] == list(range(levels + 1, len(counts) + 1))
    assert not any(counts[ends[0] : levels])
    assert counts[ends[0] - 1]
    if ends[0] < levels:
        assert divergence_by_definition(counts, levels, levels) == math.inf


@settings(max_examples=200, deadline=None)
@given(counts=COUNTS, top=st.integers(1, 9))
def test_squared_errors_by_definition(counts: list[int], top: int) -> None:
    found = squared_errors(torch.tensor(counts), torch.arange(top + 1))
    centres = np.arange(len(counts)) + 0.5
    for size in range(1, len(counts) + 1):
        scale = size / top
        error = (np.minimum(np.round(centres / scale), top) * scale - centres) ** 2
        assert float(found[size - 1]) == pytest.approx(float((error * np.array(counts)).sum()), rel=1e-9, abs=1e-6)


def test_counts_are_not_changed() -> None:
    counts = torch.tensor([5, 1, 2, 0, 3])
    divergences(counts, 2, ranges(counts, 2))
    assert counts.tolist() == [5, 1, 2, 0, 3]


@pytest.mark.parametrize("outlier", [10.0, 20.0, 300.0])
def test_entropy_leaves_a_lone_outlier_out(outlier: float) -> None:
    """However few bins it leaves the others: they end within two of them."""
    generator = torch.Generator().manual_seed(0)
    bulk = torch.rand(100_000, generator=generator) * 0.8
    calibrator = EntropyCalibrator()
    calibrator.observe(torch.cat([bulk, torch.tensor([outlier])]))
    histogram = calibrator.histogram
    assert histogram is not None
    assert histogram.exponent is not None
    assert calibrator.amax() == pytest.approx(0.8, abs=2 * 2.0**histogram.exponent)


def test_entropy_keeps_far_values_that_are_many() -> None:
    generator = torch.Generator().manual_seed(0)
    bulk = torch.rand(100_000, generator=generator) * 0.8
    calibrator = EntropyCalibrator()
    calibrator.observe(torch.cat([bulk, torch.full((10_000,), 30.0)]))
    assert calibrator.amax() == 30.0


@pytest.mark.parametrize(("dtype", "levels"), [("int8", 128), ("int4", 8)])
def test_entropy_has_as_many_levels_as_the_format_has_magnitudes(dtype: str, levels: int) -> None:
    calibrator = ours("entropy", values("normal"), dtype=dtype)
    histogram = calibrator.histogram
    assert histogram is not None
    counts = histogram.counts.clone()
    counts[0] = counts[1]
    ends = ranges(counts, levels)
    best = int(ends[int(divergences(counts, levels, ends).argmin())])
    assert calibrator.amax() == best * BIN


def test_entropy_where_one_bin_holds_all_others() -> None:
    calibrator = EntropyCalibrator()
    calibrator.observe(torch.tensor([1e-6, 1e-5, 10.0]))
    assert calibrator.amax() == 10.0


def test_entropy_of_few_bins_clips_nothing() -> None:
    calibrator = EntropyCalibrator()
    # So small that float32 has no finer bins.
    calibrator.observe(torch.tensor([0.0, 1e-40]))
    assert calibrator.amax() == calibrator.largest


# -- the calibrators of another toolkit --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def modelopt() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("modelopt.torch.quantization.calib", reason="install enginequant[test]")


def ours(kind: str, x: Tensor, **options: Any) -> Calibrator:
    calibrator = make_calibrator(kind, **options)
    for piece in x.split(30_000):
        calibrator.observe(piece)
    return calibrator


BIN = 4 / 2048


@pytest.mark.parametrize("shape", SHAPES)
def test_max_is_that_of_model_optimizer(modelopt: Any, shape: str) -> None:
    x = values(shape)
    other = modelopt.MaxCalibrator(8, None, False)
    other.collect(x)
    assert ours("max", x).amax() == float(other.compute_amax())


@pytest.mark.parametrize("percentile", [99.0, 99.9, 99.99])
@pytest.mark.parametrize("shape", SHAPES)
def test_percentile_is_that_of_model_optimizer_to_one_bin(modelopt: Any, shape: str, percentile: float) -> None:
    x = values(shape)
    other = modelopt.HistogramCalibrator(8, None, False)
    other.collect(x)
    expected = float(other.compute_amax("percentile", percentile=percentile))
    assert ours("percentile", x, percentile=percentile).amax() == pytest.approx(expected, abs=BIN * 1.001)


@pytest.mark.parametrize("shape", SHAPES)
def test_entropy_is_that_of_model_optimizer_to_one_bin(modelopt: Any, shape: str) -> None:
    x = values(shape)
    other = modelopt.HistogramCalibrator(8, None, False)
    other.collect(x)
    # Every eighth range: with all of them the other side takes four seconds.
    expected = float(other.compute_amax("entropy", stride=8))
    calibrator = ours("entropy", x)
    histogram = calibrator.histogram
    assert histogram is not None
    counts = histogram.counts.clone()
    counts[0] = counts[1]
    found = divergences(counts, 128, torch.arange(128, 2049, 8))
    assert (128 + 8 * (len(found) - 1 - int(found.flip(0).argmin()))) * BIN == pytest.approx(expected, abs=BIN * 1.001)
    assert float(divergences(counts, 128, ranges(counts, 128)).min()) <= float(found.min())


def test_entropy_of_a_lone_outlier_is_that_of_model_optimizer(modelopt: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.rand(100_000, generator=generator) * 0.8, torch.tensor([10.0])])
    other = modelopt.HistogramCalibrator(8, None, False)
    other.collect(x)
    # Its bins are narrower, as 10 is no power of two.
    assert ours("entropy", x).amax() == pytest.approx(float(other.compute_amax("entropy", stride=12)), abs=2 * 2**-7)


@pytest.mark.parametrize("shape", SHAPES)
def test_mse_is_that_of_model_optimizer_to_one_bin(modelopt: Any, shape: str) -> None:
    # Its histogram calibrator's "mse" hands num_bits over as the bias and always gives its first candidate; this is
    # its search on the values themselves, with candidates one bin apart.
    x = values(shape)

    def rounded(values: Tensor, amax: Tensor) -> Tensor:
        return torch.fake_quantize_per_tensor_affine(values, float(amax) / 127, 0, -127, 127)

    search = modelopt.MseCalibrator(
        torch.tensor(4.0), step_size=1 / 256, start_multiplier=1 / 8, stop_multiplier=1.0, quant_func=rounded
    )
    search.collect(x)
    best = float(search.compute_amax())
    calibrator = ours("mse", x)
    assert squared_error(x, calibrator.amax()) <= squared_error(x, best) * 1.001
    assert calibrator.amax() == pytest.approx(best, abs=4 / 256)


def squared_error(x: Tensor, amax: float) -> float:
    return float((torch.fake_quantize_per_tensor_affine(x, amax / 127, 0, -127, 127) - x).double().square().sum())


# -- one calibrator seen as another ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["max", "mse", "entropy", "percentile"])
def test_values_seen_once_serve_every_estimate(kind: str) -> None:
    x = values("outliers")
    seen = ours("percentile", x).seen_as(kind)
    assert seen.amax() == ours(kind, x).amax()
    assert (seen.minimum, seen.maximum, seen.count) == (float(x.min()), float(x.max()), len(x))


def test_without_a_histogram_no_other_estimate() -> None:
    with pytest.raises(CalibrationError, match="'mse' needs a histogram"):
        ours("max", values("normal")).seen_as("mse")


def test_an_estimate_follows_what_is_observed() -> None:
    calibrator = ours("mse", values("normal"))
    before = calibrator.amax()
    assert calibrator.amax() == before
    calibrator.observe(torch.full((COUNT,), 30.0))
    assert calibrator.amax() == pytest.approx(30.0, rel=0.01)
