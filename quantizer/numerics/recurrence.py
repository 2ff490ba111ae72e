"""Recurrent cells, and the torch operators that represent a recurrent layer in exported files.

Legend: T steps, B samples, I inputs, H hidden units; P the size of the hidden state, which is H unless it is projected;
G = the cell's ``gates`` times H. Weights and the order of gates are torch's: input, forget, cell, output of an LSTM;
reset, update, new of a GRU.

A loop over steps has no graph if T is dynamic, and a large one if T is large. So each operator stands for the whole
loop in a recorded model: ``recurrence`` becomes a Scan whose body has the Q/DQ pairs, and ``dynamic_lstm`` becomes the
DynamicQuantizeLSTM of ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional

from quantizer.numerics.torch_operators import dequantize, fake_quantize, fake_quantize_dynamic

_Next = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Cell:
    """A recurrent cell.

    Attributes:
        gates: the number of gates, so that the matrix multiplications return ``gates`` times H values.
        has_cell: whether it has a cell state in addition to the hidden state.
        next: returns both states [B, H] after a step. Its arguments are the input and recurrent results [B, G] with
            biases, and both states before the step. Without a cell state, it returns the hidden state twice.
    """

    gates: int
    has_cell: bool
    next: _Next


def _lstm(inputs: Tensor, recurrent: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    admit, forget, new, output = (inputs + recurrent).chunk(4, -1)
    cell = forget.sigmoid() * cell + admit.sigmoid() * new.tanh()
    return output.sigmoid() * cell.tanh(), cell


def _gru(inputs: Tensor, recurrent: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    input_reset, input_update, input_new = inputs.chunk(3, -1)
    reset, update, new = recurrent.chunk(3, -1)
    candidate = (input_new + (input_reset + reset).sigmoid() * new).tanh()
    hidden = candidate + (input_update + update).sigmoid() * (hidden - candidate)
    return hidden, hidden


def _tanh(inputs: Tensor, recurrent: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    hidden = (inputs + recurrent).tanh()
    return hidden, hidden


def _relu(inputs: Tensor, recurrent: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    hidden = (inputs + recurrent).relu()
    return hidden, hidden


CELLS: Mapping[str, Cell] = MappingProxyType(
    {
        "lstm": Cell(4, True, _lstm),
        "gru": Cell(3, False, _gru),
        "rnn_tanh": Cell(1, False, _tanh),
        "rnn_relu": Cell(1, False, _relu),
    }
)
"""Cells by the name of torch's kernel."""


def steps(
    kind: str,
    given: Tensor,
    states: tuple[Tensor, Tensor],
    recurrent: Callable[[Tensor], Tensor],
    projected: Callable[[Tensor], Tensor] | None,
    *,
    backward: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the hidden states [T, B, P] of all steps, and both states after the last step.

    Args:
        kind: the cell, of ``CELLS``.
        given: [T, B, G], the inputs multiplied by their weight, with bias.
        states: hidden [B, P] and cell [B, H] before the first step; without a cell state, twice the hidden state.
        recurrent: multiplies a hidden state by the recurrent weight, with bias; returns [B, G].
        projected: returns the hidden state [B, P] of a state [B, H]; None: no projection.
        backward: run from the last step to the first.
    """
    hidden, cell = states
    outputs = []
    for step in given.flip(0).unbind(0) if backward else given.unbind(0):
        hidden, cell = CELLS[kind].next(step, recurrent(hidden), hidden, cell)
        hidden = hidden if projected is None else projected(hidden)
        outputs.append(hidden)
    stacked = torch.stack(outputs)
    return (stacked.flip(0) if backward else stacked), hidden, cell


def _apart(outputs: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Clone the states, because an operator must not return its inputs, nor one tensor twice."""
    return outputs, hidden.clone(), cell.clone()


@torch.library.custom_op("quantizer::recurrence", mutates_args=())
def recurrence(
    kind: str,
    given: Tensor,
    hidden: Tensor,
    cell: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    projection: Tensor | None,
    weight_scale: Tensor | None,
    weight_dtype: str,
    weight_axis: int | None,
    scale: Tensor | None,
    dtype: str,
    zero_point: Tensor | None,
    projection_scale: Tensor | None,
    projected_scale: Tensor | None,
    projected_zero_point: Tensor | None,
    backward: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the hidden states [T, B, P] of all steps, and both states after the last step.

    Args:
        kind: the cell, of ``CELLS``.
        given: [T, B, G], the inputs multiplied by their weight, with bias.
        hidden: [B, P], the hidden state before the first step.
        cell: [B, H], the cell state; the hidden state if the cell has none.
        weight: [G, P], integers with a ``weight_scale``, otherwise floats.
        bias: [G], the recurrent bias.
        projection: [P, H], by which hidden states are multiplied; integers with a ``projection_scale``.
        weight_scale: [] or [G] along ``weight_axis``.
        weight_dtype: the format of the weights.
        weight_axis: 0 or None.
        scale: [], of the hidden state; None: it is not rounded.
        dtype: its format.
        zero_point: [], its zero point.
        projection_scale: [] or [P], as ``weight_scale``; format and axis are those of the weight.
        projected_scale: [], of the input of the projection; None: it is not rounded. Its format is that of the hidden
            state.
        projected_zero_point: [], its zero point.
        backward: run from the last step to the first.
    """
    if weight_scale is not None:
        weight = dequantize(weight, weight_scale, weight_dtype, weight_axis)
    if projection is not None and projection_scale is not None:
        projection = dequantize(projection, projection_scale, weight_dtype, weight_axis)

    def rounded(state: Tensor, scale: Tensor | None, zero_point: Tensor | None) -> Tensor:
        return state if scale is None else fake_quantize(state, scale, dtype, None, None, zero_point)

    def recurrent(state: Tensor) -> Tensor:
        return functional.linear(rounded(state, scale, zero_point), weight, bias)

    def projected(state: Tensor) -> Tensor:
        assert projection is not None
        return functional.linear(rounded(state, projected_scale, projected_zero_point), projection)

    project = None if projection is None else projected
    return _apart(*steps(kind, given, (hidden, cell), recurrent, project, backward=backward))


@recurrence.register_fake
def _(kind: str, given: Tensor, hidden: Tensor, cell: Tensor, *others: object) -> tuple[Tensor, Tensor, Tensor]:
    outputs = given.new_empty(given.shape[0], *hidden.shape)
    return outputs, torch.empty_like(hidden), torch.empty_like(cell)


@torch.library.custom_op("quantizer::dynamic_lstm", mutates_args=())
def dynamic_lstm(
    x: Tensor,
    hidden: Tensor,
    cell: Tensor,
    input_codes: Tensor,
    input_scale: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    backward: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of ``recurrence`` for an LSTM whose inputs and states have dynamic ranges in UINT8.

    Args:
        x: [T, B, I], which has one range.
        hidden: [B, H], which has one range in each step.
        cell: [B, H].
        input_codes: int8 [4 H, I], the quantized input weight.
        input_scale: [4 H].
        codes: int8 [4 H, H], the quantized recurrent weight.
        scale: [4 H].
        bias: [8 H], the input bias and then the recurrent bias.
        backward: run from the last step to the first.
    """
    input_bias, recurrent_bias = (None, None) if bias is None else bias.chunk(2)
    inputs = functional.linear(fake_quantize_dynamic(x), dequantize(input_codes, input_scale, "int8", 0), input_bias)
    weight = dequantize(codes, scale, "int8", 0)

    def recurrent(state: Tensor) -> Tensor:
        return functional.linear(fake_quantize_dynamic(state), weight, recurrent_bias)

    return _apart(*steps("lstm", inputs, (hidden, cell), recurrent, None, backward=backward))


@dynamic_lstm.register_fake
def _(x: Tensor, hidden: Tensor, cell: Tensor, *others: object) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape[0], *hidden.shape), torch.empty_like(hidden), torch.empty_like(cell)
