"""Warnings of calibration data and of a model's mode that are possible, and more often a mistake."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from helpers import ConvNet, Mlp
from torch import Tensor

from quantizer import Quantizer
from quantizer.errors import CalibrationWarning
from quantizer.utils.batches import FEWEST_SAMPLES, doubts_of_batch, doubts_of_calibration


@pytest.fixture(autouse=True)
def _all_warnings_count() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def _photo(rows: int = 4, size: int = 32) -> Tensor:
    """Waves with a little noise, in [0, 1]: [rows, 3, size, size]."""
    torch.manual_seed(5)
    wave = torch.sin(torch.arange(size) / 5) / 3 + 0.5
    return (wave + torch.rand(rows, 3, size, size) / 20).clamp(0, 1)


def _quantizer() -> Quantizer:
    return Quantizer(preset="plain", backend="openvino")


def test_a_model_in_train_mode() -> None:
    model = ConvNet()
    (told,) = doubts_of_calibration(model, 128)
    assert told.startswith("the ConvNet is in train mode")
    assert told.endswith("call model.eval()")
    assert not list(doubts_of_calibration(model.eval(), 128))
    # The two modes of a model without dropout and batch norm are the same.
    assert not list(doubts_of_calibration(Mlp().train(), 128))


def test_few_rows() -> None:
    (told,) = doubts_of_calibration(Mlp(), 8)
    assert told.startswith("calibrated on 8 samples: ranges of fewer than 32")
    assert not list(doubts_of_calibration(Mlp(), FEWEST_SAMPLES))


def test_pixels_before_they_are_normalized() -> None:
    photo = _photo()
    assert not list(doubts_of_batch(photo))
    assert not list(doubts_of_batch([photo * 2 - 1]))
    (told,) = doubts_of_batch({"pixel_values": (photo * 255).round()})
    assert "whole numbers from" in told
    assert "normalized" in told


def test_noise_for_images() -> None:
    (told,) = doubts_of_batch((torch.randn(8, 3, 32, 32),))
    assert told.startswith("images of the calibration data look like noise")


@pytest.mark.parametrize(
    "value", [torch.zeros(4, 3, 40, 40), torch.ones(8, 64), torch.arange(99), torch.zeros(0, 3, 4, 4)]
)
def test_other_inputs_raise_no_doubt(value: Tensor) -> None:
    assert not list(doubts_of_batch(value))


def test_calibration_warns_once_of_each_at_the_users_line() -> None:
    model = ConvNet()
    with pytest.warns(CalibrationWarning) as told:
        _quantizer().calibrate(model, [torch.rand(8, 3, 16, 16)] * 3)
    assert [str(entry.message).split()[0] for entry in told] == ["images", "the", "calibrated"]
    assert {entry.filename for entry in told} == {__file__}


def test_rows_are_counted_over_all_calls() -> None:
    q, model = _quantizer(), Mlp().eval()
    with pytest.warns(CalibrationWarning, match="calibrated on 16 samples"):
        q.calibrate(model, [torch.randn(16, 32)])
    assert repr(q) == "Quantizer(backend='openvino', calibrated on 16 samples, 3 sites)"
    q.calibrate(model, [torch.randn(16, 32)], resume=True)
    assert repr(q) == "Quantizer(backend='openvino', calibrated on 32 samples, 3 sites)"


def test_good_data_raises_no_doubt() -> None:
    _quantizer().calibrate(ConvNet().eval(), _photo(32, 16))
