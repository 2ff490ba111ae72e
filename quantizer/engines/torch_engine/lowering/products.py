"""Integer kernels in place of products between Q and DQ.

``lower_linears`` computes a linear on dequantized operands with oneDNN's integer kernel.

Legend: a [.., K] codes of the activation with scale s and zero point z; w [K, N] codes of the weight with one scale t_n
a column; b [N] the bias.

    DQ(a) @ DQ(w) + b = s (a - z) @ w t + b

The kernel accumulates in 32 bits and subtracts z by the sums of the columns of w.

``lower_convolutions`` computes a convolution on dequantized operands with oneDNN's integer kernel.

As with a linear, with one scale for each output channel of the weight. Transposed convolutions and those of
other than one or two spatial axes stay float.

``merge_linears`` computes integer linears of one activation, such as query, key and value, as one.

    [y1, y2] = a @ [w1, w2] + [b1, b2]

One product of three times the width takes less time than three, most of all where there are few rows.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import fx

from quantizer.engines.torch_engine.graph_file import LoweredGraph
from quantizer.engines.torch_engine.lowering.matching import (
    CONVOLUTION,
    CONVOLUTION_PREPACK,
    LINEAR,
    LINEAR_PREPACK,
    aten,
    constant,
    dequantize,
    is_call,
    new_constant,
    only_reader,
    quantized_weight,
    replace,
)


def lower_linears(module: LoweredGraph) -> int:
    """Replace every linear with two dequantized operands; return how many there were."""
    found = 0
    packed: dict[fx.Node, fx.Node] = {}
    for node in list(module.graph.nodes):
        if is_call(node, aten.matmul.default) and is_call(node.args[0], dequantize):
            weight = quantized_weight(module, node.args[1], axis=1, rank=2)
            if weight is not None:
                _lower_linear(module, node, *weight, packed)
                found += 1
    return found


def _lower_linear(
    module: LoweredGraph,
    product: fx.Node,
    codes: torch.Tensor,
    scales: torch.Tensor,
    packed: dict[fx.Node, fx.Node],
) -> None:
    """Lower one product."""
    reader, bias = only_reader(product), None
    last = product
    if is_call(reader, aten.add.Tensor):
        other = reader.args[1] if reader.args[0] is product else reader.args[0]
        bias = constant(module, other)
        if bias is not None and bias.shape == scales.shape:
            last = reader
        else:
            bias = None
    activation, weight = product.args[:2]
    assert isinstance(activation, fx.Node)
    assert isinstance(weight, fx.Node)
    with module.graph.inserting_before(last):
        if weight not in packed:
            # The kernel's own layout is made of [N, K].
            stored = new_constant(module, "weight", codes.t().contiguous())
            packed[weight] = module.graph.call_function(LINEAR_PREPACK, (stored, None))
        arguments: tuple[Any, ...] = (
            activation.args[0],
            activation.args[1],
            activation.args[2],
            packed[weight],
            new_constant(module, "scales", scales),
            new_constant(module, "zero_points", torch.zeros(len(scales), dtype=torch.int64)),
            None if bias is None else new_constant(module, "bias", bias.float()),
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        made = module.graph.call_function(LINEAR, arguments)
        made.meta["onnx"] = product.meta.get("onnx", "")
    replace(last, made)


def lower_convolutions(module: LoweredGraph) -> int:
    """Replace every convolution with two dequantized operands; return how many there were."""
    _pad_codes(module)
    found = 0
    for node in list(module.graph.nodes):
        if is_call(node, aten.convolution.default) and is_call(node.args[0], dequantize) and not node.args[6]:
            stride: Any = node.args[3]
            weight = quantized_weight(module, node.args[1], axis=0, rank=2 + len(stride))
            if weight is not None and len(stride) < 3:
                _lower_convolution(module, node, *weight)
                found += 1
    return found


def _pad_codes(module: LoweredGraph) -> None:
    """Pad codes with the zero point in place of their values with 0, where a convolution reads the padded values.

    The kernels pad both ends alike, so a convolution that is padded unevenly has its padding before it.
    """
    for node in list(module.graph.nodes):
        if not is_call(node, aten.constant_pad_nd.default) or not is_call(node.args[0], dequantize):
            continue
        if not any(is_call(reader, aten.convolution.default) for reader in node.users) or node.args[2] != 0:
            continue
        codes, scale, zero, *rest = node.args[0].args
        with module.graph.inserting_before(node):
            padded = module.graph.call_function(aten.constant_pad_nd.default, (codes, node.args[1], zero))
            made = module.graph.call_function(dequantize, (padded, scale, zero, *rest))
        padded.meta["onnx"] = node.meta.get("onnx", "")
        replace(node, made)


def _lower_convolution(module: LoweredGraph, node: fx.Node, codes: torch.Tensor, scales: torch.Tensor) -> None:
    activation, bias = node.args[0], constant(module, node.args[2])
    assert isinstance(activation, fx.Node)
    source, scale, zero = activation.args[:3]
    window = (*node.args[3:6], node.args[8])
    with module.graph.inserting_before(node):
        stored = new_constant(module, "weight", codes)
        steps = new_constant(module, "scales", scales)
        packed = module.graph.call_function(CONVOLUTION_PREPACK, (stored, steps, scale, zero, *window, None))
        points = new_constant(module, "zero_points", torch.zeros(len(scales), dtype=torch.int64))
        added = None if bias is None else new_constant(module, "bias", bias.float())
        made = module.graph.call_function(
            CONVOLUTION,
            (source, scale, zero, packed, steps, points, added, *window, 1.0, 0, torch.float32, "none", [], ""),
        )
    replace(node, made)


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
