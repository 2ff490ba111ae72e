"""Lowering of a Q/DQ graph of torch operators, in INT8 or FP8, to kernels of a GPU that read and write 8 bits.

``lower_for_gpu`` turns these chains into one operator of ``gpu_operators.py`` each:

- DQ > MatMul with a quantized weight > bias > ReLU, GELU or SiLU > residual add > Q of the next layer;
- layers that read one quantized tensor and write floats, such as q, k and v: one MatMul with several results;
- residual add > LayerNorm or RMSNorm > Q;
- the sum of embeddings > LayerNorm or RMSNorm > Q;
- attention with a mask that is the same for all queries, such as one of padding > Q.

A result is written in 8 bits for the quantizers that read it, and in 16 bits only for other readers. UINT8 values
become INT8 ones by a shift of the zero point, which is in the bias of the layer that reads them: s (a - z) w t + b =
s a w t + (b - s z t sum_k w). ``kernel_plan.py`` says what a lowered graph does.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from quantizer.engines.base import InputSizes
from quantizer.engines.torch_engine.gpu_operators import OPERATORS, WIDEST_HEAD
from quantizer.engines.torch_engine.lowering import (
    aten,
    bias_of,
    constant,
    decomposed,
    dequantize,
    dequantize_vector,
    drop_unread_constants,
    fuse_attention,
    is_call,
    new_constant,
    node_shapes,
    node_values,
    number,
    only_reader,
    quantize,
    quantized_weight,
    replace,
    runnable_sizes,
    unpack_constants,
)
from quantizer.export.onnx_import.graph_builder import OperatorGraph
from quantizer.export.onnx_import.importer import Imported
from quantizer.export.qdq.onnx_file import TensorSpec
from quantizer.numerics.formats import FP8, INT8, UINT8

LINEARS, NORMS, EMBEDDING_NORMS, QUANTIZERS, ATTENTIONS = (
    (OPERATORS[name].triton, OPERATORS[name].reference)
    for name in ("linear_8bit", "norm_8bit", "embedding_norm_8bit", "quantize_8bit", "padded_attention")
)
"""The overloads of each operator."""

EIGHT_BITS = (INT8.storage, FP8.storage)
"""The types of quantized values that kernels read and write."""

Shapes = dict[fx.Node, tuple[int, ...]]
"""The shape of each node's result in a run, new nodes included."""

KERNELS = (*LINEARS, *NORMS, *EMBEDDING_NORMS, *QUANTIZERS, *ATTENTIONS)


def lower_for_gpu(
    imported: Imported,
    *,
    dtype: torch.dtype = torch.float16,
    triton: bool = True,
    usual: Mapping[str, int] = MappingProxyType({}),
) -> tuple[InputSizes, dict[str, str]]:
    """Lower a graph in place; return sizes with which it runs, and the reason of each layer that is not lowered.

    Args:
        imported: a graph of ``import_onnx``.
        dtype: the type of values that are not quantized: float16, bfloat16 or float32.
        triton: call Triton's kernels; False: their references in torch, on any device.
        usual: usual sizes of dynamic dimensions, by name.

    Raises:
        EngineError: the graph does not run.
    """
    module = imported.module
    sizes, values = runnable_sizes(module, imported.inputs, usual)
    types = [value.dtype for _, value in _outputs(module, values)]
    compute_in_float32(module, imported.inputs)
    fuse_attention(module)
    sign_activations(module)
    shapes = node_shapes(module, imported.inputs, sizes)
    overload = 0 if triton else 1
    _lower_attentions(module, shapes, dtype, overload)
    reasons = _lower_linears(module, shapes, overload)
    _merge_linears(module, shapes)
    unpack_constants(module)
    _lower_norms(module, shapes, dtype, overload)
    _lower_quantizers(module, shapes, overload)
    module.graph.eliminate_dead_code()
    if dtype is not torch.float32:
        _store_in_16_bits(module, imported.inputs, sizes, dtype)
        module.graph.eliminate_dead_code()
    # Raises if an operator does not take its operands.
    values = node_values(module, imported.inputs, sizes)
    _restore_types(module, _outputs(module, values), types)
    drop_unread_constants(module)
    module.graph.lint()
    return sizes, reasons


def _outputs(module: OperatorGraph, values: Mapping[fx.Node, Tensor]) -> list[tuple[fx.Node, Tensor]]:
    """Return the outputs of a graph as tensors without data."""
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    return [(node, values[node]) for node in output.args[0]]


def _restore_types(
    module: OperatorGraph, outputs: Sequence[tuple[fx.Node, Tensor]], types: Sequence[torch.dtype]
) -> None:
    """Return outputs in the types of the file."""
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    with module.graph.inserting_before(output):
        nodes = [
            node if value.dtype is dtype else module.graph.call_function(aten.to.dtype, (node, dtype))
            for (node, value), dtype in zip(outputs, types, strict=True)
        ]
    output.args = (tuple(nodes),)


def compute_in_float32(module: OperatorGraph, specs: Sequence[TensorSpec]) -> None:
    """Turn a graph in float16 or bfloat16, such as one for TensorRT, into one in float32; types of inputs stay."""
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, spec in zip(inputs, specs, strict=True):
        if spec.dtype.name in ("float16", "bfloat16"):
            with module.graph.inserting_after(inputs[-1]):
                converted = module.graph.call_function(aten.to.dtype, (node, torch.float32))
            for reader in [user for user in node.users if user is not converted]:
                reader.replace_input_with(node, converted)
    half = (torch.float16, torch.bfloat16)
    for name, tensor in list(module.named_buffers()):
        if tensor.dtype in half:
            module.register_buffer(name, tensor.float())
    for node in module.graph.nodes:
        if node.op == "call_function" and not is_call(node, quantize, dequantize, dequantize_vector):
            node.args = tuple(torch.float32 if value in half else value for value in node.args)
            node.kwargs = {name: torch.float32 if value in half else value for name, value in node.kwargs.items()}


def sign_activations(module: OperatorGraph) -> None:
    """Turn UINT8 values of activations into INT8 ones, with a zero point smaller by 128."""
    unsigned = (UINT8.qmin, UINT8.qmax, torch.uint8)
    shift = INT8.qmin - UINT8.qmin
    for node in module.graph.nodes:
        is_unsigned = is_call(node, quantize) and node.args[3:] == unsigned
        if is_unsigned and all(is_call(user, dequantize) and user.args[1:] == node.args[1:] for user in node.users):
            for each in (node, *node.users):
                zero_point: Any = each.args[2]
                each.args = (*each.args[:2], zero_point + shift, INT8.qmin, INT8.qmax, torch.int8)


def _lower_attentions(module: OperatorGraph, shapes: Shapes, dtype: torch.dtype, overload: int) -> None:
    """Lower each attention whose mask is the same for all queries, and with it the mask, to [B, 1, 1, K]."""
    masks: dict[fx.Node, fx.Node | None] = {}
    for node in list(module.graph.nodes):
        mask = node.kwargs.get("attn_mask") if is_call(node, aten.scaled_dot_product_attention.default) else None
        if not isinstance(mask, fx.Node) or not _fits_kernel(*(shapes.get(value, ()) for value in (*node.args, mask))):
            continue
        of_any_query = _of_any_query(module, mask, shapes, masks)
        if of_any_query is None or len(shapes[of_any_query]) != 4:
            continue
        tensor = constant(module, of_any_query)
        if tensor is not None and not tensor.any():
            # PyTorch has a faster kernel for an attention without a mask, such as that of images.
            node.kwargs = {**node.kwargs, "attn_mask": None}
            continue
        _lower_attention(module, node, of_any_query, shapes, dtype, overload)
    module.graph.eliminate_dead_code()


def _fits_kernel(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], mask: tuple[int, ...]) -> bool:
    """Return whether the kernel computes an attention of operands with these shapes."""
    is_plain = len(query) == len(mask) == 4 and key == value and query[:2] == key[:2]
    return is_plain and query[3] == key[3] <= WIDEST_HEAD


def _lower_attention(
    module: OperatorGraph, node: fx.Node, mask: fx.Node, shapes: Shapes, dtype: torch.dtype, overload: int
) -> None:
    samples, heads, queries, width = shapes[node]
    # [B, H, Q, D] > [B, Q, H, D] > [B, Q, H D]
    swapped = only_reader(node)
    joined = (
        only_reader(swapped) if is_call(swapped, aten.permute.default) and swapped.args[1] == [0, 2, 1, 3] else None
    )
    written = None
    if is_call(joined, aten.reshape.default) and shapes[joined] == (samples, queries, heads * width):
        found, others = _readers(module, joined, shapes)
        written = None if others else found
    with module.graph.inserting_before(node):
        quantized: tuple[Any, ...] = (None, None, 0)
        if written is not None:
            quantized = (written.dtype, new_constant(module, "next_scale", written.scale), written.zero_point)
        kernel = module.graph.call_function(ATTENTIONS[overload], (*node.args, mask, node.kwargs["scale"], *quantized))
    types = (_type_name(dtype), _type_name(dtype if written is None else written.dtype))
    kernel.meta["attention"] = (heads, shapes[node.args[0]][3], *types)  # type: ignore[index]
    shapes[kernel] = shapes[node]
    replace(node, kernel)
    if written is not None and joined is not None:
        written.replace_with(joined)


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_ELEMENTWISE = (
    *(aten.logical_and.default, aten.logical_or.default, aten.logical_not.default, aten.where.self, aten.to.dtype),
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.eq.Tensor, aten.clamp.default),
)
"""Elementwise operators of masks."""


def _of_any_query(
    module: OperatorGraph, value: fx.Node, shapes: Shapes, results: dict[fx.Node, fx.Node | None]
) -> fx.Node | None:
    """Return a value with one index on the last axis but one, which broadcasts to ``value``; None if there is none."""
    shape = shapes.get(value)
    if shape is None or len(shape) < 2 or shape[-2] == 1:
        return None if shape is None else value
    if value not in results:
        results[value] = _computed_for_any_query(module, value, shapes, results)
    return results[value]


def _computed_for_any_query(
    module: OperatorGraph, value: fx.Node, shapes: Shapes, results: dict[fx.Node, fx.Node | None]
) -> fx.Node | None:
    tensor = constant(module, value)
    if tensor is not None:
        first = tensor[..., :1, :]
        return _new_operand(module, value, first.clone(), shapes) if bool((tensor == first).all()) else None
    if is_call(value, aten.expand.default):
        return _of_any_query(module, value.args[0], shapes, results)  # type: ignore[arg-type]
    if is_call(value, aten.ge.Tensor):
        # Masks of transformers contain "the index of the query is at least 0".
        least = number(module, value.args[1])
        if least is None or least > 0 or not _counts_from_zero(value.args[0]):
            return None
        return _new_operand(module, value, torch.ones((), dtype=torch.bool), shapes)
    if not is_call(value, *_ELEMENTWISE):
        return None
    operands = {operand: _of_any_query(module, operand, shapes, results) for operand in value.all_input_nodes}
    if None in operands.values():
        return None
    tensors = {operand: constant(module, of_any) for operand, of_any in operands.items()}
    if all(each is not None for each in tensors.values()):
        target: Any = value.target
        args: Any = fx.node.map_arg(value.args, lambda operand: tensors[operand])
        kwargs: Any = fx.node.map_arg(value.kwargs, lambda operand: tensors[operand])
        return _new_operand(module, value, target(*args, **kwargs), shapes)
    with module.graph.inserting_before(value):
        result = module.graph.node_copy(value, lambda operand: operands[operand])
    broadcast: Any = torch.broadcast_shapes
    shapes[result] = tuple(broadcast(*(shapes[operand] for operand in result.all_input_nodes)))
    return result


def _new_operand(module: OperatorGraph, place: fx.Node, tensor: Tensor, shapes: Shapes) -> fx.Node:
    """Return a new constant in the place of a node."""
    with module.graph.inserting_before(place):
        node = new_constant(module, "mask", tensor)
    shapes[node] = tuple(tensor.shape)
    return node


def _counts_from_zero(value: Any) -> bool:
    """Return whether a value is 0, 1, 2, ... along an axis."""
    while is_call(value, aten.unsqueeze.default, aten.expand.default, aten.to.dtype):
        value = value.args[0]
    return is_call(value, aten.arange.start_step) and (value.args[0], value.args[2]) == (0, 1)


def _lower_linears(module: OperatorGraph, shapes: Shapes, overload: int) -> dict[str, str]:
    """Lower the linear layers; return the reasons of those that are not lowered, by the name of the ONNX node."""
    reasons = {}
    for node in list(module.graph.nodes):
        if not is_call(node, aten.matmul.default) or not is_call(node.args[1], dequantize, dequantize_vector):
            continue
        if constant(module, node.args[1].args[0]) is None:
            continue
        operand: Any = node.args[0]
        dtype: Any = operand.args[5] if is_call(operand, dequantize) else INT8.storage
        weight = quantized_weight(module, node.args[1], axis=1, rank=2, dtype=dtype)
        reason = _unfit(operand, weight is None)
        if reason is not None or weight is None:
            reasons[str(node.meta.get("onnx", node.name))] = str(reason)
        else:
            _lower_linear(module, node, *weight, shapes, overload)
    return reasons


def _unfit(activation: Any, has_other_weight: bool) -> str | None:
    """Return why a linear layer is not lowered; None if it is."""
    if not is_call(activation, dequantize):
        return "only its weight is quantized"
    if activation.args[5] not in EIGHT_BITS:
        return "its activation is in UINT8 for an operator that reads quantized values"
    if has_other_weight:
        return "its weight is not a matrix of its activation's type with a scale per channel and without zero points"
    return None


def _lower_linear(
    module: OperatorGraph,
    product: fx.Node,
    integers: Tensor,
    scales: Tensor,
    shapes: Shapes,
    overload: int,
) -> None:
    activation: Any = product.args[0]
    values, scale, zero_point = activation.args[:3]
    bias, last = bias_of(module, product, len(scales))
    if zero_point:
        shift = scale * zero_point * scales.double() * integers.double().sum(0)
        bias = ((0.0 if bias is None else bias.double()) - shift).float()
    function, last = _activation(last)
    residual, last = _residual(last, shapes)
    written, others = _readers(module, last, shapes)
    if others:
        written = None
    with module.graph.inserting_before(last):
        kernel = module.graph.call_function(
            LINEARS[overload],
            (
                values,
                new_constant(module, "weight", integers.t().contiguous()),
                scale,
                new_constant(module, "scales", scales),
                None if bias is None else new_constant(module, "bias", bias.float()),
                residual,
                None if written is None else new_constant(module, "next_scale", written.scale),
                0 if written is None else written.zero_point,
                function,
                torch.float32 if written is None else written.dtype,
                1,
            ),
        )
    kernel.meta["onnx"] = product.meta.get("onnx", "")
    shapes[kernel] = shapes[last]
    if written is None:
        last.replace_all_uses_with(kernel)
    else:
        written.replace_with(kernel)


def _activation(value: fx.Node) -> tuple[str, fx.Node]:
    """Return the name of the activation that alone reads a value, and its result; without one, the value."""
    reader = only_reader(value)
    if is_call(reader, aten.relu.default):
        return "relu", reader
    if is_call(reader, aten.gelu.default):
        return ("gelu_tanh" if reader.kwargs.get("approximate", "none") == "tanh" else "gelu"), reader
    # SiLU is exported as x sigmoid(x).
    sigmoid = next((user for user in value.users if is_call(user, aten.sigmoid.default)), None)
    result = None if sigmoid is None else only_reader(sigmoid)
    if is_call(result, aten.mul.Tensor) and set(value.users) == {sigmoid, result}:
        return ("silu", result) if set(result.args) == {value, sigmoid} else ("none", value)
    return "none", value


def _residual(value: fx.Node, shapes: Shapes) -> tuple[fx.Node | None, fx.Node]:
    """Return the tensor of the same shape that is added to a value alone, and the sum; without one, the value."""
    reader = only_reader(value)
    if not is_call(reader, aten.add.Tensor) or len(reader.args) != 2 or reader.kwargs:
        return None, value
    other = reader.args[1] if reader.args[0] is value else reader.args[0]
    if not isinstance(other, fx.Node) or shapes.get(other) != shapes[reader]:
        return None, value
    return other, reader


@dataclass(frozen=True, slots=True)
class _Quantization:
    """The quantization of a value, alone or after a factor for each index of its last axis, as SmoothQuant inserts it.

    Attributes:
        scale: [1], or one for each index of the last axis: (x f) / s is x / (s / f).
        zero_point: the zero point.
        dtype: the type of the quantized values.
        quantizers: the nodes that return them.
    """

    scale: Tensor
    zero_point: int
    dtype: torch.dtype
    quantizers: tuple[fx.Node, ...]

    def replace_with(self, values: fx.Node) -> None:
        """Let the readers of the quantizers read these values."""
        for quantizer in self.quantizers:
            quantizer.replace_all_uses_with(values)

    def same_as(self, other: _Quantization) -> bool:
        """Return whether another quantization returns the same values."""
        return (
            torch.equal(self.scale, other.scale) and self.zero_point == other.zero_point and self.dtype is other.dtype
        )


def _quantization(module: OperatorGraph, value: fx.Node, reader: fx.Node, shapes: Shapes) -> _Quantization | None:
    """Return the quantization to 8 bits that a reader of a value computes; None for any other reader."""
    factor, quantizers = None, [reader]
    if is_call(reader, aten.mul.Tensor):
        factor, other = _constant_and_other(module, reader, aten.mul.Tensor)
        quantizers = list(reader.users)
        if factor is None or other is not value or factor.shape != shapes.get(value, ())[-1:] or not quantizers:
            return None
    first = quantizers[0]
    if any(not is_call(node, quantize) or node.args[1:] != first.args[1:] for node in quantizers):
        return None
    _, scale, zero_point, _, _, dtype = first.args
    if dtype not in EIGHT_BITS:
        return None
    scales = torch.tensor([scale], dtype=torch.float32)
    scales = scales if factor is None else (scales / factor.reshape(-1).float())
    return _Quantization(scales, int(zero_point), dtype, tuple(quantizers))  # type: ignore[arg-type]


def _readers(module: OperatorGraph, value: fx.Node, shapes: Shapes) -> tuple[_Quantization | None, list[fx.Node]]:
    """Return the quantization of a value that a kernel can write, and the other readers of the value.

    Quantizers with another range than the first one are other readers.
    """
    first: _Quantization | None = None
    others = []
    for user in value.users:
        found = _quantization(module, value, user, shapes)
        if found is None or (first is not None and not first.same_as(found)):
            others.append(user)
        else:
            nodes = found.quantizers if first is None else (*first.quantizers, *found.quantizers)
            first = replace_fields(found, quantizers=nodes)
    return first, others


def _merge_linears(module: OperatorGraph, shapes: Shapes) -> None:
    """Merge linear layers of one width that read the same quantized values and write plain floats."""
    groups: dict[tuple[Any, ...], list[fx.Node]] = defaultdict(list)
    module.graph.eliminate_dead_code()
    for node in module.graph.nodes:
        if is_call(node, *LINEARS) and node.args[5:] == (None, None, 0, "none", torch.float32, 1):
            weight = constant(module, node.args[1])
            assert weight is not None
            groups[node.target, node.args[0], node.args[2], weight.shape].append(node)
    for members in groups.values():
        if len(members) > 1:
            _merge(module, members, shapes)


def _merge(module: OperatorGraph, members: list[fx.Node], shapes: Shapes) -> None:
    first = members[0]
    weights, scales = (torch.cat([_tensor(module, node.args[place]) for node in members]) for place in (1, 3))
    biases = None
    if any(node.args[4] is not None for node in members):
        zeros = torch.zeros(len(scales) // len(members))
        biases = torch.cat([zeros if node.args[4] is None else _tensor(module, node.args[4]) for node in members])
    with module.graph.inserting_before(first):
        merged = module.graph.call_function(
            first.target,  # type: ignore[arg-type]
            (
                first.args[0],
                new_constant(module, "weight", weights),
                first.args[2],
                new_constant(module, "scales", scales),
                None if biases is None else new_constant(module, "bias", biases),
                *first.args[5:-1],
                len(members),
            ),
        )
        merged.meta["onnx"] = ", ".join(node.meta.get("onnx", "") for node in members)
        parts = [module.graph.call_function(aten.select.int, (merged, 0, place)) for place in range(len(members))]
    for node, part in zip(members, parts, strict=True):
        shapes[part] = shapes[node]
        replace(node, part)


def _tensor(module: OperatorGraph, value: Any) -> Tensor:
    tensor = constant(module, value)
    assert tensor is not None
    return tensor


@dataclass(frozen=True, slots=True)
class _Norm:
    """A norm of a graph: its input, its parameters, and the nodes that compute it, the result last."""

    x: fx.Node
    weight: Tensor
    bias: Tensor | None
    eps: float
    is_rms: bool
    nodes: tuple[fx.Node, ...]


def _norm(module: OperatorGraph, node: fx.Node, shapes: Shapes) -> _Norm | None:
    """Return the norm over the last axis that a node completes; None for any other node."""
    if is_call(node, aten.layer_norm.default, aten.rms_norm.default):
        x, shape, weight, *others = node.args
        is_rms = node.target is aten.rms_norm.default
        tensor, eps = constant(module, weight), others[-1]
        bias = None if is_rms else constant(module, others[0])
        is_known = is_rms or others[0] is None or bias is not None
        if not isinstance(shape, list | tuple) or len(shape) != 1 or not isinstance(eps, float):
            return None
        if not isinstance(x, fx.Node) or tensor is None or not is_known:
            return None
        return _Norm(x, tensor, bias, eps, is_rms, (node,))
    return _exported_rms_norm(module, node, shapes)


def _exported_rms_norm(module: OperatorGraph, node: fx.Node, shapes: Shapes) -> _Norm | None:
    """Return the RMSNorm g (x / sqrt(mean(x^2) + eps)) in operators; None for any other node."""
    weight, scaled = _constant_and_other(module, node, aten.mul.Tensor)
    if weight is None or weight.dim() != 1 or not is_call(scaled, aten.mul.Tensor):
        return None
    factor = next((value for value in scaled.all_input_nodes if is_call(value, aten.reciprocal.default)), None)
    x = next((value for value in scaled.all_input_nodes if value is not factor), None)
    root = None if factor is None else factor.args[0]
    if x is None or factor is None or not is_call(root, aten.sqrt.default):
        return None
    added, mean = _constant_and_other(module, root.args[0], aten.add.Tensor)
    if added is None or added.numel() != 1 or not is_call(mean, aten.mean.dim) or mean.args[2:] != (True,):
        return None
    if mean.args[1] not in ([-1], [len(shapes.get(x, ())) - 1]):
        return None
    square = mean.args[0]
    if not is_call(square, aten.pow.Tensor_Tensor) or square.args[0] is not x or number(module, square.args[1]) != 2:
        return None
    total: Any = root.args[0]
    nodes = (square, mean, total, root, factor, scaled, node)
    return _Norm(x, weight, None, float(added), is_rms=True, nodes=nodes)


def _constant_and_other(module: OperatorGraph, node: Any, target: Any) -> tuple[Tensor | None, Any]:
    """Return the constant operand of an operator with two operands, and the other one."""
    if not is_call(node, target) or len(node.args) != 2:
        return None, None
    first, second = node.args
    tensor = constant(module, first)
    return (tensor, second) if tensor is not None else (constant(module, second), first)


def _lower_norms(module: OperatorGraph, shapes: Shapes, dtype: torch.dtype, overload: int) -> None:
    for node in list(module.graph.nodes):
        norm = _norm(module, node, shapes)
        if norm is not None:
            _lower_norm(module, norm, shapes, dtype, overload)
    module.graph.eliminate_dead_code()


def _lower_norm(
    module: OperatorGraph,
    norm: _Norm,
    shapes: Shapes,
    dtype: torch.dtype,
    overload: int,
) -> None:
    x, last = norm.x, norm.nodes[-1]
    leaves = _embeddings(module, x)
    added = _summands(module, x, shapes) if leaves is None else None
    is_sum = leaves is not None or added is not None
    total = is_sum and any(user not in norm.nodes for user in x.users)
    written, others = _readers(module, last, shapes)
    graph = module.graph
    # The sum may be read before the norm is.
    with graph.inserting_before(x if is_sum else last):
        quantized: tuple[Any, ...] = (None, None, 0)
        if written is not None:
            quantized = (written.dtype, new_constant(module, "next_scale", written.scale), written.zero_point)
        options = (
            new_constant(module, "weight", norm.weight.float()),
            None if norm.bias is None else new_constant(module, "bias", norm.bias.float()),
            *(norm.eps, norm.is_rms, total, bool(others), *quantized),
        )
        if leaves is not None:
            tables = [new_constant(module, "table", table.to(dtype)) for table, _ in leaves]
            ids = [index for _, index in leaves]
            middle = (ids[1], tables[1]) if len(leaves) == len(("words", "types", "positions")) else (None, None)
            operands = (ids[0], ids[-1], middle[0], tables[0], tables[-1], middle[1])
            kernel = graph.call_function(EMBEDDING_NORMS[overload], (*operands, *options))
        else:
            kernel = graph.call_function(NORMS[overload], (*((x, None) if added is None else added), *options))
        results = iter([graph.call_function(operator.getitem, (kernel, place)) for place in range(3)])
    kernel.meta["onnx"] = last.meta.get("onnx", "")
    if total:
        h = next(results)
        shapes[h] = shapes[x]
        x.replace_all_uses_with(h)
    if others:
        value = next(results)
        shapes[value] = shapes[last]
        last.replace_all_uses_with(value, lambda user: user in others)
    if written is not None:
        written.replace_with(next(results))


def _embeddings(module: OperatorGraph, value: fx.Node) -> list[tuple[Tensor, fx.Node]] | None:
    """Return table and indices of the two or three embeddings whose sum is a value; None for any other value."""
    leaves: list[tuple[Tensor, fx.Node]] = []
    stack: list[Any] = [value]
    while stack:
        node = stack.pop()
        if is_call(node, aten.add.Tensor) and (node is value or only_reader(node) is not None):
            stack += reversed(node.args)
            continue
        table = constant(module, node.args[0]) if is_call(node, aten.embedding.default) else None
        if table is None or not table.is_floating_point():
            return None
        leaves.append((table, node.args[1]))
    return leaves if len(leaves) in (2, 3) else None


def _summands(module: OperatorGraph, value: fx.Node, shapes: Shapes) -> tuple[fx.Node, fx.Node] | None:
    """Return the two tensors of one shape whose sum is a value; None for any other value."""
    if not is_call(value, aten.add.Tensor) or len(value.args) != 2 or value.kwargs:
        return None
    first, second = value.args
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return None
    if any(constant(module, operand) is not None for operand in (first, second)):
        return None
    return (first, second) if shapes.get(first) == shapes.get(second) == shapes.get(value) else None


def _lower_quantizers(module: OperatorGraph, shapes: Shapes, overload: int) -> None:
    """Lower the quantizers to 8 bits that no kernel before them took, with their factors."""
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    for node in list(order):
        while (written := _readers(module, node, shapes)[0]) is not None:
            with module.graph.inserting_before(min(written.quantizers, key=lambda quantizer: order[quantizer])):
                scale = new_constant(module, "scale", written.scale)
                quantized = module.graph.call_function(
                    QUANTIZERS[overload], (node, scale, written.zero_point, written.dtype)
                )
            quantized.meta["onnx"] = written.quantizers[0].meta.get("onnx", "")
            written.replace_with(quantized)
            for quantizer in written.quantizers:
                module.graph.erase_node(quantizer)
            module.graph.eliminate_dead_code()


_FLOAT_OPERANDS: dict[Any, tuple[int, ...]] = {
    **dict.fromkeys(LINEARS, (5,)),
    **dict.fromkeys(NORMS, (0, 1)),
    **dict.fromkeys((*EMBEDDING_NORMS, *QUANTIZERS), ()),
    **dict.fromkeys(ATTENTIONS, (0, 1, 2, 3)),
}
"""The operands of the kernels that follow the type of values that are not quantized; parameters are float32."""

_IN_FLOAT32 = (
    quantize,
    dequantize_vector,
    decomposed.quantize_per_channel.default,
)


def _store_in_16_bits(
    module: OperatorGraph, specs: Iterable[TensorSpec], sizes: InputSizes, dtype: torch.dtype
) -> None:
    """Let layers and all that reads them compute in a 16-bit type.

    Values that come from constants and integers alone, such as the angles of rotary embeddings, stay in float32 until
    an operator reads them with a 16-bit value.
    """
    values = node_values(module, tuple(specs), sizes)
    floats = {node for node, value in values.items() if value.dtype is torch.float32}
    # The tables of embeddings are in that type, and so is their norm.
    half = {node for node, value in values.items() if value.dtype is dtype}
    casts: dict[fx.Node, fx.Node] = {}

    def cast(value: fx.Node) -> fx.Node:
        if value not in floats or value in half:
            return value
        if value not in casts:
            casts[value] = _cast(module, value, dtype)
        return casts[value]

    for node in list(module.graph.nodes):
        if node in floats and _is_input(node):
            half |= _read_in_16_bits(module, node, dtype)
        elif node.op != "call_function":
            continue
        elif is_call(node, *KERNELS):
            places = _FLOAT_OPERANDS[node.target]
            node.args = tuple(
                cast(value) if place in places and isinstance(value, fx.Node) else value
                for place, value in enumerate(node.args)
            )
            if is_call(node, *LINEARS) and node.args[9] is torch.float32:
                node.args = (*node.args[:9], dtype, node.args[10])
                half.add(node)
            elif is_call(node, *NORMS, *EMBEDDING_NORMS):
                half |= {item for item in node.users if item in floats}
            elif is_call(node, *ATTENTIONS) and node in floats:
                half.add(node)
        elif is_call(node, dequantize):
            node.kwargs = {"out_dtype": dtype}
            half.add(node)
        elif is_call(node, aten.embedding.default) and node.args[0] in floats:
            node.args = fx.node.map_arg(node.args, cast)
            half.add(node)
        elif any(value in half for value in node.all_input_nodes) and not is_call(node, *_IN_FLOAT32):
            node.args = fx.node.map_arg(node.args, cast)
            node.kwargs = fx.node.map_arg(node.kwargs, cast)
            if is_call(node, aten.to.dtype) and node.args[1] is torch.float32:
                node.args = (node.args[0], dtype)
            if node in floats:
                half.add(node)


def _cast(module: OperatorGraph, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Return a value in a 16-bit type; the lowest float32, which masks use, becomes the lowest number of the type."""
    limits = torch.finfo(dtype)
    tensor = constant(module, value)
    with module.graph.inserting_after(value):
        if tensor is not None:
            return new_constant(module, "floats", tensor.clamp(limits.min, limits.max).to(dtype))
        limited = module.graph.call_function(aten.clamp.default, (value, limits.min, limits.max))
    with module.graph.inserting_after(limited):
        return module.graph.call_function(aten.to.dtype, (limited, dtype))


def _is_input(node: fx.Node) -> bool:
    """Return whether a node is an input of the graph, or one that was converted to float32."""
    source: Any = node.args[0] if is_call(node, aten.to.dtype) else node
    return bool(source.op == "placeholder")


def _read_in_16_bits(module: OperatorGraph, node: fx.Node, dtype: torch.dtype) -> set[fx.Node]:
    """Let the readers of an input, except quantizers, read it in a 16-bit type; return the node of that type."""
    readers = [user for user in node.users if not is_call(user, *QUANTIZERS, *_IN_FLOAT32) and user.op != "output"]
    if not readers:
        return set()
    first = next(other for other in module.graph.nodes if other.op != "placeholder")
    with module.graph.inserting_before(first) if node.op == "placeholder" else module.graph.inserting_after(node):
        converted = module.graph.call_function(aten.to.dtype, (node, dtype))
    for reader in readers:
        reader.replace_input_with(node, converted)
    return {converted}
