"""Operations of calibration that keep a GPU waiting, counted on a CPU by ``benchmarks/synchronisations.py``."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import batch, tiny

from quantizer.algorithms.bias_correction import _Expected
from quantizer.observe import calibrators, statistics
from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.utils import devices, fingerprint

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from synchronisations import counted, mark, of_calibration


@pytest.mark.parametrize(("preset", "most"), [("plain", 260), ("balanced", 1850)])
def test_waits_of_a_calibration(preset: str, most: int) -> None:
    """236 and 1,700 were counted. 574 and 3,931 were counted when each value was read alone."""
    batches = [batch("bert", seed=seed, padded=seed % 2 == 1) for seed in range(8)]
    counts = of_calibration(tiny("bert"), batches, backend="tensorrt", preset=preset)
    assert counts.waits.total() <= most


def test_a_padded_operand_is_read_without_a_wait_after_the_first_one() -> None:
    value, mask = torch.randn(3, 5, 4), torch.tensor([[1, 1, 1, 0, 0], [1] * 5, [1, 0, 0, 0, 0]]).bool()
    expected = value[mask]
    mark([value, mask])
    with counted() as first:
        operand = statistics.without_padding(value, mask)
    with counted() as second:
        output = statistics.output_without_padding(value, mask)
    assert (first.waits, second.waits.total()) == ({"aten::nonzero": 1}, 0)
    assert torch.equal(operand, expected)
    assert torch.equal(output, expected)


def test_a_mask_is_understood_with_three_waits() -> None:
    inputs = {"input_ids": torch.arange(15).reshape(3, 5), "attention_mask": torch.ones(3, 5, dtype=torch.int64)}
    inputs["attention_mask"][1, 3:] = 0
    mark(inputs)
    with counted() as counts:
        mask, doubt = statistics.read_mask(inputs)
    assert (doubt, counts.waits.total()) == (None, 3)
    assert mask is not None
    assert mask.sum() == 13


def test_a_range_is_read_with_one_wait() -> None:
    x = torch.randn(7, 9)
    mark(x)
    calibrator = calibrators.make_calibrator("max")
    with counted() as counts:
        calibrator.observe(x)
    assert counts.waits == {"Tensor.tolist": 1}
    assert (calibrator.minimum, calibrator.maximum) == (x.min().item(), x.max().item())


def test_counts_stay_on_the_gpu_until_they_are_read() -> None:
    histogram, expected = calibrators.Histogram(), calibrators.Histogram()
    batches = [torch.full((9,), 0.5), torch.linspace(-1, 1, 33), torch.zeros(4), torch.full((5,), 3.0), torch.ones(2)]
    for x in batches:
        expected.add(x, float(x.abs().max()))
    mark(batches)
    with counted() as counts:
        for x in batches:
            histogram.add(x, {9: 0.5, 33: 1.0, 4: 0.0, 5: 3.0, 2: 1.0}[len(x)])
        other = copy.copy(histogram)
        other.add(batches[0], 0.5)
        # The values 1 and 3 need wider bins than those before them.
        assert counts.waits["Tensor.cpu"] == 2
        assert histogram.total == expected.total
        assert counts.waits["Tensor.cpu"] == 3
    assert torch.equal(histogram.counts, expected.counts)
    assert other.total == expected.total + 9
    assert histogram.exponent == expected.exponent


def test_the_scale_of_a_weight_is_checked_once() -> None:
    quantizer, scale = OperandQuantizer(), torch.tensor([0.5, 0.25])
    mark(scale)
    with counted() as counts:
        for _ in range(3):
            quantizer.set_scale(scale, "int8", 0)
    assert counts.waits.total() == 1
    # A change in place is noticed.
    scale[0] = -1
    with pytest.raises(ValueError, match="positive and finite"):
        quantizer.set_scale(scale, "int8", 0)


def test_the_errors_of_a_bias_are_summed_without_a_wait() -> None:
    y = torch.randn(6, 4)
    mark(y)
    with counted() as counts:
        total = _Expected.of(y).compared(y + 1)
    assert counts.waits.total() == 0
    torch.testing.assert_close(total.mean(torch.float32), torch.full((4,), -1.0))
    # If most rows are zeros, all have the same weight.
    y[:4] = 0
    assert _Expected.of(y).weights.tolist() == [1.0] * 6


def test_tensors_of_a_gpu_are_digested_with_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors: dict[str, Any] = {
        "a": torch.randn(3, 5),
        "b": torch.tensor(2.5, dtype=torch.bfloat16),
        "c": torch.arange(12, dtype=torch.int8).reshape(3, 4).t(),
        "d": torch.tensor([True, False, True]),
        "e": torch.randn(4).to(torch.float8_e4m3fn),
        "f": torch.zeros(0, 3),
        "large": torch.zeros(300_000),
    }
    stamps = {name: fingerprint.TensorStamp.of(value) for name, value in tensors.items()}
    expected = fingerprint.tensors_digest(tensors, "text")
    mark(tensors)
    with counted() as counts:
        assert fingerprint.tensors_digest(tensors, "text") == expected
    assert counts.waits["Tensor.cpu"] == 2  # the small ones, and the large one
    monkeypatch.setattr(devices, "is_apart", lambda device: True)
    stamped = torch.arange(600_000, dtype=torch.int32)
    assert fingerprint.TensorStamp.of(stamped) == fingerprint.TensorStamp.of(stamped)
    before = fingerprint.TensorStamp.of(stamped)
    stamped.data[17] += 1
    assert fingerprint.TensorStamp.of(stamped) != before
    assert fingerprint.TensorStamp.of(tensors["a"]).values == stamps["a"].values


def test_a_fingerprint_reads_only_parameters_that_changed() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    first = fingerprint.Fingerprint.of(model)
    with pytest.MonkeyPatch.context() as patch:
        printed: list[Any] = []
        original = fingerprint._print
        patch.setattr(fingerprint, "_print", lambda value: printed.append(value.shape) or original(value))
        assert fingerprint.Fingerprint.of(model) == first
        assert printed == []
        model[1].weight.data[0, 0] += 1
        assert fingerprint.Fingerprint.of(model) != first
        assert printed == [(2, 3)]
