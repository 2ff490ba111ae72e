"""All passes in their order: a Q/DQ graph becomes one of integer kernels."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from quantizer.engines.torch_engine.graph_file import LoweredGraph
from quantizer.engines.torch_engine.lowering.matching import (
    RunnableSizes,
    constant,
    dequantize,
    dequantize_vector,
    is_call,
    new_constant,
    node_shapes,
    replace,
    runnable_sizes,
)
from quantizer.engines.torch_engine.lowering.post_operations import (
    fuse_activations,
    fuse_attention,
    fuse_quantizers,
    fuse_residual_adds,
)
from quantizer.engines.torch_engine.lowering.products import lower_convolutions, lower_linears, merge_linears
from quantizer.engines.torch_engine.onnx_import.importer import Imported


def lower(imported: Imported, usual: Mapping[str, int] = MappingProxyType({})) -> RunnableSizes:
    """Lower a graph in place; return sizes with which it runs: the usual ones if they are known, by name."""
    module = imported.module
    sizes = runnable_sizes(module, imported.inputs, usual)
    fuse_attention(module)
    lower_linears(module)
    lower_convolutions(module)
    _unpack_constants(module)
    merge_linears(module)
    fuse_residual_adds(module, node_shapes(module, imported.inputs, *sizes))
    fuse_activations(module)
    fuse_quantizers(module)
    module.graph.eliminate_dead_code()
    _drop_unread_constants(module)
    return sizes


def _unpack_constants(module: LoweredGraph) -> None:
    """Replace dequantized constants that no integer kernel reads, such as tables of embeddings, by floats."""
    module.graph.eliminate_dead_code()
    for node in list(module.graph.nodes):
        operands = [constant(module, value) for value in node.all_input_nodes]
        if is_call(node, dequantize, dequantize_vector) and all(operand is not None for operand in operands):
            places = dict(zip(node.all_input_nodes, operands, strict=True))
            values = [places[value] if isinstance(value, fx.Node) else value for value in node.args]
            unpack: Any = node.target
            with module.graph.inserting_before(node), torch.no_grad():
                made = new_constant(module, "floats", unpack(*values))
            replace(node, made)


def _drop_unread_constants(module: LoweredGraph) -> None:
    read = {node.target for node in module.graph.nodes if node.op == "get_attr"}
    for name in [name for name, _ in module.named_buffers() if name not in read]:
        delattr(module, name)
