"""The batches of the output check: at least 32 samples at every size that has a model of its own, and between."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quantizer import Quantizer
from quantizer.engines import TensorSpec
from quantizer.pipeline.compare_outputs import (
    LEAST_SAMPLES,
    OutputCheck,
    Tolerance,
    WrongEngineError,
    check_batches,
    check_engine,
    check_shapes,
    first_of_sizes,
    reference_outputs,
    tolerance,
)
from quantizer.pipeline.module_feed import ModuleFeed
from quantizer.proxy.lower import Lowering, lower
from quantizer.tasks.inputs import TextInputs


def test_the_least_the_usual_the_largest_and_two_between() -> None:
    shapes = check_shapes((1, 8, 64), (1, 128, 512), (8, 128))
    assert shapes[0] == (8, 128)
    assert {rows for rows, _ in shapes} == {1, 3, 8, 23, 64}
    assert {tokens for _, tokens in shapes} >= {1, 128, 512}
    assert check_shapes((4, 4, 4), (1, 1, 1), (4, 1)) == [(4, 1)]


def test_every_size_has_enough_real_samples() -> None:
    batches = [{"x": torch.arange(4.0)[:, None] + 4 * number} for number in range(16)]
    feed = ModuleFeed(batches)
    feed.samples_independent = True
    made = check_batches(feed, batches, [(4, 1), (1, 1), (3, 1)])
    counts: Counter[int] = Counter()
    for batch in made:
        counts[len(batch["x"])] += len(batch["x"])
    assert set(counts) == {4, 1, 3}
    assert all(count >= LEAST_SAMPLES for count in counts.values())
    # They are samples of the data, and not one of them again and again.
    assert len({float(value) for batch in made if len(batch["x"]) == 1 for value in batch["x"]}) == LEAST_SAMPLES


def test_a_model_that_mixes_samples_gets_whole_batches() -> None:
    batches = [{"x": torch.randn(4, 2)} for _ in range(16)]
    made = check_batches(ModuleFeed(batches), batches, [(4, 1), (1, 1)])
    assert [len(batch["x"]) for batch in made] == [4] * 8


def test_whole_batches_have_enough_samples_whatever_their_size() -> None:
    batches = [{"x": torch.randn(20, 2)} for _ in range(4)]
    assert [len(batch["x"]) for batch in check_batches(ModuleFeed(batches), batches, [(20, 1)])] == [20, 20]


def test_further_sizes_have_half_as_many_large_samples() -> None:
    batches = [{"x": torch.zeros(16, 3, 128, 128)}] * 2
    feed = ModuleFeed(batches)
    feed.samples_independent = True
    made = check_batches(feed, batches, [(16, 1), (1, 1), (4, 1)])
    assert Counter(len(batch["x"]) for batch in made) == {16: 2, 1: 16, 4: 4}
    assert [len(batch["x"]) for batch in made[:2]] == [16, 16]


class _Texts(TextInputs):
    """Texts of a model with some positions, of the number of tokens that is asked for."""

    def __init__(self, positions: int | None) -> None:
        self.max_positions = positions

    def filled(self, texts: Any, size: int, length: int) -> Any:
        """Return a batch of one length."""
        assert self.max_positions is None or length <= self.max_positions
        return {"input_ids": torch.zeros(size, length, dtype=torch.int64)}


@pytest.mark.parametrize(("positions", "longest"), [(None, 128), (128, 128), (40, 40)])
def test_no_length_is_beyond_the_positions_of_the_model(positions: int | None, longest: int) -> None:
    inputs: Any = _Texts(positions)
    feed: Any = SimpleNamespace(inputs=inputs, compared=lambda texts, *shape: inputs.filled(texts, *shape))
    made = check_batches(feed, ["a text"] * LEAST_SAMPLES, [(8, 16), (8, 128), (4, 64), (4, 40)])
    shapes = {tuple(batch["input_ids"].shape) for batch in made}
    assert shapes == {(8, 16), (8, longest), (4, min(64, longest)), (4, 40)}


class _Off:
    """An engine of ``x -> x`` whose outputs are wrong by some power, at some numbers of samples."""

    name, device, output_names, input_names = "fake", "cpu", ("y",), ("x",)
    inputs = (TensorSpec("x", np.dtype(np.float32), (None, None)),)

    def __init__(self, rows: int, decibels: float) -> None:
        self._rows, self._scale = rows, 10 ** (-decibels / 20)

    def __call__(self, inputs: Any) -> dict[str, Any]:
        """Run it."""
        x = np.asarray(inputs["x"])
        return {"y": x * np.float32(1 + self._scale) if len(x) == self._rows else x}


class _Same(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the input, with an error of 16.4 dB if it is the quantized model."""
        return {"y": x * (1 + self.error)}

    def __init__(self, error: float = 0.0) -> None:
        super().__init__()
        self.error = error


def _checks(engine: _Off, bound: Tolerance, proxy_db: float | None = None) -> list[OutputCheck]:
    torch.manual_seed(0)
    batches = [{"x": torch.randn(4, 16)} for _ in range(16)]
    feed = ModuleFeed(batches)
    feed.samples_independent = True
    made = check_batches(feed, batches, check_shapes((1, 4, 32), (1, 1, 1), (4, 1)))
    float_model = _Same() if proxy_db is None else _Same(10 ** (-proxy_db / 20))
    plain = reference_outputs(float_model, made, ["y"])
    return check_engine(engine, reference_outputs(_Same(), made, ["y"]), plain, bound)


INT8, BF16, FP32 = (
    tolerance(None, quantized, kind)
    for quantized, kind in ((True, torch.float32), (False, torch.bfloat16), (False, torch.float32))
)


@pytest.mark.parametrize("rows", [1, 2, 4, 11, 32])
@pytest.mark.parametrize(
    ("bound", "least"), [(INT8, 30.0), (BF16, 30.0), (FP32, 60.0)], ids=["int8", "bfloat16", "float32"]
)
def test_the_rule_that_is_printed_holds_at_each_size(rows: int, bound: Tolerance, least: float) -> None:
    assert str(bound).startswith(f"SQNR of {least:g} dB or more")
    assert len(_checks(_Off(rows, least + 0.1), bound)) == 5
    with pytest.raises(
        WrongEngineError, match=f"batch {rows}, .*: SQNR {least - 0.1:.1f} dB.*{bound}.* at batch {rows},"
    ):
        _checks(_Off(rows, least - 0.1), bound)


def test_an_engine_with_less_than_3_db_further_is_right_and_one_with_more_is_not() -> None:
    # The quantized model is 16.4 dB from the float model, and the engine another 16.4 dB to the other side: 6 dB.
    assert _checks(_Off(1, 26.0), INT8, proxy_db=16.4)
    with pytest.raises(WrongEngineError, match=r"batch 1, .*at most 3 dB further from the float model than PyTorch"):
        _checks(_Off(1, 3.6), INT8, proxy_db=16.4)


def test_one_sample_of_many_does_not_condemn_a_float_engine() -> None:
    class _OneSample(_Off):
        def __call__(self, inputs: Any) -> dict[str, Any]:
            x = np.asarray(inputs["x"])
            self._calls = getattr(self, "_calls", 0) + (len(x) == 1)
            return {"y": x * np.float32(1.05) if len(x) == 1 and self._calls == 1 else x}

    # That sample alone has 26 dB, and 32 samples 41.
    (one,) = [check for check in _checks(_OneSample(1, 0), BF16) if check.batch == 1]
    assert 30 < one.sqnr_db < 50


class _Double(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return twice the input."""
        return {"y": 2 * x}


def _counted() -> tuple[nn.Module, list[int]]:
    """Return a model, and a list that receives the number of samples of each call."""
    model, ran = _Double(), list[int]()
    model.register_forward_pre_hook(lambda _, __, inputs: ran.append(len(inputs["x"])), with_kwargs=True)
    return model, ran


def _in_batches(*sizes: int) -> list[dict[str, torch.Tensor]]:
    samples = torch.arange(64.0).reshape(32, 2)
    return [{"x": samples[:size]} for size in sizes] + [{"x": samples[1:2]}]


def test_each_sample_runs_once_in_batches_and_once_alone() -> None:
    (model, ran), batches = _counted(), _in_batches(32, 6, 20, 1)
    found = reference_outputs(model, batches, ["y"])
    # Of the two batches of one sample, the first one runs.
    assert ran == [32, 1]
    for reference, batch in zip(found, batches, strict=True):
        assert np.array_equal(reference.outputs["y"], 2 * batch["x"].numpy())


def test_other_samples_run() -> None:
    model, ran = _counted()
    reference_outputs(model, [{"x": torch.zeros(4, 2)}, {"x": torch.ones(4, 2)}, {"x": torch.zeros(4, 3)}], ["y"])
    assert ran == [4, 4, 4]


def test_each_batch_runs_if_its_samples_depend_on_each_other() -> None:
    model, ran = _counted()
    reference_outputs(model, _in_batches(32, 6), ["y"], apart=False)
    assert ran == [32, 6, 1]


def test_each_batch_runs_with_a_range_of_its_own() -> None:
    torch.manual_seed(0)
    model, quantizer = nn.Linear(2, 2), Quantizer(backend="onnxruntime", activations={"ranges": "dynamic"})
    samples = torch.arange(64.0).reshape(32, 2)
    quantizer.calibrate(model, [samples])
    frozen = quantizer.quantize(model)
    batches = [{"input": samples}, {"input": samples[:6]}]
    found = reference_outputs(frozen, batches, ["output_0"])
    with torch.no_grad():
        alone = frozen(samples[:6])
    assert np.array_equal(found[1].outputs["output_0"], alone.numpy())
    assert not np.array_equal(found[0].outputs["output_0"][:6], alone.numpy())


def test_one_batch_of_each_size() -> None:
    found = reference_outputs(_Double(), _in_batches(4, 4, 2), ["y"])
    assert [len(reference.inputs["x"]) for reference in first_of_sizes(found)] == [4, 2, 1]


def test_further_sizes_have_half_as_many_long_texts() -> None:
    inputs: Any = _Texts(None)
    feed: Any = SimpleNamespace(inputs=inputs, compared=lambda texts, *shape: inputs.filled(texts, *shape))
    made = check_batches(feed, ["a text"] * LEAST_SAMPLES, [(8, 512), (1, 128), (4, 256)])
    assert Counter(tuple(batch["input_ids"].shape) for batch in made) == {(8, 512): 4, (1, 128): 32, (4, 256): 4}


@pytest.mark.usefixtures("exact_byte_products")
def test_noise_of_sums_is_simulated_beside_integer_kernels() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    quantizer, samples = Quantizer(backend="openvino"), torch.randn(32, 16)
    quantizer.calibrate(model, [samples])
    frozen, kernels = quantizer.quantize(model), lower(quantizer.quantize(model), Lowering())
    (found,) = reference_outputs(kernels, [{"input": samples}], ["output_0"], simulation=frozen)
    draws = [draw["output_0"] for draw in found.noisy]
    assert all(not np.array_equal(draws[0], draw) for draw in draws[1:])
