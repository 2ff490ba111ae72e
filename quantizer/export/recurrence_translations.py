"""Translations of recurrences to ONNX: a Scan whose body has the Q/DQ pairs, or ONNX Runtime's DynamicQuantizeLSTM.

Legend: as in ``numerics/recurrence.py``. Gates are in torch's order in a Scan, whose body is ours; those of ONNX are
input, output, forget, cell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quantizer.numerics.recurrence import CELLS

_GATES = CELLS["lstm"].gates
_OURS = "com.microsoft"


def recurrence_translations(op: Any, zeros: Callable[[Any, str], Any]) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the entries of recurrences for ``custom_translation_table``.

    Args:
        op: the opset of ONNX.
        zeros: gives the zero points of a format, of a scale's shape.
    """

    operators = torch.ops.quantizer
    names = [argument.name for argument in operators.recurrence.default._schema.arguments]

    def recurrence(*given: Any) -> Any:
        found = dict(zip(names, given, strict=True))
        kind = found["kind"]
        for scale, zero in (("scale", "zero_point"), ("projected_scale", "projected_zero_point")):
            if found[scale] is not None and found[zero] is None:
                found[zero] = zeros(found[scale], found["dtype"])
        states = [found["hidden"], found["cell"]][: 1 + CELLS[kind].has_cell]
        return _scan(kind, found["given"], states, found)

    def dynamic_lstm(*given: Any) -> Any:
        return _dynamic_lstm(op, zeros, *given)

    return {operators.recurrence.default: recurrence, operators.dynamic_lstm.default: dynamic_lstm}


def _dynamic_lstm(
    op: Any,
    zeros: Callable[[Any, str], Any],
    x: Any,
    hidden: Any,
    cell: Any,
    input_codes: Any,
    input_scale: Any,
    codes: Any,
    scale: Any,
    bias: Any,
    backward: bool,
) -> Any:
    """Return the outputs of a DynamicQuantizeLSTM and its states, of the arguments of ``numerics.recurrence``."""
    first = op.Constant(value_ints=[0])
    units, weights = codes.shape[1], []
    for values, factor in ((input_codes, input_scale), (codes, scale)):
        turned = op.Transpose(_in_order(op, values, units), perm=[1, 0])
        weights.append((op.Unsqueeze(turned, first), op.Unsqueeze(_in_order(op, factor, units), first)))
    (given, given_scale), (own, own_scale) = weights
    zero = op.Unsqueeze(zeros(scale, "int8"), first)
    both = None
    if bias is not None:
        halves = _parts(op, bias, 2, _GATES * units)
        both = op.Unsqueeze(op.Concat(*(_in_order(op, half, units) for half in halves), axis=0), first)
    states = [op.Unsqueeze(state, first) for state in (hidden, cell)]
    outputs, last, last_cell = _nodes(
        "DynamicQuantizeLSTM",
        x,
        given,
        own,
        both,
        None,
        *states,
        None,
        given_scale,
        zero,
        own_scale,
        zero,
        hidden_size=units,
        direction="reverse" if backward else "forward",
        outputs=3,
        domain=_OURS,
    )
    one = op.Constant(value_ints=[1])
    return op.Squeeze(outputs, one), op.Squeeze(last, first), op.Squeeze(last_cell, first)


def _parts(op: Any, values: Any, count: int, size: int) -> list[Any]:
    """Return parts of one size of values, along their first axis; not by Split, which the optimizer does not fold."""
    ends = [op.Constant(value_ints=[place * size]) for place in range(count + 1)]
    axis = op.Constant(value_ints=[0])
    return [op.Slice(values, ends[place], ends[place + 1], axis) for place in range(count)]


def _in_order(op: Any, values: Any, units: int) -> Any:
    """Return values [4 H, ...] of the gates input, forget, cell, output as input, output, forget, cell; H ``units``."""
    admit, forget, new, output = _parts(op, values, _GATES, units)
    return op.Concat(admit, output, forget, new, axis=0)


def _nodes(operator: str, *inputs: Any, outputs: int, domain: str = "", **attributes: Any) -> Any:
    """Add a node with several outputs to the graph that is recorded, which ``onnxscript`` does for its own alone."""
    import onnx_ir
    from onnxscript import evaluator

    node = onnx_ir.node(operator, inputs, attributes=attributes, domain=domain, num_outputs=outputs)
    recorder: Any = evaluator.default()
    recorder.nodes.append(node)
    return node.outputs


def _scan(kind: str, given: Any, states: list[Any], found: dict[str, Any]) -> Any:
    """Return the outputs of a Scan over ``given`` and the states after it, two of them in any case."""
    import onnx_ir

    body = _Body(kind, given, states, found)
    backward = [int(found["backward"])]
    *last, outputs = _nodes(
        "Scan",
        *states,
        given,
        body=onnx_ir.Graph(body.inputs, body.outputs(), nodes=body.nodes, name=f"{kind}_steps"),
        num_scan_inputs=1,
        scan_input_directions=backward,
        scan_output_directions=backward,
        outputs=len(states) + 1,
    )
    return outputs, last[0], last[-1]


class _Body:
    """The graph of one step."""

    def __init__(self, kind: str, given: Any, states: list[Any], found: dict[str, Any]) -> None:
        import onnx_ir

        self.nodes: list[Any] = []
        self._kind = kind
        self._found = found
        self.inputs = [
            onnx_ir.Value(name=f"{kind}_state_{place}", shape=state.shape, type=onnx_ir.TensorType(state.dtype))
            for place, state in enumerate(states)
        ]
        shape, of = onnx_ir.Shape(given.shape[1:]), onnx_ir.TensorType(given.dtype)
        self.inputs.append(onnx_ir.Value(name=f"{kind}_given", shape=shape, type=of))

    def outputs(self) -> list[Any]:
        """Return the states after the step, and the hidden state once more, for the outputs of all steps."""
        found = self._found
        hidden, given, cell = self.inputs[0], self.inputs[-1], self.inputs[-2]
        recurrent = self._product(hidden, "scale", "zero_point", "weight", "weight_scale")
        if found["bias"] is not None:
            recurrent = self._add("Add", recurrent, found["bias"])
        state = {"lstm": self._lstm, "gru": self._gru}.get(self._kind, self._plain)(given, recurrent, cell)
        if found["projection"] is not None:
            state[0] = self._product(
                state[0], "projected_scale", "projected_zero_point", "projection", "projection_scale"
            )
        made = [*state, self._add("Identity", state[0])]
        for value, like in zip(made, [*self.inputs[:-1], self.inputs[0]], strict=True):
            value.shape, value.type = like.shape, like.type
        return made

    def _add(self, operator: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        import onnx_ir

        node = onnx_ir.node(operator, inputs, attributes=attributes, num_outputs=outputs)
        self.nodes.append(node)
        return node.outputs[0] if outputs == 1 else node.outputs

    def _product(self, x: Any, scale: str, zero_point: str, weight: str, weight_scale: str) -> Any:
        """Return the product of an operand, rounded, and a stored weight [N, K]."""
        found = self._found
        codes = self._add("QuantizeLinear", x, found[scale], found[zero_point])
        rounded = self._add("DequantizeLinear", codes, found[scale], found[zero_point])
        where = {} if found["weight_axis"] is None else {"axis": found["weight_axis"]}
        values = self._add("DequantizeLinear", found[weight], found[weight_scale], **where)
        return self._add("MatMul", rounded, self._add("Transpose", values, perm=[1, 0]))

    def _split(self, value: Any, parts: int) -> Any:
        return self._add("Split", value, outputs=parts, axis=-1, num_outputs=parts)

    def _lstm(self, given: Any, recurrent: Any, cell: Any) -> list[Any]:
        admit, forget, new, output = self._split(self._add("Add", given, recurrent), 4)
        kept = self._add("Mul", self._add("Sigmoid", forget), cell)
        added = self._add("Mul", self._add("Sigmoid", admit), self._add("Tanh", new))
        cell = self._add("Add", kept, added)
        return [self._add("Mul", self._add("Sigmoid", output), self._add("Tanh", cell)), cell]

    def _gru(self, given: Any, recurrent: Any, hidden: Any) -> list[Any]:
        given_reset, given_update, given_new = self._split(given, 3)
        reset, update, new = self._split(recurrent, 3)
        opened = self._add("Sigmoid", self._add("Add", given_reset, reset))
        candidate = self._add("Tanh", self._add("Add", given_new, self._add("Mul", opened, new)))
        kept = self._add("Sigmoid", self._add("Add", given_update, update))
        return [self._add("Add", candidate, self._add("Mul", kept, self._add("Sub", hidden, candidate)))]

    def _plain(self, given: Any, recurrent: Any, hidden: Any) -> list[Any]:
        made = self._add("Add", given, recurrent)
        return [self._add("Tanh" if self._kind == "rnn_tanh" else "Relu", made)]
