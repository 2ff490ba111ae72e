"""The gate of a conversion: which engines pass it, and which outputs are compared in what places."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quantizer import Quantizer
from quantizer.engines import TensorSpec
from quantizer.errors import EngineError
from quantizer.pipeline.compare_outputs import (
    NOTHING_DB,
    OutputCheck,
    Reference,
    Tolerance,
    check_engine,
    distances_of,
    float_noise,
    reference_outputs,
    tolerance,
)


class _Engine:
    """Gives what a function makes of its inputs."""

    name = "fake"
    device = "cpu"
    inputs = tuple(TensorSpec(name, np.dtype(np.int64), (None, None)) for name in ("ids", "attention_mask"))
    input_names = ("ids", "attention_mask")
    output_names = ("y",)

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, inputs: Any) -> dict[str, Any]:
        """Run it."""
        return {"y": self._function(*(np.asarray(inputs[name]) for name in self.input_names))}


class _Model(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self._function = function

    def forward(self, ids: Any, attention_mask: Any) -> dict[str, Any]:
        """Compute the same."""
        return {"y": torch.from_numpy(self._function(ids.numpy(), attention_mask.numpy()))}


def _checks(right: Any, given: Any, shapes: tuple[tuple[int, int], ...] = ((2, 4), (3, 6))) -> list[OutputCheck]:
    generator = torch.Generator().manual_seed(0)
    batches = []
    for shape in shapes:
        mask = torch.ones(shape, dtype=torch.long)
        mask[1:, shape[1] // 2 :] = 0
        batches.append({"ids": torch.randint(1, 9, shape, generator=generator), "attention_mask": mask})
    expected: list[Reference] = reference_outputs(_Model(right), batches, ["y"])
    return check_engine(_Engine(given), expected, expected, Tolerance(30.0, 3.0))


def _logits(classes: int, wrong: int | None = None) -> Any:
    def compute(ids: Any, mask: Any) -> Any:
        values = np.sin(ids.sum(1, keepdims=True) + np.arange(classes)).astype(np.float32)
        if wrong is not None:
            values[:, wrong] += 1000
        return values

    return compute


def _hidden(wrong: bool = False) -> Any:
    def compute(ids: Any, mask: Any) -> Any:
        values = np.sin(ids[..., None] + np.arange(3)).astype(np.float32)
        return np.where(mask[..., None] == 0, np.float32(7), values) if wrong else values

    return compute


def test_an_equal_engine_has_no_difference() -> None:
    assert [check.sqnr_db for check in _checks(_logits(4), _logits(4))] == [None, None]


def test_an_output_of_zeros_is_held_to_as_well() -> None:
    def zeros(ids: Any, mask: Any) -> Any:
        return np.zeros((len(ids), 4), np.float32)

    assert [check.sqnr_db for check in _checks(zeros, zeros)] == [None, None]
    with pytest.raises(EngineError, match=rf"output 'y': SQNR {NOTHING_DB:.1f} dB against PyTorch"):
        _checks(zeros, lambda ids, mask: zeros(ids, mask) + 100)


@pytest.mark.parametrize("where", ["both", "PyTorch", "engine"])
def test_values_that_are_no_numbers(where: str) -> None:
    def broken(ids: Any, mask: Any) -> Any:
        return np.where(ids[:, :4] > 4, np.float32(np.nan), np.float32(1))

    right, given = (broken if where in ("both", side) else _logits(4) for side in ("PyTorch", "engine"))
    message = "its NaN or" if where == "engine" else r"PyTorch's own output contains NaN.* check the checkpoint"
    with pytest.raises(EngineError, match=message):
        _checks(right, given)


def test_infinite_values_that_the_model_means() -> None:
    def masked(ids: Any, mask: Any, other: bool = False) -> Any:
        low = np.float32(np.inf if other else -np.inf)
        return np.where(ids[:, :4] > 4, low, np.sin(ids[:, :4]).astype(np.float32))

    assert [check.sqnr_db for check in _checks(masked, masked)] == [None, None]
    assert all(np.isfinite(check.cosine) for check in _checks(masked, masked))
    for given in (lambda ids, mask: masked(ids, mask, True), lambda ids, mask: np.sin(ids[:, :4]).astype(np.float32)):
        with pytest.raises(EngineError, match="infinite values differ from PyTorch's"):
            _checks(masked, given)


@pytest.mark.parametrize("shapes", [((2, 4), (3, 6)), ((2, 6), (3, 6))], ids=["one of two lengths", "the only length"])
def test_as_many_classes_as_tokens(shapes: tuple[tuple[int, int], ...]) -> None:
    assert len(_checks(_logits(6), _logits(6), shapes)) == 2
    with pytest.raises(EngineError, match="the engine does not compute the same as the model"):
        _checks(_logits(6), _logits(6, wrong=5), shapes)


@pytest.mark.parametrize("shapes", [((2, 4), (3, 6)), ((2, 6), (3, 6))], ids=["two lengths", "one length"])
def test_padding_of_tokens_is_not_compared(shapes: tuple[tuple[int, int], ...]) -> None:
    assert [check.sqnr_db for check in _checks(_hidden(), _hidden(wrong=True), shapes)] == [None, None]


class _Stairs(nn.Module):
    """Products one after another, whose sums lie on the edges of steps: a little noise moves many of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(12))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the logits of two classes."""
        for layer in self.layers:
            x = x + 8 * torch.sin(8 * layer(x))
        return {"y": x[:, :2]}


def _quantized_stairs() -> tuple[nn.Module, nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model, x = _Stairs().eval(), torch.randn(8, 32)
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [x])
    return model, q.quantize(model), {"x": x}


def test_noise_of_float_sums_moves_a_model_that_rounds_and_is_taken_away_again() -> None:
    model, frozen, batch = _quantized_stairs()
    (expected,), (plain,) = (reference_outputs(one, [batch], ["y"]) for one in (frozen, model))
    noisy = list(expected.noisy)
    assert len(noisy) == 8
    assert all(not np.array_equal(one["y"], expected.outputs["y"]) for one in noisy)
    assert next(iter(expected.noisy)) is noisy[0]
    assert list(plain.noisy) == []
    with float_noise(frozen, 1), torch.no_grad():
        np.testing.assert_array_equal(frozen(**batch)["y"].numpy(), noisy[1]["y"])
    with torch.no_grad():
        np.testing.assert_array_equal(frozen(**batch)["y"].numpy(), expected.outputs["y"])


class _Given:
    """An engine that gives what it was made with."""

    name = "fake"
    device = "cpu"
    inputs = (TensorSpec("x", np.dtype(np.float32), (None, 32)),)
    input_names = ("x",)
    output_names = ("y",)

    def __init__(self, values: Any) -> None:
        self._values = values

    def __call__(self, inputs: Any) -> dict[str, Any]:
        """Return it."""
        return {"y": self._values}


def test_an_engine_may_be_as_far_as_the_noise_of_sums_and_no_further() -> None:
    model, frozen, batch = _quantized_stairs()
    (expected,), (plain,) = (reference_outputs(one, [batch], ["y"]) for one in (frozen, model))
    calls: list[object] = []
    frozen.register_forward_hook(lambda *_: calls.append(None))
    right = plain.outputs["y"]
    # PyTorch's own order of sums happens to give nearly what float does.
    lucky = replace(expected, outputs={"y": right + 1e-4 * np.abs(right).mean()})
    moved = _Given(next(iter(expected.noisy))["y"])
    (check,) = check_engine(moved, [lucky], [plain], tolerance(None, True, torch.float32))
    assert check.sqnr_db < 30
    assert check.noise_float_db is not None
    assert check.float_db >= check.noise_float_db - 3
    # The first simulation explains the distance, so no other one follows.
    assert len(calls) == 1
    (distance,) = distances_of([check], engine=True)
    assert distance.is_alike
    assert not replace(distance, noise_sqnr_db=None).is_alike
    with pytest.raises(EngineError, match="dB with the noise of float sums; expected an SQNR of 30 dB or more"):
        check_engine(_Given(-4 * right), [lucky], [plain], tolerance(None, True, torch.float32))
    assert len(calls) == 8
    # An order that nobody may take: the noise does not count where a bound was asked for.
    with pytest.raises(EngineError, match="expected an SQNR of 40 dB or more: the engine"):
        check_engine(moved, [lucky], [plain], tolerance(40.0, True, torch.float32))
