"""Operators that reduce axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quantizer.engines.torch_engine.onnx_import.graph_builder import GraphBuilder, OnnxNode, Sizes, Value, operators

aten = torch.ops.aten

_REDUCTIONS = {
    "ReduceMax": aten.amax.default,
    "ReduceMean": aten.mean.dim,
    "ReduceMin": aten.amin.default,
    "ReduceSum": aten.sum.dim_IntList,
}


def _axes(build: GraphBuilder, node: OnnxNode) -> list[int] | None:
    if node.input(1) is not None:
        return build.needed_sizes(node, 1)
    found: list[int] | None = node.attributes.get("axes")
    return found


def _axes_to_reduce(build: GraphBuilder, node: OnnxNode) -> list[int] | None:
    """Return the axes of a reduction that is more than a sum of values; None: all."""
    axes = _axes(build, node) or None
    if node.attributes.get("noop_with_empty_axes", 0) and axes is None:
        raise node.fault("a reduction of no axis is not supported")
    return axes


def _reduction(target: Any) -> Callable[[GraphBuilder, OnnxNode], Value]:
    def translate(build: GraphBuilder, node: OnnxNode) -> Value:
        axes = _axes(build, node)
        given, kept = build.tensor(node.inputs[0]), bool(node.attributes.get("keepdims", 1))
        if node.attributes.get("noop_with_empty_axes", 0) and not axes:
            return given
        return build.call(target, given, list(axes or ()), kept)

    return translate


for _name, _target in _REDUCTIONS.items():
    operators.add(_name)(_reduction(_target))


def _norm(order: int) -> Callable[[GraphBuilder, OnnxNode], Value]:
    def translate(build: GraphBuilder, node: OnnxNode) -> Value:
        axes, kept = _axes_to_reduce(build, node), bool(node.attributes.get("keepdims", 1))
        return build.call(aten.linalg_vector_norm.default, build.tensor(node.inputs[0]), order, axes, kept)

    return translate


operators.add("ReduceL1")(_norm(1))
operators.add("ReduceL2")(_norm(2))


@operators.add("ReduceSumSquare")
def _reduce_sum_square(build: GraphBuilder, node: OnnxNode) -> Value:
    squares = build.call(aten.square.default, build.tensor(node.inputs[0]))
    axes, kept = _axes_to_reduce(build, node), bool(node.attributes.get("keepdims", 1))
    return build.call(aten.sum.dim_IntList, squares, axes, kept)


@operators.add("ReduceLogSumExp")
def _reduce_log_sum_exp(build: GraphBuilder, node: OnnxNode) -> Value:
    axes, kept = _axes_to_reduce(build, node), bool(node.attributes.get("keepdims", 1))
    if axes is None:
        raise node.fault("a reduction without axes is not supported; state its axes")
    return build.call(aten.logsumexp.default, build.tensor(node.inputs[0]), axes, kept)


@operators.add("ReduceProd")
def _reduce_prod(build: GraphBuilder, node: OnnxNode) -> Value:
    given, axes = node.inputs[0], _axes_to_reduce(build, node)
    if isinstance(given, Sizes):
        return _product_of_sizes(build, given, bool(node.attributes.get("keepdims", 1)))
    if axes is None or len(axes) != 1:
        raise node.fault("a product over several axes is not supported")
    return build.call(aten.prod.dim_int, build.tensor(given), axes[0], bool(node.attributes.get("keepdims", 1)))


def _product_of_sizes(build: GraphBuilder, given: Sizes, kept: bool) -> Sizes:
    import operator

    product: Any = 1
    for item in given.items:
        whole = isinstance(product, int) and isinstance(item, int)
        product = product * item if whole else build.call(operator.mul, product, item)
    return Sizes((product,), alone=not kept)


def _place(target: Any) -> Callable[[GraphBuilder, OnnxNode], Value]:
    def translate(build: GraphBuilder, node: OnnxNode) -> Value:
        axis, kept = node.attributes.get("axis", 0), bool(node.attributes.get("keepdims", 1))
        return build.call(target, build.tensor(node.inputs[0]), axis, kept)

    return translate


operators.add("ArgMax")(_place(aten.argmax.default))
operators.add("ArgMin")(_place(aten.argmin.default))


@operators.add("CumSum")
def _cumsum(build: GraphBuilder, node: OnnxNode) -> Value:
    if node.attributes.get("exclusive", 0) or node.attributes.get("reverse", 0):
        raise node.fault("an exclusive or reversed sum is not supported")
    return build.call(aten.cumsum.default, build.tensor(node.inputs[0]), build.needed_sizes(node, 1)[0])


def _global_pool(target: Any) -> Callable[[GraphBuilder, OnnxNode], Value]:
    def translate(build: GraphBuilder, node: OnnxNode) -> Value:
        rank = node.ranks[0]
        if rank is None:
            raise node.fault("the rank of its input is not known; export the model again")
        return build.call(target, build.tensor(node.inputs[0]), list(range(2, rank)), True)

    return translate


operators.add("GlobalAveragePool")(_global_pool(aten.mean.dim))
operators.add("GlobalMaxPool")(_global_pool(aten.amax.default))
