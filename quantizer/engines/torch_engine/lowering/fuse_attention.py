"""Pass that gives a float attention to torch's fused kernel.

    softmax(q k^T c + mask) v = scaled_dot_product_attention(q, k, v, mask, scale=c)

Only products whose operands are floats: an attention in INT8 keeps its products.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from quantizer.engines.torch_engine.lowered_graph import LoweredGraph
from quantizer.engines.torch_engine.lowering.matching import aten, dequantize, is_call, number, only_reader, replace

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
