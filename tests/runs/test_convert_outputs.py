"""The gate of a conversion: which engines pass it, and which outputs are compared in what places."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quantizer.engines import TensorSpec
from quantizer.errors import EngineError
from quantizer.runs.compare_outputs import NOTHING_DB
from quantizer.runs.compare_outputs import OutputCheck
from quantizer.runs.compare_outputs import Reference
from quantizer.runs.compare_outputs import Tolerance
from quantizer.runs.compare_outputs import check_engine
from quantizer.runs.compare_outputs import reference_outputs


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
    message = "it holds NaN" if where == "engine" else r"PyTorch's own output holds NaN.* is the checkpoint sound\?"
    with pytest.raises(EngineError, match=message):
        _checks(right, given)


def test_infinite_values_that_the_model_means() -> None:
    def masked(ids: Any, mask: Any, other: bool = False) -> Any:
        low = np.float32(np.inf if other else -np.inf)
        return np.where(ids[:, :4] > 4, low, np.sin(ids[:, :4]).astype(np.float32))

    assert [check.sqnr_db for check in _checks(masked, masked)] == [None, None]
    assert all(np.isfinite(check.cosine) for check in _checks(masked, masked))
    for given in (lambda ids, mask: masked(ids, mask, True), lambda ids, mask: np.sin(ids[:, :4]).astype(np.float32)):
        with pytest.raises(EngineError, match="infinite values where PyTorch's does not, or lacks infinite ones"):
            _checks(masked, given)


@pytest.mark.parametrize("shapes", [((2, 4), (3, 6)), ((2, 6), (3, 6))], ids=["one of two lengths", "the only length"])
def test_as_many_classes_as_tokens(shapes: tuple[tuple[int, int], ...]) -> None:
    assert len(_checks(_logits(6), _logits(6), shapes)) == 2
    with pytest.raises(EngineError, match="the engine does not compute what the model computes"):
        _checks(_logits(6), _logits(6, wrong=5), shapes)


@pytest.mark.parametrize("shapes", [((2, 4), (3, 6)), ((2, 6), (3, 6))], ids=["two lengths", "one length"])
def test_padding_of_tokens_is_not_compared(shapes: tuple[tuple[int, int], ...]) -> None:
    assert [check.sqnr_db for check in _checks(_hidden(), _hidden(wrong=True), shapes)] == [None, None]
