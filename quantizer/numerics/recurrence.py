"""Recurrent cells, and the torch operators that a file of a recurrence is made of.

Legend: T steps, B rows, I inputs, H hidden units; P the size of the hidden state, which is H unless it is projected;
G = the cell's ``gates`` times H. Weights and their order of gates are torch's: input, forget, cell, output of an LSTM;
reset, update, new of a GRU.

A loop over steps has no graph if T is open, and a large one if T is large. So the two operators stand for the whole
loop while a model is recorded: ``recurrence`` becomes a Scan whose body has the Q/DQ pairs, ``dynamic_lstm`` the
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
        gates: how many times H values its products give.
        has_cell: whether it has a second state besides the hidden one.
        next: the two states [B, H] after a step, of the products with input and hidden state [B, G], biases included,
            and of the two states before; without a second state it is the first once more.
    """

    gates: int
    has_cell: bool
    next: _Next


def _lstm(given: Tensor, recurrent: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    admit, forget, new, output = (given + recurrent).chunk(4, -1)
    cell = forget.sigmoid() * cell + admit.sigmoid() * new.tanh()
    return output.sigmoid() * cell.tanh(), cell


def _gru(given: Tensor, recurrent: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    given_reset, given_update, given_new = given.chunk(3, -1)
    reset, update, new = recurrent.chunk(3, -1)
    candidate = (given_new + (given_reset + reset).sigmoid() * new).tanh()
    hidden = candidate + (given_update + update).sigmoid() * (hidden - candidate)
    return hidden, hidden


def _tanh(given: Tensor, recurrent: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    hidden = (given + recurrent).tanh()
    return hidden, hidden


def _relu(given: Tensor, recurrent: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    hidden = (given + recurrent).relu()
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
    """Return the hidden states [T, B, P] of all steps, and both states after the last.

    Args:
        kind: the cell, of ``CELLS``.
        given: [T, B, G], the products with the inputs, with their bias.
        states: hidden [B, P] and cell [B, H] before the first step; of a cell without a second state, twice the first.
        recurrent: gives the recurrent product [B, G] of a hidden state, with its bias.
        projected: gives the hidden state [B, P] of one [B, H]; None: there is no projection.
        backward: run from the last step to the first.
    """
    hidden, cell = states
    outputs = []
    for step in given.flip(0).unbind(0) if backward else given.unbind(0):
        hidden, cell = CELLS[kind].next(step, recurrent(hidden), hidden, cell)
        hidden = hidden if projected is None else projected(hidden)
        outputs.append(hidden)
    whole = torch.stack(outputs)
    return (whole.flip(0) if backward else whole), hidden, cell


def _apart(outputs: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return results of an operator, which may not return its inputs, nor one tensor twice."""
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
    """Return the hidden states [T, B, P] of all steps, and both states after the last.

    Args:
        kind: the cell, of ``CELLS``.
        given: [T, B, G], the products with the inputs, with their bias.
        hidden: [B, P], the hidden state before the first step.
        cell: [B, H], the second state; of a cell that has none, the hidden state.
        weight: [G, P], codes if there is a ``weight_scale``, else floats.
        bias: [G], of the recurrent product.
        projection: [P, H], by which hidden states are multiplied; codes if there is a ``projection_scale``.
        weight_scale: [] or [G] along ``weight_axis``.
        weight_dtype: the format of the codes.
        weight_axis: 0 or None.
        scale: [], of the hidden state; None: it is not rounded.
        dtype: its format.
        zero_point: [], its zero point.
        projection_scale: [] or [P], as ``weight_scale``; its codes have the format and axis of the weight's.
        projected_scale: [], of what is projected; None: it is not rounded. Its format is that of the hidden state.
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
    """Return what ``recurrence`` does, of an LSTM that takes the ranges of its inputs and states at run time, in UINT8.

    Args:
        x: [T, B, I], which has one range.
        hidden: [B, H], which has one range in each step.
        cell: [B, H].
        input_codes: int8 [4 H, I].
        input_scale: [4 H].
        codes: int8 [4 H, H].
        scale: [4 H].
        bias: [8 H], of the products with the input, then of the recurrent ones.
        backward: run from the last step to the first.
    """
    ours, theirs = (None, None) if bias is None else bias.chunk(2)
    given = functional.linear(fake_quantize_dynamic(x), dequantize(input_codes, input_scale, "int8", 0), ours)
    weight = dequantize(codes, scale, "int8", 0)

    def recurrent(state: Tensor) -> Tensor:
        return functional.linear(fake_quantize_dynamic(state), weight, theirs)

    return _apart(*steps("lstm", given, (hidden, cell), recurrent, None, backward=backward))


@dynamic_lstm.register_fake
def _(x: Tensor, hidden: Tensor, cell: Tensor, *others: object) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape[0], *hidden.shape), torch.empty_like(hidden), torch.empty_like(cell)
