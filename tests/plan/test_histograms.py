"""``q.histogram()``: what calibration saw of an operand, what ranges it might have, and why there is none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrated import make_calibrated
from helpers import Mlp

from quantizer import Quantizer
from quantizer.errors import QuantizerError
from quantizer.numerics.torch_operators import fake_quantize
from quantizer.plan.histograms import noisiest

INPUT = "up.forward.linear_0.input"


def _data() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(2048, 32) * torch.logspace(-1, 1, 32)


def _calibrated(data: torch.Tensor | None = None, **options: Any) -> Quantizer:
    torch.manual_seed(0)
    return make_calibrated(
        Mlp().eval(), (_data() if data is None else data).split(256), **{"backend": "tensorrt", **options}
    )


def test_bins_count_the_values() -> None:
    data = _data()
    histogram = _calibrated().histogram(INPUT)
    assert sum(histogram.data.counts) == data.numel()
    assert 64 <= len(histogram.data.counts) <= 128
    assert 10 <= len(histogram.bins) <= 20
    assert histogram.bins[0].low == 0
    assert histogram.bins[-1].high >= float(data.abs().max())
    for row in histogram.bins:
        inside = (data.abs() >= row.low) & (data.abs() < row.high)
        assert row.count == int(inside.sum())


def test_candidates_are_judged_as_the_values_themselves_would_be() -> None:
    data = _data()
    histogram = _calibrated().histogram(INPUT)
    found = {entry.name: entry for entry in histogram.candidates}
    assert set(found) == {"max", "percentile 99.999", "percentile 99.99", "percentile 99.9", "mse", "entropy"}
    assert [entry.amax for entry in histogram.candidates] == sorted((e.amax for e in found.values()), reverse=True)
    assert found["max"].amax == float(data.abs().max())
    assert found["max"].clipped == 0
    assert found["percentile 99.9"].clipped == pytest.approx(0.001, rel=0.1)
    assert found["mse"].sqnr_db == max(entry.sqnr_db for entry in histogram.candidates)
    for entry in histogram.candidates:
        rounded = fake_quantize(data, torch.tensor(entry.amax / 127), "int8")
        exact = 10 * math.log10(float(data.square().sum() / (data - rounded).square().sum()))
        assert entry.sqnr_db == pytest.approx(exact, abs=0.3)  # the values of a bin count as its centre
        assert entry.clipped == pytest.approx(float((data.abs() > entry.amax).float().mean()), abs=1e-4)


@pytest.mark.parametrize(
    ("activations", "chosen"),
    [
        ({"calibrator": "percentile", "percentile": 99.9}, "percentile 99.9"),
        ({"calibrator": "percentile", "percentile": 95}, "chosen"),
        ({"calibrator": "mse"}, "mse"),
        ({"calibrator": "percentile", "percentile": [90, 91]}, "percentile 9"),
    ],
    ids=["candidate", "none-of-them", "mse", "several"],
)
def test_the_chosen_range_is_marked(activations: dict[str, Any], chosen: str) -> None:
    q = _calibrated(activations=activations)
    (marked,) = (entry for entry in q.histogram(INPUT).candidates if entry.chosen)
    assert marked.name.startswith(chosen)
    (row,) = (row for row in q.ranges if row.name == INPUT)
    assert (marked.amax, marked.clipped) == pytest.approx((row.amax, row.clipped))
    assert marked.sqnr_db == pytest.approx(row.sqnr_db, abs=1e-3)


def test_a_float_format_has_no_entropy() -> None:
    histogram = _calibrated(formats=[{"kinds": ["linear"], "activations": "fp8", "weights": "fp8"}]).histogram(INPUT)
    assert histogram.data.dtype == "fp8"
    assert "entropy" not in {entry.name for entry in histogram.candidates}


def test_no_range_is_chosen_where_weights_alone_are_quantized() -> None:
    q = _calibrated(formats=[{"kinds": ["linear"], "activations": "float", "weights": "int8"}])
    assert not any(entry.chosen for entry in q.histogram(INPUT).candidates)


def test_the_text() -> None:
    q = _calibrated(activations={"calibrator": "percentile", "percentile": 99.9})
    text = str(q.histogram(INPUT))
    bars, candidates = text.split("\n\n")
    assert text.startswith(f"{INPUT}: 65,536 values from -")
    assert all(len(line) <= 120 for line in text.splitlines())
    lengths = [line.count("█") for line in bars.splitlines()[3:]]
    assert max(lengths) == lengths[0] == 40
    assert lengths[-1] < 20
    assert "max" in bars.splitlines()[-1]
    (marked,) = (line for line in bars.splitlines() if "(chosen)" in line)
    assert "percentile 99.9 (chosen)" in marked
    (line,) = (line for line in candidates.splitlines() if line.endswith("yes"))
    assert line.split()[:2] == ["percentile", "99.9"]
    assert line.split()[3].endswith("%")


def test_the_picture(tmp_path: Path) -> None:
    histogram = _calibrated().histogram(INPUT)
    assert "<svg" in histogram._repr_html_()
    assert INPUT in histogram._repr_html_()
    histogram.plot().save(str(tmp_path / "picture.svg"))
    assert (tmp_path / "picture.svg").read_text().startswith("<svg")


def test_nothing_but_zeros() -> None:
    with pytest.warns(UserWarning, match="all inputs of all 1 calibration batches are zero"):
        histogram = _calibrated(torch.zeros(256, 32)).histogram(INPUT)
    assert histogram.data.counts == (256 * 32,)
    assert all(entry.amax == 0 for entry in histogram.candidates)
    assert "infinite" in str(histogram)
    assert histogram._repr_html_()


def test_the_noisiest_come_first_and_one_tensor_once() -> None:
    plan = _calibrated(sites={"residual_add": True}).plan
    names = noisiest(plan, 10)
    sqnr = {f"{path}.{operand.name}": operand.sqnr_db for path, site in plan.items() for operand in site.operands}
    assert [sqnr[name] for name in names] == sorted(sqnr[name] for name in names)  # type: ignore[type-var]
    groups = [o.range_group for site in plan.values() for o in site.operands if o.role == "activation"]
    assert len(groups) > len(set(groups)) == len(names)
    assert noisiest(plan, 2) == names[:2]


@pytest.mark.parametrize(
    ("operand", "message"),
    [
        ("up.forward.linear_0.inputs", r"unknown operand .*did you mean 'up\.forward\.linear_0\.input' or "),
        ("zzz", r"unknown operand 'zzz'; print\(q\.ranges\) lists all"),
        ("up.forward.linear_0.weight", "no histogram of .*: it is a weight"),
    ],
    ids=["near", "far", "weight"],
)
def test_operands_without_a_histogram(operand: str, message: str) -> None:
    with pytest.raises(QuantizerError, match=message):
        _calibrated().histogram(operand)


def test_max_keeps_no_histogram() -> None:
    q = _calibrated(activations={"calibrator": "max"}, sites={"residual_add": False})
    with pytest.raises(
        QuantizerError, match="MaxCalibrator does not collect one; calibrate with percentile, mse, entropy or"
    ):
        q.histogram(INPUT)
    assert noisiest(q.plan, 6) == []


def test_an_operand_that_a_rule_leaves_out() -> None:
    q = _calibrated(exclude={"sites": ["forward.add_0.lhs"]})
    with pytest.raises(QuantizerError, match=r"no histogram of forward\.add_0\.lhs: .*excluded by rule"):
        q.histogram("forward.add_0.lhs")


def test_a_loaded_quantizer_has_none(tmp_path: Path) -> None:
    q = _calibrated()
    q.save(tmp_path / "saved")
    with pytest.raises(QuantizerError, match=r"was loaded; calib\(model, resume=True\) restores"):
        Quantizer.load(tmp_path / "saved").histogram(INPUT)
