"""Translations of our torch operators to ONNX.

The types are in the graph: scale, input and output of a Q/DQ pair share one float type. ``QuantizeLinear`` always has a
zero point, because its type is the type of the codes; ``DequantizeLinear`` has one if the format does.

An activation whose range is taken at run time has a ``DynamicQuantizeLinear`` in place of the ``QuantizeLinear``.

torch holds INT4 codes as int8: a Cast converts between the two. ``StoreWeights`` evaluates the Casts of weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from quantizer.errors import ExportError
from quantizer.export.recurrence_translations import recurrence_translations
from quantizer.numerics.qtype import BLOCKS_OPSET, INT8, QType, qtype
from quantizer.operations import grouped_product as _registers  # noqa: F401

_INT64 = 7  # in ONNX's list of element types


def translations(opset: int) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the table that ``torch.onnx.export`` takes as ``custom_translation_table``."""
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
        # Blocks are rounded by the engine itself: what it reads is a weight alone in codes.
        return spelling.op.Identity(x) if block_size is not None else spelling.rounded_at_run_time(x)

    operators = torch.ops.quantizer
    # What transformers calls while a graph is traced, where no site is.
    theirs = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    return {
        **({} if theirs is None else {theirs.default: _of_experts(spelling)}),
        operators.grouped_mm.default: _of_experts(spelling),
        operators.fake_quantize.default: fake_quantize,
        operators.fake_quantize_dynamic.default: fake_quantize_dynamic,
        operators.quantize.default: quantize,
        operators.dequantize.default: dequantize,
        **recurrence_translations(spelling.op, lambda scale, dtype: spelling.zeros(scale, qtype(dtype))),
    }


class _Spelling:
    """Common parts of the translations, for one opset.

    ``where`` are the attributes of both ONNX operators that say what the scale belongs to.
    """

    def __init__(self, opset: int) -> None:
        import onnxscript

        self.opset = opset
        self.op: Any = onnxscript.values.Opset("", opset)

    def format(self, dtype: str, axis: int | None, block_size: int | None) -> tuple[QType, dict[str, int]]:
        """Return the format, and ``where``."""
        kind, where = qtype(dtype), {}
        if self.opset < kind.onnx_opset:
            raise ExportError(f"opset={self.opset}: {dtype} needs opset {kind.onnx_opset} or later")
        if axis is not None:
            where["axis"] = axis
        if block_size is not None:
            if self.opset < BLOCKS_OPSET:
                raise ExportError(f"opset={self.opset}: scales of blocks need opset {BLOCKS_OPSET} or later")
            where["block_size"] = block_size
        return kind, where

    def in_one_type(self, x: Any, scale: Any) -> tuple[Any, Any]:
        """Return both in float32 if they differ, or if ``QuantizeLinear`` does not take their type."""
        import onnx_ir

        if x.dtype == scale.dtype != onnx_ir.DataType.DOUBLE:
            return x, scale
        return tuple(
            value if value.dtype == onnx_ir.DataType.FLOAT else self.op.Cast(value, to=onnx_ir.DataType.FLOAT)
            for value in (x, scale)
        )

    def like(self, original: Any, result: Any, wide: Any) -> Any:
        """Return the result in the type that ``original`` had before it became ``wide``."""
        return result if wide is original else self.op.Cast(result, to=original.dtype)

    def rounded_at_run_time(self, x: Any) -> Any:
        """Return x rounded with its own range, whose scale is always float32."""
        import onnx_ir

        wide = x if x.dtype == onnx_ir.DataType.FLOAT else self.op.Cast(x, to=onnx_ir.DataType.FLOAT)
        return self.like(x, self.op.DequantizeLinear(*self.op.DynamicQuantizeLinear(wide)), wide)

    def grouped_product(self, rows: Any, experts: Any, ends: Any) -> Any:
        """Return [S, N], the rows [S, K] of each expert multiplied by its matrix of [E, K, N], one after the other."""
        op, first = self.op, self.numbers([0])
        start, made = first, []
        plain, again = self._before_rounding(rows)
        for number in range(experts.shape[0]):
            end = op.Cast(op.Slice(ends, self.numbers([number]), self.numbers([number + 1]), first), to=_INT64)
            matrix = op.Gather(experts, op.Squeeze(self.numbers([number]), first), axis=0)
            made.append(op.MatMul(again(op.Slice(plain, start, end, first)), matrix))
            start = end
        return op.Concat(*made, axis=0)

    def _before_rounding(self, value: Any) -> tuple[Any, Callable[[Any], Any]]:
        """Return what was rounded with one scale, and what rounds a part of it alike: a product reads its DQ itself.

        A value that is not rounded, or by its own range, is returned as it is.
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
        """Return whole numbers as a constant."""
        import onnx

        return self.op.Constant(value=onnx.helper.make_tensor("numbers", _INT64, [len(values)], values))

    def zeros(self, scale: Any, kind: QType) -> Any:
        """Return zero points of a format, of the scale's shape: a constant if the shape is known."""
        import onnx

        if not scale.shape.is_static():
            # Not ConstantOfShape, which ONNX Runtime 1.31 has for neither FP8 nor INT4.
            return self.op.Cast(self.op.Sub(scale, scale), to=_element(kind))
        shape = scale.shape.numpy()
        raw = bytes(-(-math.prod(shape) * kind.bits // 8))
        return self.op.Constant(value=onnx.helper.make_tensor("zero", _element(kind), shape, raw, raw=True))


def _of_experts(spelling: _Spelling) -> Callable[..., Any]:
    """Return the translation of a grouped product: the exporter takes functions, and no methods."""

    def grouped_mm(rows: Any, experts: Any, ends: Any) -> Any:
        return spelling.grouped_product(rows, experts, ends)

    return grouped_mm


def _is(node: Any, operator: str) -> bool:
    """Return whether a node, or None, is of an operator."""
    return node is not None and node.op_type == operator


def _element(kind: QType) -> int:
    """Return the number of a format in ONNX's list of element types."""
    import onnx

    number: int = onnx.TensorProto.DataType.Value(kind.onnx_type)
    return number
