"""The operators of recurrent layers against torch's own layers and against products of rounded tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from quantizer.numerics import torch_operators as ops
from quantizer.numerics.recurrence import CELLS, dynamic_lstm, recurrence

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

LAYERS: dict[str, Any] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": lambda *sizes: nn.RNN(*sizes, nonlinearity="relu"),
}
STEPS, BATCH, INPUTS, HIDDEN = 5, 2, 3, 4
KINDS = pytest.mark.parametrize("kind", LAYERS)
BACKWARD = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
Results = tuple[Tensor, Tensor, Tensor]


def a_layer(kind: str, **options: Any) -> nn.RNNBase:
    torch.manual_seed(0)
    layer: nn.RNNBase = LAYERS[kind](INPUTS, HIDDEN, **options)
    return layer.requires_grad_(False)


def the_states(kind: str, hidden: int = HIDDEN) -> tuple[Tensor, Tensor]:
    state = torch.randn(BATCH, hidden)
    return state, torch.randn(BATCH, HIDDEN) if CELLS[kind].has_cell else state


def by_the_operator(
    layer: nn.RNNBase, kind: str, x: Tensor, states: tuple[Tensor, Tensor], backward: bool, **changed: Any
) -> Results:
    """The operator's results for the weights of a layer, some of its arguments changed."""
    arguments: dict[str, Any] = {
        "kind": kind,
        "given": functional.linear(x, layer.weight_ih_l0, layer.bias_ih_l0),
        "hidden": states[0],
        "cell": states[1],
        "weight": layer.weight_hh_l0,
        "bias": layer.bias_hh_l0,
        "projection": getattr(layer, "weight_hr_l0", None),
        "weight_scale": None,
        "weight_dtype": "int8",
        "weight_axis": None,
        "scale": None,
        "dtype": "int8",
        "zero_point": None,
        "projection_scale": None,
        "projected_scale": None,
        "projected_zero_point": None,
        "backward": backward,
    }
    results: Results = recurrence(*(arguments | changed).values())
    return results


def by_torch(layer: nn.RNNBase, kind: str, x: Tensor, states: tuple[Tensor, Tensor], backward: bool) -> Results:
    before = tuple(state[None] for state in states) if CELLS[kind].has_cell else states[0][None]
    outputs, after = layer(x.flip(0) if backward else x, before)
    hidden, cell = after if CELLS[kind].has_cell else (after, after)
    return outputs.flip(0) if backward else outputs, hidden[0], cell[0]


def assert_near(found: Results, expected: Results) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@KINDS
def test_a_cell_has_the_gates_of_torchs_layer(kind: str) -> None:
    assert CELLS[kind].gates * HIDDEN == len(a_layer(kind).weight_hh_l0)


@BACKWARD
@KINDS
def test_in_floats_it_is_torchs_layer(kind: str, backward: bool) -> None:
    layer, x, states = a_layer(kind), torch.randn(STEPS, BATCH, INPUTS), the_states(kind)
    assert_near(by_the_operator(layer, kind, x, states, backward), by_torch(layer, kind, x, states, backward))


def test_in_floats_it_is_torchs_layer_with_a_projection() -> None:
    layer, x, states = a_layer("lstm", proj_size=2), torch.randn(STEPS, BATCH, INPUTS), the_states("lstm", 2)
    assert_near(by_the_operator(layer, "lstm", x, states, False), by_torch(layer, "lstm", x, states, False))


def test_integer_weights_are_those_times_their_scales() -> None:
    layer, x, states = a_layer("lstm", proj_size=2), torch.randn(STEPS, BATCH, INPUTS), the_states("lstm", 2)
    weight, projection = layer.weight_hh_l0, layer.weight_hr_l0
    scales = {"weight_scale": weight.abs().amax(1) / 127, "projection_scale": projection.abs().amax(1) / 127}
    codes = {
        "weight": ops.quantize(weight, scales["weight_scale"], "int8", 0),
        "projection": ops.quantize(projection, scales["projection_scale"], "int8", 0),
    }
    found = by_the_operator(layer, "lstm", x, states, False, **codes, **scales, weight_axis=0)
    layer.weight_hh_l0.copy_(ops.dequantize(codes["weight"], scales["weight_scale"], "int8", 0))
    layer.weight_hr_l0.copy_(ops.dequantize(codes["projection"], scales["projection_scale"], "int8", 0))
    assert_near(found, by_torch(layer, "lstm", x, states, False))


def test_each_product_rounds_what_it_reads() -> None:
    layer, x, states = a_layer("lstm", proj_size=2), torch.randn(1, BATCH, INPUTS), the_states("lstm", 2)
    scale, zero_point = torch.tensor(0.3), torch.tensor(100, dtype=torch.uint8)
    before = ops.fake_quantize(states[0], scale, "uint8", None, None, zero_point)
    (exact, _, cell), rounded = (
        by_the_operator(layer, "lstm", x, (before, states[1]), False, projection=projection)
        for projection in (torch.eye(HIDDEN), layer.weight_hr_l0)
    )
    found = by_the_operator(layer, "lstm", x, states, False, scale=scale, dtype="uint8", zero_point=zero_point)
    assert_near(found, rounded)
    projected = {"projected_scale": torch.tensor(0.1), "projected_zero_point": torch.tensor(90, dtype=torch.uint8)}
    found = by_the_operator(layer, "lstm", x, (before, states[1]), False, dtype="uint8", **projected)
    inputs = ops.fake_quantize(exact, projected["projected_scale"], "uint8", None, None, torch.tensor(90))
    expected = inputs @ layer.weight_hr_l0.T
    assert_near(found, (expected, expected[0], cell))


@BACKWARD
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_the_dynamic_lstm_rounds_with_the_range_of_each_step(bias: bool, backward: bool) -> None:
    layer, x, (hidden, cell) = a_layer("lstm"), torch.randn(STEPS, BATCH, INPUTS), the_states("lstm")
    weights = (layer.weight_ih_l0, layer.weight_hh_l0)
    scales = [weight.abs().amax(1) / 127 for weight in weights]
    codes = [ops.quantize(weight, scale, "int8", 0) for weight, scale in zip(weights, scales, strict=True)]
    biases = torch.randn(2, 4 * HIDDEN) if bias else torch.zeros(2, 4 * HIDDEN)
    found = dynamic_lstm(
        x, hidden, cell, codes[0], scales[0], codes[1], scales[1], biases.flatten() if bias else None, backward
    )
    by_input, by_state = (ops.dequantize(code, scale, "int8", 0).T for code, scale in zip(codes, scales, strict=True))
    given = ops.fake_quantize_dynamic(x) @ by_input + biases[0]
    outputs = [torch.empty(0)] * STEPS
    for step in reversed(range(STEPS)) if backward else range(STEPS):
        gates = given[step] + ops.fake_quantize_dynamic(hidden) @ by_state + biases[1]
        admit, forget, new, output = gates.split(HIDDEN, 1)
        cell = forget.sigmoid() * cell + admit.sigmoid() * new.tanh()
        outputs[step] = hidden = output.sigmoid() * cell.tanh()
    assert_near(found, (torch.stack(outputs), hidden, cell))


@KINDS
def test_opcheck(kind: str) -> None:
    gates = CELLS[kind].gates * HIDDEN
    given, weight, (hidden, cell) = torch.randn(STEPS, BATCH, gates), torch.randn(gates, HIDDEN), the_states(kind)
    floats = (kind, given, hidden, cell.clone(), weight, *(None,) * 3, "int8", None, None, "int8", *(None,) * 4, False)
    torch.library.opcheck(torch.ops.quantizer.recurrence.default, floats)


def test_opcheck_of_the_dynamic_lstm() -> None:
    codes = torch.ones(4 * HIDDEN, INPUTS, dtype=torch.int8), torch.ones(4 * HIDDEN, HIDDEN, dtype=torch.int8)
    scale = torch.rand(4 * HIDDEN)
    arguments = (torch.randn(STEPS, BATCH, INPUTS), *the_states("lstm"), codes[0], scale, codes[1], scale, None, False)
    torch.library.opcheck(torch.ops.quantizer.dynamic_lstm.default, arguments)


def test_a_projected_state_is_smaller_than_the_cell() -> None:
    given, (hidden, cell) = torch.randn(STEPS, BATCH, 4 * HIDDEN), the_states("lstm", 2)
    weight, projection = torch.randn(4 * HIDDEN, 2), torch.randn(2, HIDDEN)
    floats = ("lstm", given, hidden, cell, weight, None, projection, None, "int8", None, None, "int8", *(None,) * 4)
    torch.library.opcheck(torch.ops.quantizer.recurrence.default, (*floats, False))
