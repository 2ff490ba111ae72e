"""Pass that computes a linear on dequantized operands with oneDNN's integer kernel.

Legend: a [.., K] codes of the activation with scale s and zero point z; w [K, N] codes of the weight with one scale t_n
a column; b [N] the bias.

    DQ(a) @ DQ(w) + b = s (a - z) @ w t + b

The kernel accumulates in 32 bits and subtracts z by the sums of the columns of w.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from quantizer.engines.torch_engine.lowered_graph import LoweredGraph
from quantizer.engines.torch_engine.lowering.matching import (
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
                _lower(module, node, *weight, packed)
                found += 1
    return found


def _lower(
    module: LoweredGraph,
    product: fx.Node,
    codes: torch.Tensor,
    scales: torch.Tensor,
    packed: dict[fx.Node, fx.Node],
) -> None:
    """Lower one product.

    Args:
        module: the graph.
        product: the product.
        codes: of its weight.
        scales: of its weight.
        packed: weights that are packed already, by their dequantizer: a module that is called twice has one.
    """
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
