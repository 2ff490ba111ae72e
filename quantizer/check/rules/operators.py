"""Rules of the file: ``onnx.checker``, external data, opsets, foreign operators, and sizes too small to gain."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from quantizer.check.checked_file import Fault, Subject, rules
from quantizer.export.qdq.graph import (
    HALVES,
    attribute,
    element,
    format_name,
    is_dequantize,
    is_quantize,
    name_of,
    shape,
)
from quantizer.export.qdq.operand import Operand
from quantizer.numerics.formats import FP8, INT4, QTYPES

_ONNX = ("", "ai.onnx")
_WORDS = ("QLinear", "Integer", "Quantize", "QGemm", "QAttention")


def is_quantized_operator(node: Any) -> bool:
    """Return whether a node computes with quantized values, or quantizes other than with ONNX's Q/DQ."""
    plain = is_quantize(node) or is_dequantize(node)  # every target reads the Q and DQ of com.microsoft
    return not plain and any(word in node.op_type for word in _WORDS)


@rules.add("foreign-operator")
def foreign_operator(subject: Subject) -> Iterator[Fault]:
    """Express low precision with ONNX's QuantizeLinear and DequantizeLinear, or with operators that the target runs."""
    nodes: dict[tuple[str, str], list[Any]] = {}
    for node in filter(is_quantized_operator, subject.nodes):
        foreign = node.domain not in (*_ONNX, *subject.limits.own_domains)
        if foreign or node.op_type in subject.limits.refused:
            nodes.setdefault((node.domain, node.op_type), []).append(node)
    for (domain, kind), nodes_of_kind in nodes.items():
        operator = kind if domain in _ONNX else f"{domain}.{kind}"
        problem = f"{subject.target.name} does not read {operator} ({len(nodes_of_kind)} in the file)"
        yield Fault(
            name_of(nodes_of_kind[0]), problem, "quantize in the QDQ format: QuantizeLinear and DequantizeLinear"
        )


_HALF_SCALES, _BLOCKS = FP8.onnx_opset, INT4.onnx_opset


@rules.add("opset-range")
def opset_range(subject: Subject) -> Iterator[Fault]:
    """Use an opset that the target's parser reads."""
    if subject.limits.opsets is None:
        return
    first, last = subject.limits.opsets
    if not first <= subject.opset <= last:
        problem = f"{subject.target.name} does not read opset {subject.opset}, only opsets {first} to {last}"
        yield Fault("", problem, f"export with opset {subject.target.opset}")


@rules.add("opset-format")
def opset_format(subject: Subject) -> Iterator[Fault]:
    """Use opset 19 for half-precision scales and FP8, and opset 21 for INT4 and blocks."""
    unsupported: dict[tuple[str, int], list[Any]] = {}
    for node in subject.sources:
        for feature, needed in _features(node):
            if subject.opset < needed:
                unsupported.setdefault((feature, needed), []).append(node)
    for (feature, needed), nodes in unsupported.items():
        problem = f"{feature} ({len(nodes)} in the file) needs opset {needed}, but the file has opset {subject.opset}"
        yield Fault(name_of(nodes[0]), problem, f"export with opset {max(needed, subject.target.opset)}")


def _features(node: Any) -> Iterator[tuple[str, int]]:
    """Yield each feature that a Q or DQ node uses, and the first opset with that feature."""
    name = format_name(node)
    if name in QTYPES:
        yield name.upper(), QTYPES[name].onnx_opset
    if element(node.inputs[1]) in HALVES:
        yield f"a scale in {element(node.inputs[1])}", _HALF_SCALES
    if attribute(node, "block_size", 0):
        yield "a scale per block", _BLOCKS


_ADVICE = "keep this operation in float"
_Size = int | None


@rules.add("small-product")
def small_product(subject: Subject) -> Iterator[Fault]:
    """Keep a MatMul with a small K or N in float."""
    enough = subject.target.min_gemm_dim or 1  # an unknown size counts as large enough
    for pair in _quantized(subject):
        _, k, n = _sizes(pair)
        reason = subject.target.gemm_reason(enough if k is None else k, enough if n is None else n)
        if reason is not None:
            yield Fault(name_of(pair[0].product), reason, _ADVICE)


@rules.add("matrix-vector")
def matrix_vector(subject: Subject) -> Iterator[Fault]:
    """Keep a matrix-vector multiplication in float."""
    enough = subject.target.min_gemm_dim or 1
    for pair in _quantized(subject):
        m, _, _ = _sizes(pair)
        reason = subject.target.gemm_reason(enough, enough, rows=m or 0)
        if reason is not None:
            yield Fault(name_of(pair[0].product), reason, _ADVICE)


def _quantized(subject: Subject) -> Iterator[tuple[Operand, Operand]]:
    return (pair for pair in subject.products if all(operand.quantized for operand in pair))


def _sizes(pair: tuple[Operand, Operand]) -> tuple[_Size, _Size, _Size]:
    """Return M, K and N of a matrix multiplication [M, K] x [K, N]; None for an unknown size."""
    node = pair[0].product
    left, right = (shape(node.inputs[operand.index]) for operand in pair)
    if node.op_type == "Conv":
        return None, _known_product(right[1:]) if right else None, right[0] if right else None
    if node.op_type == "ConvTranspose":
        return None, right[0] if right else None, _known_product(right[1:]) if right else None
    left = left[::-1] if left and attribute(node, "transA", 0) else left
    right = right[::-1] if right and attribute(node, "transB", 0) else right
    # With a weight, all batches form one GEMM; two activations are multiplied batch by batch.
    m = _known_product(left[:-1]) if left and pair[1].is_weight else (left[-2] if left and len(left) > 1 else None)
    k = left[-1] if left and left[-1] is not None else (right[-2] if right and len(right) > 1 else None)
    return m, k, right[-1] if right and len(right) > 1 else None


def _known_product(sizes: tuple[_Size, ...]) -> _Size:
    known = [size for size in sizes if size is not None]
    return prod(known) if len(known) == len(sizes) else None


@rules.add("onnx-checker")
def onnx_checker(subject: Subject) -> Iterator[Fault]:
    """Pass ONNX's own checker."""
    if not subject.refused_by_checker or any(opset_format(subject)):
        return  # the rule opset-format reports it more clearly
    yield Fault("", f"onnx.checker refuses the file: {subject.refused_by_checker}", "export it again")


@rules.add("external-data")
def external_data(subject: Subject) -> Iterator[Fault]:
    """Keep external data complete in the model's folder; data elsewhere is not opened."""
    for name, problem in subject.refused_data:
        yield Fault(name, problem, "put the data file beside the model, or export both again")
