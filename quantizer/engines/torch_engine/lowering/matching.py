"""Questions about ``torch.fx`` nodes that the passes share."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
import torch.ao.quantization.fx._decomposed as _decomposed  # registers the operators
from torch import fx

from quantizer.engines.torch_engine.lowered_graph import LoweredGraph

del _decomposed


aten = torch.ops.aten
decomposed = torch.ops.quantized_decomposed
quantize = decomposed.quantize_per_tensor.default
dequantize = decomposed.dequantize_per_tensor.default
dequantize_vector = decomposed.dequantize_per_channel.default
LINEAR = torch.ops.onednn.qlinear_pointwise.default
LINEAR_ADD = torch.ops.onednn.qlinear_pointwise.binary
LINEAR_PREPACK = torch.ops.onednn.qlinear_prepack.default
CONVOLUTION = torch.ops.onednn.qconv_pointwise.default
CONVOLUTION_PREPACK = torch.ops.onednn.qconv_prepack.default


def is_call(value: Any, *targets: Any) -> TypeGuard[fx.Node]:
    """Return whether a value is a call of one of the operators."""
    return isinstance(value, fx.Node) and value.op == "call_function" and value.target in targets


def only_reader(node: fx.Node) -> fx.Node | None:
    """Return the one node that reads a value, once; None if it has more readers or none."""
    readers = list(node.users)
    if len(readers) != 1:
        return None
    reads: list[fx.Node] = []
    fx.node.map_arg((readers[0].args, readers[0].kwargs), reads.append)
    return readers[0] if sum(read is node for read in reads) == 1 else None


def constant(module: LoweredGraph, value: Any) -> torch.Tensor | None:
    """Return the tensor of a constant; None for anything that is computed."""
    if not isinstance(value, fx.Node) or value.op != "get_attr":
        return None
    found: torch.Tensor = module.get_buffer(str(value.target))
    return found


def number(module: LoweredGraph, value: Any) -> float | None:
    """Return the number of a constant of one element, or of a plain number; None for anything else."""
    if isinstance(value, int | float):
        return float(value)
    held = constant(module, value)
    return float(held) if held is not None and held.numel() == 1 else None


def new_constant(module: LoweredGraph, name: str, tensor: torch.Tensor) -> fx.Node:
    """Add a constant at the insertion point and return the node that reads it; one that is held already is shared."""
    known = {id(held): plain for plain, held in module.named_buffers()}
    plain = known.get(id(tensor), f"c{len(known)}_{name}")
    module.register_buffer(plain, tensor)
    return module.graph.get_attr(plain)


def quantized_weight(
    module: LoweredGraph, value: Any, axis: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return INT8 codes of ``rank`` axes and one scale for each index along ``axis``; None for anything else.

    One scale for the whole tensor is repeated. The integer kernels take no zero points of weights.
    """
    if not is_call(value, dequantize, dequantize_vector):
        return None
    codes = constant(module, value.args[0])
    if codes is None or codes.dim() != rank or codes.dtype != torch.int8:
        return None
    if value.target is dequantize:
        return (codes, torch.full((codes.shape[axis],), _float(value.args[1]))) if value.args[2] == 0 else None
    scales, points = constant(module, value.args[1]), constant(module, value.args[2])
    if scales is None or points is None or bool(points.any()) or value.args[3] not in (axis, axis - rank):
        return None
    return codes, scales.float()


def _float(value: Any) -> float:
    return float(value)


def replace(old: fx.Node, new: fx.Node) -> None:
    """Let the readers of a node read another one, which takes over its origin."""
    new.meta.setdefault("onnx", old.meta.get("onnx", ""))
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)
