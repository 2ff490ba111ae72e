"""Pass that computes integer linears of one activation, such as query, key and value, as one.

    [y1, y2] = a @ [w1, w2] + [b1, b2]

One product of three times the width takes less time than three, most of all where there are few rows.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import fx

from quantizer.engines.torch_engine.lowered_graph import LoweredGraph
from quantizer.engines.torch_engine.lowering.matching import (
    LINEAR,
    LINEAR_PREPACK,
    aten,
    constant,
    is_call,
    new_constant,
)


def merge_linears(module: LoweredGraph) -> int:
    """Merge the linears that read the same codes and write floats with nothing fused; return how many were merged."""
    groups: dict[tuple[object, ...], list[fx.Node]] = defaultdict(list)
    for node in module.graph.nodes:
        if is_call(node, LINEAR) and node.args[9] is torch.float32 and node.args[10] == "none":
            groups[*node.args[:3], node.args[6] is None].append(node)
    return sum(_merge(module, members) for members in groups.values() if len(members) > 1)


def _merge(module: LoweredGraph, members: list[fx.Node]) -> int:
    first = members[0]
    parts = [_constants(module, node) for node in members]
    weights, scales, biases = zip(*parts, strict=True)
    widths = [len(scale) for scale in scales]
    with module.graph.inserting_before(first):
        stored = new_constant(module, "weight", torch.cat(weights))
        packed = module.graph.call_function(LINEAR_PREPACK, (stored, None))
        bias = None if biases[0] is None else new_constant(module, "bias", torch.cat(biases))
        zeros = torch.zeros(sum(widths), dtype=torch.int64)
        made = module.graph.call_function(
            LINEAR,
            (
                *first.args[:3],
                packed,
                new_constant(module, "scales", torch.cat(scales)),
                new_constant(module, "zero_points", zeros),
                bias,
                *first.args[7:],
            ),
        )
        made.meta["onnx"] = ", ".join(node.meta.get("onnx", "") for node in members)
        start = 0
        for node, width in zip(members, widths, strict=True):
            part = module.graph.call_function(aten.slice.Tensor, (made, -1, start, start + width))
            part.meta["onnx"] = node.meta.get("onnx", "")
            node.replace_all_uses_with(part)
            start += width
    for node in members:
        module.graph.erase_node(node)
    return len(members)


def _constants(module: LoweredGraph, node: fx.Node) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    packed = node.args[3]
    assert isinstance(packed, fx.Node)
    weight, scale = constant(module, packed.args[0]), constant(module, node.args[4])
    assert weight is not None
    assert scale is not None
    return weight, scale, None if node.args[6] is None else constant(module, node.args[6])
