"""ONNX translations of torch operators of this package: quantization, grouped matrix multiplications, recurrences.

Scale, input and output of a Q/DQ pair share one float type. ``QuantizeLinear`` always has a zero point, because it sets
the type of the quantized values. Ranges at run time become ``DynamicQuantizeLinear``.

torch stores INT4 values as int8, so a Cast converts between both; ``StoreWeights`` folds the Casts of weights. Symbols
are those of ``numerics/recurrence.py``. A Scan uses torch's gate order; ONNX's is input, output, forget, cell.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from quantizer.errors import ExportError
from quantizer.numerics.formats import BLOCKS_OPSET, INT8, QType, qtype
from quantizer.numerics.recurrence import CELLS

_INT64, _BOOL = 7, 9  # in ONNX's list of element types


def translations(opset: int) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the ``custom_translation_table`` of ``torch.onnx.export``."""
    spelling = _Spelling(opset)

    def fake_quantize(
        x: Any,
        scale: Any,
        dtype: str = "int8",
        axis: int | None = None,
        block_size: int | None = None,
        zero_point: Any = None,
    ) -> Any:
        kind, where = spelling.format(dtype, axis, block_size)
        wide, wide_scale = spelling.in_one_type(x, scale)
        zero = spelling.zeros(scale, kind) if zero_point is None else zero_point
        codes = spelling.op.QuantizeLinear(wide, wide_scale, zero, **where)
        return spelling.like(x, spelling.op.DequantizeLinear(codes, wide_scale, zero_point, **where), wide)

    def quantize(
        x: Any,
        scale: Any,
        dtype: str = "int8",
        axis: int | None = None,
        block_size: int | None = None,
        zero_point: Any = None,
    ) -> Any:
        kind, where = spelling.format(dtype, axis, block_size)
        zero = spelling.zeros(scale, kind) if zero_point is None else zero_point
        codes = spelling.op.QuantizeLinear(*spelling.in_one_type(x, scale), zero, **where)
        return spelling.op.Cast(codes, to=_element(INT8)) if kind.is_packed else codes

    def dequantize(
        q: Any,
        scale: Any,
        dtype: str = "int8",
        axis: int | None = None,
        block_size: int | None = None,
        zero_point: Any = None,
    ) -> Any:
        kind, where = spelling.format(dtype, axis, block_size)
        codes = spelling.op.Cast(q, to=_element(kind)) if kind.is_packed else q
        wide, _ = spelling.in_one_type(scale, scale)
        return spelling.like(scale, spelling.op.DequantizeLinear(codes, wide, zero_point, **where), wide)

    def fake_quantize_dynamic(x: Any, dtype: str = "uint8", block_size: int | None = None) -> Any:
        # The engine quantizes blocks of activations itself; the file only stores the weight.
        return spelling.op.Identity(x) if block_size is not None else spelling.rounded_at_run_time(x)

    def is_all_true(x: Any) -> Any:
        # Of torch._check_tensor_all, whose check is no part of the file.
        return spelling.op.Cast(spelling.op.ReduceMin(spelling.op.Cast(x, to=_INT64), keepdims=0), to=_BOOL)

    operators = torch.ops.quantizer
    # transformers calls this operator during tracing outside of quantization sites.
    transformers_op = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    return {
        **({} if transformers_op is None else {transformers_op.default: _grouped_mm_translation(spelling)}),
        torch.ops.aten._is_all_true.default: is_all_true,
        operators.grouped_mm.default: _grouped_mm_translation(spelling),
        operators.fake_quantize.default: fake_quantize,
        operators.fake_quantize_dynamic.default: fake_quantize_dynamic,
        operators.quantize.default: quantize,
        operators.dequantize.default: dequantize,
        **recurrence_translations(spelling.op, lambda scale, dtype: spelling.zeros(scale, qtype(dtype))),
    }


class _Spelling:
    """Nodes that several translations share, for one opset.

    ``where`` holds the attributes ``axis`` and ``block_size`` of QuantizeLinear and DequantizeLinear.
    """

    def __init__(self, opset: int) -> None:
        import onnxscript

        self.opset = opset
        self.op: Any = onnxscript.values.Opset("", opset)

    def format(self, dtype: str, axis: int | None, block_size: int | None) -> tuple[QType, dict[str, int]]:
        """Return the format, and the attributes ``where``."""
        kind, where = qtype(dtype), {}
        if self.opset < kind.onnx_opset:
            raise ExportError(f"opset={self.opset}: {dtype} needs opset {kind.onnx_opset} or later")
        if axis is not None:
            where["axis"] = axis
        if block_size is not None:
            if self.opset < BLOCKS_OPSET:
                raise ExportError(f"opset={self.opset}: a scale per block needs opset {BLOCKS_OPSET} or later")
            where["block_size"] = block_size
        return kind, where

    def in_one_type(self, x: Any, scale: Any) -> tuple[Any, Any]:
        """Return both values, cast to float32 if their types differ or ``QuantizeLinear`` does not accept them."""
        import onnx_ir

        if x.dtype == scale.dtype != onnx_ir.DataType.DOUBLE:
            return x, scale
        return tuple(
            value if value.dtype == onnx_ir.DataType.FLOAT else self.op.Cast(value, to=onnx_ir.DataType.FLOAT)
            for value in (x, scale)
        )

    def like(self, original: Any, result: Any, wide: Any) -> Any:
        """Return the result, cast to the type of ``original`` if ``wide`` is a cast of it."""
        return result if wide is original else self.op.Cast(result, to=original.dtype)

    def rounded_at_run_time(self, x: Any) -> Any:
        """Return x quantized and dequantized with a range from its values; the scale is float32."""
        import onnx_ir

        wide = x if x.dtype == onnx_ir.DataType.FLOAT else self.op.Cast(x, to=onnx_ir.DataType.FLOAT)
        return self.like(x, self.op.DequantizeLinear(*self.op.DynamicQuantizeLinear(wide)), wide)

    def grouped_product(self, rows: Any, experts: Any, ends: Any) -> Any:
        """Return [S, N]: rows [S, K] grouped by expert, each group times its matrix of [E, K, N]."""
        op, first = self.op, self.numbers([0])
        start, products = first, []
        plain, again = self._before_rounding(rows)
        for number in range(experts.shape[0]):
            end = op.Cast(op.Slice(ends, self.numbers([number]), self.numbers([number + 1]), first), to=_INT64)
            matrix = op.Gather(experts, op.Squeeze(self.numbers([number]), first), axis=0)
            products.append(op.MatMul(again(op.Slice(plain, start, end, first)), matrix))
            start = end
        return op.Concat(*products, axis=0)

    def _before_rounding(self, value: Any) -> tuple[Any, Callable[[Any], Any]]:
        """Return the value before its Q/DQ pair with one scale, and a function that applies the pair again.

        MatMul must read the DequantizeLinear directly. Other values are returned unchanged.
        """
        dequantize: Any = value.producer()
        quantize: Any = dequantize.inputs[0].producer() if _is(dequantize, "DequantizeLinear") else None
        if not _is(quantize, "QuantizeLinear") or len(quantize.inputs[1].shape):
            return value, lambda part: part

        def again(part: Any) -> Any:
            codes = self.op.QuantizeLinear(part, *quantize.inputs[1:])
            return self.op.DequantizeLinear(codes, *dequantize.inputs[1:])

        return quantize.inputs[0], again

    def numbers(self, values: list[int]) -> Any:
        """Return an INT64 constant."""
        import onnx

        return self.op.Constant(value=onnx.helper.make_tensor("numbers", _INT64, [len(values)], values))

    def zeros(self, scale: Any, kind: QType) -> Any:
        """Return zeros of a format in the shape of the scale: a constant if the shape is known."""
        import onnx

        if not scale.shape.is_static():
            # ONNX Runtime 1.31 has no ConstantOfShape for FP8 and INT4.
            return self.op.Cast(self.op.Sub(scale, scale), to=_element(kind))
        shape = scale.shape.numpy()
        raw = bytes(-(-math.prod(shape) * kind.bits // 8))
        return self.op.Constant(value=onnx.helper.make_tensor("zero", _element(kind), shape, raw, raw=True))


def _grouped_mm_translation(spelling: _Spelling) -> Callable[..., Any]:
    """Return the translation of a grouped matrix multiplication; the exporter accepts functions, not methods."""

    def grouped_mm(rows: Any, experts: Any, ends: Any) -> Any:
        return spelling.grouped_product(rows, experts, ends)

    return grouped_mm


def _is(node: Any, operator: str) -> bool:
    return node is not None and node.op_type == operator


def _element(kind: QType) -> int:
    """Return the ``TensorProto.DataType`` of a format."""
    import onnx

    number: int = onnx.TensorProto.DataType.Value(kind.onnx_type)
    return number


_GATES = CELLS["lstm"].gates
_MICROSOFT = "com.microsoft"


def recurrence_translations(op: Any, zeros: Callable[[Any, str], Any]) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the entries of recurrences for ``custom_translation_table``.

    Args:
        op: the ONNX opset.
        zeros: function that returns zero points of a format in the shape of a scale.
    """

    operators = torch.ops.quantizer
    names = [argument.name for argument in operators.recurrence.default._schema.arguments]

    def recurrence(*values: Any) -> Any:
        arguments = dict(zip(names, values, strict=True))
        kind = arguments["kind"]
        for scale, zero in (("scale", "zero_point"), ("projected_scale", "projected_zero_point")):
            if arguments[scale] is not None and arguments[zero] is None:
                arguments[zero] = zeros(arguments[scale], arguments["dtype"])
        states = [arguments["hidden"], arguments["cell"]][: 1 + CELLS[kind].has_cell]
        return _scan(kind, arguments["given"], states, arguments)

    def dynamic_lstm(*values: Any) -> Any:
        return _dynamic_lstm(op, zeros, *values)

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
    """Return the outputs and states of a DynamicQuantizeLSTM, from arguments of ``numerics.recurrence``."""
    first = op.Constant(value_ints=[0])
    units, weights = codes.shape[1], []
    for values, factor in ((input_codes, input_scale), (codes, scale)):
        turned = op.Transpose(_in_onnx_order(op, values, units), perm=[1, 0])
        weights.append((op.Unsqueeze(turned, first), op.Unsqueeze(_in_onnx_order(op, factor, units), first)))
    (input_weight, input_weight_scale), (recurrent_weight, recurrent_scale) = weights
    zero = op.Unsqueeze(zeros(scale, "int8"), first)
    both = None
    if bias is not None:
        halves = _parts(op, bias, 2, _GATES * units)
        both = op.Unsqueeze(op.Concat(*(_in_onnx_order(op, half, units) for half in halves), axis=0), first)
    states = [op.Unsqueeze(state, first) for state in (hidden, cell)]
    outputs, last, last_cell = _nodes(
        "DynamicQuantizeLSTM",
        x,
        input_weight,
        recurrent_weight,
        both,
        None,
        *states,
        None,
        input_weight_scale,
        zero,
        recurrent_scale,
        zero,
        hidden_size=units,
        direction="reverse" if backward else "forward",
        outputs=3,
        domain=_MICROSOFT,
    )
    second = op.Constant(value_ints=[1])
    return op.Squeeze(outputs, second), op.Squeeze(last, first), op.Squeeze(last_cell, first)


def _parts(op: Any, values: Any, count: int, size: int) -> list[Any]:
    """Return ``count`` slices of ``size`` along axis 0; the optimizer does not fold Split."""
    ends = [op.Constant(value_ints=[place * size]) for place in range(count + 1)]
    axis = op.Constant(value_ints=[0])
    return [op.Slice(values, ends[place], ends[place + 1], axis) for place in range(count)]


def _in_onnx_order(op: Any, values: Any, units: int) -> Any:
    """Return values [4 H, ...] of gates input, forget, cell, output in ONNX's order; H is ``units``."""
    admit, forget, new, output = _parts(op, values, _GATES, units)
    return op.Concat(admit, output, forget, new, axis=0)


def _nodes(operator: str, *inputs: Any, outputs: int, domain: str = "", **attributes: Any) -> Any:
    """Add a node with several outputs to the recorded graph, which ``onnxscript`` only does for known operators."""
    import onnx_ir
    from onnxscript import evaluator

    node = onnx_ir.node(operator, inputs, attributes=attributes, domain=domain, num_outputs=outputs)
    recorder: Any = evaluator.default()
    recorder.nodes.append(node)
    return node.outputs


def _scan(kind: str, given: Any, states: list[Any], arguments: dict[str, Any]) -> Any:
    """Return the outputs of a Scan over ``given`` and two states after it."""
    import onnx_ir

    body = _Body(kind, given, states, arguments)
    backward = [int(arguments["backward"])]
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
    """Graph of one time step."""

    def __init__(self, kind: str, given: Any, states: list[Any], arguments: dict[str, Any]) -> None:
        import onnx_ir

        self.nodes: list[Any] = []
        self._kind = kind
        self._arguments = arguments
        self.inputs = [
            onnx_ir.Value(name=f"{kind}_state_{place}", shape=state.shape, type=onnx_ir.TensorType(state.dtype))
            for place, state in enumerate(states)
        ]
        shape, of = onnx_ir.Shape(given.shape[1:]), onnx_ir.TensorType(given.dtype)
        self.inputs.append(onnx_ir.Value(name=f"{kind}_given", shape=shape, type=of))

    def outputs(self) -> list[Any]:
        """Return the states after the step, and the hidden state again as the output of the step."""
        arguments = self._arguments
        hidden, given, cell = self.inputs[0], self.inputs[-1], self.inputs[-2]
        recurrent = self._product(hidden, "scale", "zero_point", "weight", "weight_scale")
        if arguments["bias"] is not None:
            recurrent = self._add("Add", recurrent, arguments["bias"])
        state = {"lstm": self._lstm, "gru": self._gru}.get(self._kind, self._plain)(given, recurrent, cell)
        if arguments["projection"] is not None:
            state[0] = self._product(
                state[0], "projected_scale", "projected_zero_point", "projection", "projection_scale"
            )
        results = [*state, self._add("Identity", state[0])]
        for value, like in zip(results, [*self.inputs[:-1], self.inputs[0]], strict=True):
            value.shape, value.type = like.shape, like.type
        return results

    def _add(self, operator: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        import onnx_ir

        node = onnx_ir.node(operator, inputs, attributes=attributes, num_outputs=outputs)
        self.nodes.append(node)
        return node.outputs[0] if outputs == 1 else node.outputs

    def _product(self, x: Any, scale: str, zero_point: str, weight: str, weight_scale: str) -> Any:
        """Return the MatMul of a quantized operand and a stored weight [N, K]."""
        arguments = self._arguments
        codes = self._add("QuantizeLinear", x, arguments[scale], arguments[zero_point])
        rounded = self._add("DequantizeLinear", codes, arguments[scale], arguments[zero_point])
        where = {} if arguments["weight_axis"] is None else {"axis": arguments["weight_axis"]}
        values = self._add("DequantizeLinear", arguments[weight], arguments[weight_scale], **where)
        return self._add("MatMul", rounded, self._add("Transpose", values, perm=[1, 0]))

    def _split(self, value: Any, parts: int) -> Any:
        return self._add("Split", value, outputs=parts, axis=-1, num_outputs=parts)

    def _lstm(self, given: Any, recurrent: Any, cell: Any) -> list[Any]:
        admit, forget, new, output = self._split(self._add("Add", given, recurrent), 4)
        old = self._add("Mul", self._add("Sigmoid", forget), cell)
        added = self._add("Mul", self._add("Sigmoid", admit), self._add("Tanh", new))
        cell = self._add("Add", old, added)
        return [self._add("Mul", self._add("Sigmoid", output), self._add("Tanh", cell)), cell]

    def _gru(self, given: Any, recurrent: Any, hidden: Any) -> list[Any]:
        given_reset, given_update, given_new = self._split(given, 3)
        reset, update, new = self._split(recurrent, 3)
        opened = self._add("Sigmoid", self._add("Add", given_reset, reset))
        candidate = self._add("Tanh", self._add("Add", given_new, self._add("Mul", opened, new)))
        old = self._add("Sigmoid", self._add("Add", given_update, update))
        return [self._add("Add", candidate, self._add("Mul", old, self._add("Sub", hidden, candidate)))]

    def _plain(self, given: Any, recurrent: Any, hidden: Any) -> list[Any]:
        total = self._add("Add", given, recurrent)
        return [self._add("Tanh" if self._kind == "rnn_tanh" else "Relu", total)]
