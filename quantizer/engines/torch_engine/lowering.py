"""Lowering of a Q/DQ graph of torch operators to oneDNN's integer kernels.

``lower`` runs all passes in order: integer kernels replace operations between Q and DQ, and then absorb the residual
add, the activation and the quantizer behind them.

With a [.., K] the quantized activation, its scale s and zero point z, w [K, N] the quantized weight with one scale t_n
per column, and b [N] the bias: DQ(a) @ DQ(w) + b = s (a - z) @ w t + b. The kernel accumulates in 32 bits, subtracts z
with the column sums of w, and applies the fused operators to its accumulators.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeGuard

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from quantizer.engines.base import InputSizes
from quantizer.engines.measure import made_up_inputs
from quantizer.errors import EngineError
from quantizer.export.onnx_import.graph_builder import OperatorGraph
from quantizer.export.onnx_import.importer import Imported
from quantizer.export.qdq.onnx_file import TensorSpec

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
    """Return whether a value calls any of these operators."""
    return isinstance(value, fx.Node) and value.op == "call_function" and value.target in targets


def only_reader(node: fx.Node) -> fx.Node | None:
    """Return the single node that reads a value once; None for any other value."""
    readers = list(node.users)
    if len(readers) != 1:
        return None
    reads: list[fx.Node] = []
    fx.node.map_arg((readers[0].args, readers[0].kwargs), reads.append)
    return readers[0] if sum(read is node for read in reads) == 1 else None


def constant(module: OperatorGraph, value: Any) -> torch.Tensor | None:
    """Return the tensor of a constant; None for a computed value."""
    if not isinstance(value, fx.Node) or value.op != "get_attr":
        return None
    tensor: torch.Tensor = module.get_buffer(str(value.target))
    return tensor


def number(module: OperatorGraph, value: Any) -> float | None:
    """Return a plain number, or the number of a constant with one element; None for any other value."""
    if isinstance(value, int | float):
        return float(value)
    tensor = constant(module, value)
    return float(tensor) if tensor is not None and tensor.numel() == 1 else None


def new_constant(module: OperatorGraph, name: str, tensor: torch.Tensor) -> fx.Node:
    """Add a constant at the insertion point and return the node that reads it; equal tensors are shared."""
    names = {id(buffer): identifier for identifier, buffer in module.named_buffers()}
    identifier = names.get(id(tensor), f"c{len(names)}_{name}")
    module.register_buffer(identifier, tensor)
    return module.graph.get_attr(identifier)


def quantized_weight(
    module: OperatorGraph, value: Any, axis: int, rank: int, dtype: torch.dtype = torch.int8
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return quantized values with ``rank`` axes and one scale per index along ``axis``; None for any other value.

    A scale of the whole tensor is repeated. Integer kernels do not support zero points of weights.
    """
    if not is_call(value, dequantize, dequantize_vector):
        return None
    integers = constant(module, value.args[0])
    if integers is None or integers.dim() != rank or integers.dtype != dtype:
        return None
    if value.target is dequantize:
        return (integers, torch.full((integers.shape[axis],), _float(value.args[1]))) if value.args[2] == 0 else None
    scales, points = constant(module, value.args[1]), constant(module, value.args[2])
    if scales is None or points is None or bool(points.any()) or value.args[3] not in (axis, axis - rank):
        return None
    return integers, scales.float()


def _float(value: Any) -> float:
    return float(value)


def replace(old: fx.Node, new: fx.Node) -> None:
    """Let the readers of a node read another one, which takes over its origin."""
    new.meta.setdefault("onnx", old.meta.get("onnx", ""))
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


_SIZES = ((8, 128), (8, 64), (4, 32), (2, 16), (2, 8), (2, 4), (2, 2))
"""Batch and sequence sizes to try, largest first, because position tables may be short; 1 would broadcast."""


def runnable_sizes(
    module: OperatorGraph, specs: Sequence[TensorSpec], usual: Mapping[str, int] = MappingProxyType({})
) -> tuple[InputSizes, dict[fx.Node, torch.Tensor]]:
    """Return sizes with which the graph runs, and its tensors there, as ``node_values`` does."""
    named = [InputSizes(*_SIZES[0], {name: max(size, 2) for name, size in usual.items()})] if usual else []
    for sizes in (*named, *(InputSizes(*pair) for pair in _SIZES)):
        try:
            return sizes, node_values(module, specs, sizes)
        except EngineError as error:
            last_error = error
    raise last_error


def node_shapes(
    module: OperatorGraph,
    specs: Sequence[TensorSpec],
    sizes: InputSizes,
) -> dict[fx.Node, tuple[int, ...]]:
    """Return the shape of every tensor; arguments and errors as in ``node_values``."""
    return {node: tuple(tensor.shape) for node, tensor in node_values(module, specs, sizes).items()}


def node_values(
    module: OperatorGraph,
    specs: Sequence[TensorSpec],
    sizes: InputSizes,
) -> dict[fx.Node, torch.Tensor]:
    """Return a tensor without data for each node with a tensor result, with its shape and type."""
    arrays = made_up_inputs(specs, sizes)
    with FakeTensorMode(), prepacking_without_data():
        inputs = [torch.empty(arrays[spec.name].shape, dtype=_dtype(arrays[spec.name])) for spec in specs]
        recorder = _Recorder(module)
        try:
            recorder.run(*inputs)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            first = str(error).partition("\n")[0]
            raise EngineError(f"the graph does not run at {sizes.batch} x {sizes.sequence}: {first}") from error
    return recorder.values


def _dtype(array: Any) -> torch.dtype:
    dtype: torch.dtype = torch.from_numpy(array).dtype
    return dtype


class _Recorder(fx.Interpreter):
    """Interpreter that records every tensor."""

    def __init__(self, module: OperatorGraph) -> None:
        super().__init__(module)
        self.values: dict[fx.Node, torch.Tensor] = {}

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        tensor = super().get_attr(target, args, kwargs)
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, torch.Tensor):
            self.values[n] = result
        return result


@contextmanager
def prepacking_without_data() -> Iterator[None]:
    """Let oneDNN's prepacking run on fake tensors inside the block; torch has no rule for it."""
    make: Any = torch.library.Library
    library = make("onednn", "FRAGMENT")
    rules: dict[Any, Any] = {LINEAR_PREPACK: _packed_linear, CONVOLUTION_PREPACK: _packed_convolution}
    for target, rule in rules.items():
        torch.library.register_fake(target.name(), rule, lib=library, allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def _packed_linear(weight: torch.Tensor, x_shape: Any = None) -> torch.Tensor:
    return weight.new_empty((weight.shape[1], weight.shape[0]))


def _packed_convolution(weight: torch.Tensor, *_window: Any, x_shape: Any = None) -> torch.Tensor:
    return weight.new_empty(weight.shape)


def lower_linears(module: OperatorGraph) -> int:
    """Replace linear layers with two dequantized operands; return their number."""
    count = 0
    packed: dict[fx.Node, fx.Node] = {}
    for node in list(module.graph.nodes):
        if is_call(node, aten.matmul.default) and is_call(node.args[0], dequantize):
            weight = quantized_weight(module, node.args[1], axis=1, rank=2)
            if weight is not None:
                _lower_linear(module, node, *weight, packed)
                count += 1
    return count


def _lower_linear(
    module: OperatorGraph,
    product: fx.Node,
    integers: torch.Tensor,
    scales: torch.Tensor,
    packed: dict[fx.Node, fx.Node],
) -> None:
    """Lower one linear layer."""
    bias, last = bias_of(module, product, len(scales))
    activation, weight = product.args[:2]
    assert isinstance(activation, fx.Node)
    assert isinstance(weight, fx.Node)
    with module.graph.inserting_before(last):
        if weight not in packed:
            # Prepacking expects [N, K].
            stored = new_constant(module, "weight", integers.t().contiguous())
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
        kernel = module.graph.call_function(LINEAR, arguments)
        kernel.meta["onnx"] = product.meta.get("onnx", "")
    replace(last, kernel)


def bias_of(module: OperatorGraph, product: fx.Node, width: int) -> tuple[torch.Tensor | None, fx.Node]:
    """Return the bias [width] that alone reads a product, and the sum; without one, None and the product."""
    reader = only_reader(product)
    if is_call(reader, aten.add.Tensor):
        bias = constant(module, reader.args[1] if reader.args[0] is product else reader.args[0])
        if bias is not None and bias.shape == (width,):
            return bias, reader
    return None, product


def lower_convolutions(module: OperatorGraph) -> int:
    """Replace convolutions with two dequantized operands; return their number."""
    _move_padding(module)
    count = 0
    for node in list(module.graph.nodes):
        if is_call(node, aten.convolution.default) and is_call(node.args[0], dequantize) and not node.args[6]:
            stride: Any = node.args[3]
            weight = quantized_weight(module, node.args[1], axis=0, rank=2 + len(stride))
            if weight is not None and len(stride) < 3:
                _lower_convolution(module, node, *weight)
                count += 1
    return count


def _move_padding(module: OperatorGraph) -> None:
    """Move padding of a convolution input before its DQ, with the zero point as value.

    The kernels pad both ends equally, so a convolution with uneven padding has a separate padding.
    """
    for node in list(module.graph.nodes):
        if not is_call(node, aten.constant_pad_nd.default) or not is_call(node.args[0], dequantize):
            continue
        if not any(is_call(reader, aten.convolution.default) for reader in node.users) or node.args[2] != 0:
            continue
        integers, scale, zero, *limits = node.args[0].args
        with module.graph.inserting_before(node):
            padded = module.graph.call_function(aten.constant_pad_nd.default, (integers, node.args[1], zero))
            dequantized = module.graph.call_function(dequantize, (padded, scale, zero, *limits))
        padded.meta["onnx"] = node.meta.get("onnx", "")
        replace(node, dequantized)


def _lower_convolution(module: OperatorGraph, node: fx.Node, integers: torch.Tensor, scales: torch.Tensor) -> None:
    activation, bias = node.args[0], constant(module, node.args[2])
    assert isinstance(activation, fx.Node)
    source, scale, zero = activation.args[:3]
    window = (*node.args[3:6], node.args[8])
    with module.graph.inserting_before(node):
        stored = new_constant(module, "weight", integers)
        steps = new_constant(module, "scales", scales)
        packed = module.graph.call_function(CONVOLUTION_PREPACK, (stored, steps, scale, zero, *window, None))
        points = new_constant(module, "zero_points", torch.zeros(len(scales), dtype=torch.int64))
        added = None if bias is None else new_constant(module, "bias", bias.float())
        kernel = module.graph.call_function(
            CONVOLUTION,
            (source, scale, zero, packed, steps, points, added, *window, 1.0, 0, torch.float32, "none", [], ""),
        )
    replace(node, kernel)


def merge_linears(module: OperatorGraph) -> int:
    """Merge linear layers that read the same quantized values and write plain floats; return their number."""
    groups: dict[tuple[object, ...], list[fx.Node]] = defaultdict(list)
    for node in module.graph.nodes:
        if is_call(node, LINEAR) and node.args[9] is torch.float32 and node.args[10] == "none":
            groups[*node.args[:3], node.args[6] is None].append(node)
    return sum(_merge(module, members) for members in groups.values() if len(members) > 1)


def _merge(module: OperatorGraph, members: list[fx.Node]) -> int:
    first = members[0]
    parts = [_constants(module, node) for node in members]
    weights, scales, biases = zip(*parts, strict=True)
    widths = [len(scale) for scale in scales]
    with module.graph.inserting_before(first):
        stored = new_constant(module, "weight", torch.cat(weights))
        packed = module.graph.call_function(LINEAR_PREPACK, (stored, None))
        bias = None if biases[0] is None else new_constant(module, "bias", torch.cat(biases))
        zeros = torch.zeros(sum(widths), dtype=torch.int64)
        merged = module.graph.call_function(
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
        merged.meta["onnx"] = ", ".join(node.meta.get("onnx", "") for node in members)
        start = 0
        for node, width in zip(members, widths, strict=True):
            part = module.graph.call_function(aten.slice.Tensor, (merged, -1, start, start + width))
            part.meta["onnx"] = node.meta.get("onnx", "")
            node.replace_all_uses_with(part)
            start += width
    for node in members:
        module.graph.erase_node(node)
    return len(members)


def _constants(module: OperatorGraph, node: fx.Node) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    packed = node.args[3]
    assert isinstance(packed, fx.Node)
    weight, scale = constant(module, packed.args[0]), constant(module, node.args[4])
    assert weight is not None
    assert scale is not None
    return weight, scale, None if node.args[6] is None else constant(module, node.args[6])


_OUTPUT: dict[Any, int] = {LINEAR: 7, CONVOLUTION: 11, LINEAR_ADD: 8}
"""Index of the output scale among the arguments; zero point and type follow."""


@dataclass(frozen=True, slots=True)
class _Activation:
    """Activation in the notation of the kernels."""

    name: str
    scalars: tuple[float, ...] = ()
    algorithm: str = ""


def fuse_activations(module: OperatorGraph) -> int:
    """Fuse activations with a single integer kernel before them; return their number."""
    count = 0
    for node in list(module.graph.nodes):
        reader = only_reader(node) if is_call(node, LINEAR, CONVOLUTION) and _is_plain(node) else None
        activation = None if reader is None else _activation(node, reader)
        if reader is not None and activation is not None:
            start = _OUTPUT[node.target] + 3
            node.args = (*node.args[:start], activation.name, list(activation.scalars), activation.algorithm)
            reader.replace_all_uses_with(node)
            module.graph.erase_node(reader)
            count += 1
    return count


def _is_plain(node: fx.Node) -> bool:
    """Return whether an integer kernel writes floats without fused operators."""
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


def fuse_residual_adds(module: OperatorGraph, shapes: Mapping[fx.Node, tuple[int, ...]]) -> int:
    """Fuse float adds with the linear layer before them; return their number.

    Args:
        shapes: shape of each node's result in a run; only equal shapes are fused, without broadcasting.
    """
    count = 0
    for node in list(module.graph.nodes):
        reader = only_reader(node) if is_call(node, LINEAR) and _is_plain(node) else None
        if not is_call(reader, aten.add.Tensor) or len(reader.args) != 2:
            continue
        other = reader.args[1] if reader.args[0] is node else reader.args[0]
        if not isinstance(other, fx.Node) or other not in shapes or shapes[other] != shapes[reader]:
            continue
        with module.graph.inserting_before(reader):
            # The kernel ignores strides; contiguous() of a contiguous tensor costs nothing.
            contiguous = module.graph.call_function(aten.contiguous.default, (other,))
            arguments = (*node.args[:6], contiguous, *node.args[6:10], 1.0, 0, "add", 1.0, "none", [], "")
            kernel = module.graph.call_function(LINEAR_ADD, arguments)
            kernel.meta["onnx"] = node.meta.get("onnx", "")
        replace(reader, kernel)
        module.graph.erase_node(node)
        count += 1
    return count


def fuse_quantizers(module: OperatorGraph) -> int:
    """Let an integer kernel write the quantized values of its only reader; return the number of quantizers."""
    count = 0
    for node in list(module.graph.nodes):
        if not is_call(node, LINEAR, CONVOLUTION):
            continue
        start, reader = _OUTPUT[node.target], only_reader(node)
        if node.args[start + 2] is torch.float32 and is_call(reader, quantize):
            written = (*reader.args[1:3], reader.args[5])
            node.args = (*node.args[:start], *written, *node.args[start + 3 :])
            reader.replace_all_uses_with(node)
            module.graph.erase_node(reader)
            count += 1
    return count


_SWAPPED = [[0, 1, 3, 2], [0, 2, 3, 1]]
"""Permutations that result in k^T [batch, heads, d, L]: from k, and from the input of k."""


def fuse_attention(module: OperatorGraph) -> int:
    """Fuse every attention of the graph; return their number."""
    count = 0
    for node in list(module.graph.nodes):
        product = only_reader(node) if is_call(node, aten.softmax.int) else None
        if is_call(product, aten.matmul.default) and product.all_input_nodes[0] is node:
            count += _fuse(module, product, node)
    return count


def _fuse(module: OperatorGraph, product: fx.Node, softmax: fx.Node) -> bool:
    if softmax.args[1] not in (-1, 3) or is_call(product.args[1], dequantize):
        return False
    scores, mask = softmax.args[0], None
    if is_call(scores, aten.add.Tensor):
        scores, mask = scores.args[:2]
        if not _is_scores(module, scores):
            scores, mask = mask, scores
    parts = _scores(module, scores)
    if parts is None:
        return False
    query, keys, scale = parts
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


def _is_scores(module: OperatorGraph, value: Any) -> bool:
    return _scores(module, value) is not None


def _scores(module: OperatorGraph, value: Any) -> tuple[Any, Any, float] | None:
    """Return q, k^T and the scale of attention scores; None for any other value."""
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


def _untransposed(module: OperatorGraph, keys: Any) -> fx.Node | None:
    """Return k [batch, heads, L, d] if k^T is a known permutation; None otherwise."""
    if not is_call(keys, aten.permute.default) or keys.args[1] not in _SWAPPED:
        return None
    source = keys.args[0]
    if keys.args[1] == _SWAPPED[0]:
        return source if isinstance(source, fx.Node) else None
    with module.graph.inserting_before(keys):
        return module.graph.call_function(aten.permute.default, (source, [0, 2, 1, 3]))


def lower(imported: Imported, usual: Mapping[str, int] = MappingProxyType({})) -> InputSizes:
    """Lower a graph in place; return sizes with which it runs: the usual sizes if known, by name."""
    module = imported.module
    sizes, _ = runnable_sizes(module, imported.inputs, usual)
    fuse_attention(module)
    lower_linears(module)
    lower_convolutions(module)
    unpack_constants(module)
    merge_linears(module)
    fuse_residual_adds(module, node_shapes(module, imported.inputs, sizes))
    fuse_activations(module)
    fuse_quantizers(module)
    module.graph.eliminate_dead_code()
    drop_unread_constants(module)
    return sizes


def unpack_constants(module: OperatorGraph) -> None:
    """Replace dequantized constants without an integer kernel, such as embedding tables, by floats."""
    module.graph.eliminate_dead_code()
    for node in list(module.graph.nodes):
        operands = [constant(module, value) for value in node.all_input_nodes]
        if is_call(node, dequantize, dequantize_vector) and all(operand is not None for operand in operands):
            tensors = dict(zip(node.all_input_nodes, operands, strict=True))
            values = [tensors[value] if isinstance(value, fx.Node) else value for value in node.args]
            with module.graph.inserting_before(node), torch.no_grad():
                floats = new_constant(module, "floats", _dequantized(node.target, values))
            replace(node, floats)


def _dequantized(unpack: Any, values: list[Any]) -> torch.Tensor:
    """Return a dequantized constant; torch's operators do not take FP8 with one scale per channel."""
    codes, scale, _, *others = values
    if codes.is_floating_point() and unpack is dequantize_vector:
        result = codes.float() * scale.reshape([-1 if axis == others[0] else 1 for axis in range(codes.dim())])
    else:
        result = unpack(*values)
    assert isinstance(result, torch.Tensor)
    return result


def drop_unread_constants(module: OperatorGraph) -> None:
    """Delete the constants that no node reads."""
    read = {node.target for node in module.graph.nodes if node.op == "get_attr"}
    for name in [name for name, _ in module.named_buffers() if name not in read]:
        delattr(module, name)
