"""The eager road: weights prepacked when the graph is loaded, quantizers in one pass, buffers reused."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import fx

from quantizer.engines.torch_engine.lowered_graph import LoweredGraph
from quantizer.engines.torch_engine.lowering.matching import (
    CONVOLUTION_PREPACK,
    LINEAR,
    LINEAR_PREPACK,
    aten,
    is_call,
    only_reader,
    quantize,
)
from quantizer.numerics.byte_codes import byte_codes, spend_deprecation_warning


def prepare_eager(module: LoweredGraph) -> LoweredGraph:
    """Prepare a lowered graph, in place, to run operator by operator; return it."""
    spend_deprecation_warning()
    for node in list(module.graph.nodes):
        if is_call(node, LINEAR_PREPACK, CONVOLUTION_PREPACK):
            _prepack(module, node)
        elif is_call(node, quantize) and node.args[5] is torch.uint8 and node.args[3:5] == (0, 255):
            node.target, node.args = byte_codes, node.args[:3]
        elif is_call(node, aten.mul.Tensor) and _owned(node.args[0]):
            node.target = aten.mul_.Tensor
    module.graph.eliminate_dead_code()
    read = {node.target for node in module.graph.nodes if node.op == "get_attr"}
    for name in [name for name, _ in module.named_buffers() if name not in read]:
        delattr(module, name)
    return module


def _prepack(module: LoweredGraph, node: fx.Node) -> None:
    values = [module.get_buffer(str(value.target)) if isinstance(value, fx.Node) else value for value in node.args]
    kernel: Any = node.target
    name = f"{node.name}_held"
    # Opaque to everything but the kernel, so no buffer that would be saved or moved.
    setattr(module, name, kernel(*values))
    with module.graph.inserting_before(node), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fx, that the attribute is no parameter and no buffer
        held = module.graph.get_attr(name)
    node.replace_all_uses_with(held)
    module.graph.erase_node(node)


def _owned(value: Any) -> bool:
    """Return whether a value is the output of a kernel that nothing else reads, so that it may be overwritten."""
    return is_call(value, LINEAR, aten.gelu.default) and only_reader(value) is not None
