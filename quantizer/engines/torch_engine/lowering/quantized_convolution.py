"""Pass that computes a convolution on dequantized operands with oneDNN's integer kernel.

As ``quantized_linear.py``, with one scale for each output channel of the weight. Transposed convolutions and those of
other than one or two spatial axes stay float.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from quantizer.engines.torch_engine.lowered_graph import LoweredGraph
from quantizer.engines.torch_engine.lowering.matching import (
    CONVOLUTION,
    CONVOLUTION_PREPACK,
    aten,
    constant,
    dequantize,
    is_call,
    new_constant,
    quantized_weight,
    replace,
)


def lower_convolutions(module: LoweredGraph) -> int:
    """Replace every convolution with two dequantized operands; return how many there were."""
    _pad_codes(module)
    found = 0
    for node in list(module.graph.nodes):
        if is_call(node, aten.convolution.default) and is_call(node.args[0], dequantize) and not node.args[6]:
            stride: Any = node.args[3]
            weight = quantized_weight(module, node.args[1], axis=0, rank=2 + len(stride))
            if weight is not None and len(stride) < 3:
                _lower(module, node, *weight)
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


def _lower(module: LoweredGraph, node: fx.Node, codes: torch.Tensor, scales: torch.Tensor) -> None:
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
