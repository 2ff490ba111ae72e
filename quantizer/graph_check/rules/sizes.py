"""Rules of products that are slower in low precision: small ones, and those of a matrix and a vector."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from quantizer.graph_check.finding import Fault
from quantizer.graph_check.rule import rules
from quantizer.graph_check.subject import Subject
from quantizer.qdq.graph import attribute, name_of, shape
from quantizer.qdq.operand import Operand

_ADVICE = "leave the product float"
_Size = int | None


@rules.add("small-product")
def small_product(subject: Subject) -> Iterator[Fault]:
    """Keep a product with a small K or N in float."""
    enough = subject.target.min_gemm_dim or 1  # an unknown size counts as large enough
    for pair in _quantized(subject):
        _, k, n = _sizes(pair)
        reason = subject.target.gemm_reason(enough if k is None else k, enough if n is None else n)
        if reason is not None:
            yield Fault(name_of(pair[0].product), reason, _ADVICE)


@rules.add("matrix-vector")
def matrix_vector(subject: Subject) -> Iterator[Fault]:
    """Keep a product of a matrix and a vector in float."""
    enough = subject.target.min_gemm_dim or 1
    for pair in _quantized(subject):
        m, _, _ = _sizes(pair)
        reason = subject.target.gemm_reason(enough, enough, rows=m or 0)
        if reason is not None:
            yield Fault(name_of(pair[0].product), reason, _ADVICE)


def _quantized(subject: Subject) -> Iterator[tuple[Operand, Operand]]:
    return (pair for pair in subject.products if all(operand.quantized for operand in pair))


def _sizes(pair: tuple[Operand, Operand]) -> tuple[_Size, _Size, _Size]:
    """Return M, K and N of a product [M, K] by [K, N]; None for an unknown size."""
    node = pair[0].product
    left, right = (shape(node.inputs[operand.index]) for operand in pair)
    if node.op_type == "Conv":
        return None, _product(right[1:]) if right else None, right[0] if right else None
    if node.op_type == "ConvTranspose":
        return None, right[0] if right else None, _product(right[1:]) if right else None
    left = left[::-1] if left and attribute(node, "transA", 0) else left
    right = right[::-1] if right and attribute(node, "transB", 0) else right
    # A weight multiplies the rows of all batches in one GEMM; two activations are multiplied batch by batch.
    m = _product(left[:-1]) if left and pair[1].is_weight else (left[-2] if left and len(left) > 1 else None)
    k = left[-1] if left and left[-1] is not None else (right[-2] if right and len(right) > 1 else None)
    return m, k, right[-1] if right and len(right) > 1 else None


def _product(sizes: tuple[_Size, ...]) -> _Size:
    known = [size for size in sizes if size is not None]
    return prod(known) if len(known) == len(sizes) else None
