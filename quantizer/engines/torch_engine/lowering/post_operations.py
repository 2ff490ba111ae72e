"""Passes that move what follows an integer product into its kernel: an activation, the residual add, the quantizer.

The kernel applies them to its accumulators, in the order add, activation, quantizer; the product is written once, and
where its reader is quantized as the codes that the reader takes.

Pass that gives a float attention to torch's fused kernel.

    softmax(q k^T c + mask) v = scaled_dot_product_attention(q, k, v, mask, scale=c)

Only products whose operands are floats: an attention in INT8 keeps its products.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from quantizer.engines.torch_engine.graph_file import LoweredGraph
from quantizer.engines.torch_engine.lowering.matching import (
    CONVOLUTION,
    LINEAR,
    LINEAR_ADD,
    aten,
    dequantize,
    is_call,
    number,
    only_reader,
    quantize,
    replace,
)

_OUTPUT: dict[Any, int] = {LINEAR: 7, CONVOLUTION: 11, LINEAR_ADD: 8}
"""Place of the output's scale among the arguments; zero point and type follow."""


@dataclass(frozen=True, slots=True)
class _Activation:
    """An activation as the kernels name it."""

    name: str
    scalars: tuple[float, ...] = ()
    algorithm: str = ""


def fuse_activations(module: LoweredGraph) -> int:
    """Fuse the activation that alone reads an integer product; return how many were."""
    found = 0
    for node in list(module.graph.nodes):
        reader = only_reader(node) if is_call(node, LINEAR, CONVOLUTION) and _is_plain(node) else None
        activation = None if reader is None else _activation(node, reader)
        if reader is not None and activation is not None:
            start = _OUTPUT[node.target] + 3
            node.args = (*node.args[:start], activation.name, list(activation.scalars), activation.algorithm)
            reader.replace_all_uses_with(node)
            module.graph.erase_node(reader)
            found += 1
    return found


def _is_plain(node: fx.Node) -> bool:
    """Return whether a product writes floats, with nothing fused."""
    start = _OUTPUT[node.target]
    return node.args[start + 2] is torch.float32 and node.args[start + 3] == "none"


def _activation(node: fx.Node, reader: fx.Node) -> _Activation | None:
    if is_call(reader, aten.relu.default):
        return _Activation("relu")
    if node.target is LINEAR:
        if is_call(reader, aten.gelu.default):
            return _Activation("gelu", algorithm=str(reader.kwargs.get("approximate", "none")))
        return None
    if is_call(reader, aten.clamp.default) and len(reader.args) == 3 and None not in reader.args:
        bounds: tuple[Any, ...] = reader.args[1:]
        return _Activation("hardtanh", tuple(map(float, bounds)))
    return _Activation("hardswish") if is_call(reader, aten.hardswish.default) else None


def fuse_residual_adds(module: LoweredGraph, shapes: Mapping[fx.Node, tuple[int, ...]]) -> int:
    """Fuse the add of floats that alone reads a linear; return how many were.

    Args:
        shapes: the shape of each node's result in a run; only equal shapes are added, without broadcasting.
    """
    found = 0
    for node in list(module.graph.nodes):
        reader = only_reader(node) if is_call(node, LINEAR) and _is_plain(node) else None
        if not is_call(reader, aten.add.Tensor) or len(reader.args) != 2:
            continue
        other = reader.args[1] if reader.args[0] is node else reader.args[0]
        if not isinstance(other, fx.Node) or other not in shapes or shapes[other] != shapes[reader]:
            continue
        with module.graph.inserting_before(reader):
            # The kernel reads a transposed tensor as if it were none; a copy of one that is contiguous costs nothing.
            plain = module.graph.call_function(aten.contiguous.default, (other,))
            arguments = (*node.args[:6], plain, *node.args[6:10], 1.0, 0, "add", 1.0, "none", [], "")
            made = module.graph.call_function(LINEAR_ADD, arguments)
            made.meta["onnx"] = node.meta.get("onnx", "")
        replace(reader, made)
        module.graph.erase_node(node)
        found += 1
    return found


def fuse_quantizers(module: LoweredGraph) -> int:
    """Let an integer product write the codes that its only reader would make of its floats; return how many do."""
    found = 0
    for node in list(module.graph.nodes):
        if not is_call(node, LINEAR, CONVOLUTION):
            continue
        start, reader = _OUTPUT[node.target], only_reader(node)
        if node.args[start + 2] is torch.float32 and is_call(reader, quantize):
            written = (*reader.args[1:3], reader.args[5])
            node.args = (*node.args[:start], *written, *node.args[start + 3 :])
            reader.replace_all_uses_with(node)
            module.graph.erase_node(reader)
            found += 1
    return found


_SWAPPED = [[0, 1, 3, 2], [0, 2, 3, 1]]
"""Orders of axes that make k^T [batch, heads, d, L]: of k, and of what k is made of."""


def fuse_attention(module: LoweredGraph) -> int:
    """Fuse every attention of the graph; return how many there were."""
    found = 0
    for node in list(module.graph.nodes):
        product = only_reader(node) if is_call(node, aten.softmax.int) else None
        if is_call(product, aten.matmul.default) and product.all_input_nodes[0] is node:
            found += _fuse(module, product, node)
    return found


def _fuse(module: LoweredGraph, product: fx.Node, softmax: fx.Node) -> bool:
    if softmax.args[1] not in (-1, 3) or is_call(product.args[1], dequantize):
        return False
    scores, mask = softmax.args[0], None
    if is_call(scores, aten.add.Tensor):
        scores, mask = scores.args[:2]
        if not _is_scores(module, scores):
            scores, mask = mask, scores
    found = _scores(module, scores)
    if found is None:
        return False
    query, keys, scale = found
    key = _untransposed(module, keys)
    with module.graph.inserting_before(product):
        if key is None:
            key = module.graph.call_function(aten.transpose.int, (keys, -2, -1))
        fused = module.graph.call_function(
            aten.scaled_dot_product_attention.default,
            (query, key, product.args[1]),
            {"attn_mask": mask, "scale": scale},
        )
    replace(product, fused)
    return True


def _is_scores(module: LoweredGraph, value: Any) -> bool:
    return _scores(module, value) is not None


def _scores(module: LoweredGraph, value: Any) -> tuple[Any, Any, float] | None:
    """Return q, k^T and the scale of attention scores; None for anything else."""
    scale = 1.0
    if is_call(value, aten.mul.Tensor, aten.div.Tensor) and only_reader(value) is not None:
        factor = number(module, value.args[1])
        if factor is None:
            return None
        scale = factor if value.target is aten.mul.Tensor else 1 / factor
        value = value.args[0]
    if not is_call(value, aten.matmul.default) or only_reader(value) is None:
        return None
    query, keys = value.args
    if any(is_call(operand, dequantize) for operand in (query, keys)):
        return None
    return query, keys, scale


def _untransposed(module: LoweredGraph, keys: Any) -> fx.Node | None:
    """Return k [batch, heads, L, d] where k^T is a permutation of what is known; None otherwise."""
    if not is_call(keys, aten.permute.default) or keys.args[1] not in _SWAPPED:
        return None
    source = keys.args[0]
    if keys.args[1] == _SWAPPED[0]:
        return source if isinstance(source, fx.Node) else None
    with module.graph.inserting_before(keys):
        return module.graph.call_function(aten.permute.default, (source, [0, 2, 1, 3]))
