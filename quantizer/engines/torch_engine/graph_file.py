"""File of a torch engine: a graph as JSON and safetensors in a zip archive, and its interpreter.

    gpu.json             of an engine for a GPU: its options and measured tiles; its graph is lowered when it is loaded
    engine.json          inputs, outputs, nodes; type and shape of every constant
    weights.safetensors  constants of an eager engine
    compiled.pt2         Inductor's package instead of the constants: native code (``compiled.py``)

The archive is not compressed: quantized values and floats gain little, and reading would take longer.

A file may be malicious. Operators, types and keywords are looked up in fixed lists, and other names are replaced. No
source code is generated: ``torch.fx.GraphModule`` executes text of the graph, so nodes are interpreted instead.
"""

from __future__ import annotations

import io
import json
import operator
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.ao.quantization.fx._decomposed as _decomposed  # registers the operators
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import fx

from quantizer.errors import EngineError
from quantizer.export.onnx_import.graph_builder import OperatorGraph
from quantizer.export.qdq.onnx_file import TensorSpec
from quantizer.utils.cpu import COMPILED
from quantizer.utils.plain_values import decoded, json_values

del _decomposed

_ATEN = """
    abs.default acos.default acosh.default add.Scalar add.Tensor amax.default amin.default arange.default
    arange.start_step argmax.default argmin.default asin.default asinh.default atan.default atanh.default
    avg_pool1d.default avg_pool2d.default avg_pool3d.default batch_norm.default bitwise_and.Tensor bitwise_not.default
    bitwise_or.Tensor bitwise_xor.Tensor cat.default ceil.default celu.default clamp.Tensor clamp.default
    constant_pad_nd.default contiguous.default convolution.default cos.default cosh.default cumsum.default div.Tensor
    div.Tensor_mode einsum.default elu.default embedding.default eq.Tensor erf.default exp.default expand.default
    flatten.using_ints
    flip.default floor.default fmod.Tensor full.default gather.default ge.Tensor gelu.default group_norm.default
    gru.input gt.Tensor hardswish.default index.Tensor index_put.default instance_norm.default isinf.default
    isnan.default layer_norm.default le.Tensor leaky_relu.default linalg_vector_norm.default log.default log_softmax.int
    logical_and.default logical_not.default logical_or.default logical_xor.default logsumexp.default lstm.input
    lt.Tensor matmul.default max_pool1d.default max_pool2d.default max_pool3d.default maximum.default mean.dim
    minimum.default mish.default mul.Scalar mul.Tensor neg.default pad.default permute.default pixel_shuffle.default
    pow.Tensor_Tensor prod.dim_int reciprocal.default relu.default remainder.Tensor repeat.default reshape.default
    rms_norm.default rnn_relu.input rnn_tanh.input round.default scalar_tensor.default
    scaled_dot_product_attention.default scatter.src scatter_reduce.two select.int sigmoid.default
    sign.default sin.default sinh.default slice.Tensor softmax.int softplus.default split_with_sizes.default
    sqrt.default square.default squeeze.default squeeze.dims stack.default sub.Tensor sum.dim_IntList sym_numel.default
    sym_size.int tan.default tanh.default tensor_split.sections threshold.default to.dtype topk.default transpose.int
    tril.default triu.default unflatten.int unsqueeze.default upsample_bicubic2d.vec upsample_bilinear2d.vec
    upsample_linear1d.vec upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec upsample_trilinear3d.vec
    where.self
"""
_QUANTIZED = """
    dequantize_per_channel.default dequantize_per_tensor.default quantize_per_channel.default
    quantize_per_tensor.default
"""
_ONEDNN = """
    qconv_pointwise.default qconv_prepack.default qlinear_pointwise.binary qlinear_pointwise.default
    qlinear_prepack.default
"""
_PLAIN = {f"operator.{name}": getattr(operator, name) for name in ("add", "eq", "floordiv", "getitem", "mul", "sub")}
"""Operators on sizes and on tuples of results."""


def _overloads(namespace: str, names: str) -> dict[str, Any]:
    overloads = {}
    for name in names.split():
        packet, _, overload = name.partition(".")
        overloads[f"{namespace}.{name}"] = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return overloads


_ALLOWED = _PLAIN | _overloads("aten", _ATEN) | _overloads("quantized_decomposed", _QUANTIZED)
# torch without oneDNN lacks these operators and this backend.
_ALLOWED |= _overloads("onednn", _ONEDNN) if torch._C._has_mkldnn else {}
_NAMES = {target: name for name, target in _ALLOWED.items()}


def allowed_operator(name: str) -> Any:
    """Return the operator of a name; raise for a name outside the list."""
    if name not in _ALLOWED:
        raise ValueError(f"operator {name[:200]!r} is not allowed in an engine")
    return _ALLOWED[name]


def operator_name(target: Any) -> str:
    """Return the name of an operator in a file."""
    if target not in _NAMES:
        raise ValueError(f"operator {target} is not allowed in an engine file")
    return _NAMES[target]


def program(module: OperatorGraph) -> Callable[..., tuple[Any, ...]]:
    """Return a thread-safe function of the graph's inputs by position.

    It drops each value after its last use.
    """
    nodes = list(module.graph.nodes)
    places = {node: place for place, node in enumerate(nodes)}
    last = {source: node for node in nodes for source in node.all_input_nodes}
    start: list[Any] = [getattr(module, str(node.target)) if node.op == "get_attr" else None for node in nodes]
    inputs = [places[node] for node in nodes if node.op == "placeholder"]
    outputs = [places[node] for node in nodes[-1].args[0]]
    steps = []
    for node in nodes:
        if node.op != "call_function":
            continue
        dropped = [
            places[source] for source in node.all_input_nodes if last[source] is node and source.op != "get_attr"
        ]
        positional = _holes(enumerate(node.args), places)
        keywords = _holes(node.kwargs.items(), places)
        steps.append((node.target, list(node.args), dict(node.kwargs), positional, keywords, places[node], dropped))

    def run(*arguments: Any) -> tuple[Any, ...]:
        values = start.copy()
        for place, value in zip(inputs, arguments, strict=True):
            values[place] = value
        for target, args, kwargs, positional, keywords, place, dropped in steps:
            call_args = args.copy()
            for position, source in positional:
                call_args[position] = values[source] if type(source) is int else source(values)
            if keywords:
                kwargs = {**kwargs, **{position: source(values) for position, source in keywords}}
            values[place] = target(*call_args, **kwargs)
            for source in dropped:
                values[source] = None
        return tuple(values[place] for place in outputs)

    return run


def _holes(arguments: Any, places: Mapping[fx.Node, int]) -> list[tuple[Any, Any]]:
    """Return the arguments with node values: position or name, and the value's index or a function of all values."""
    holes: list[tuple[Any, Any]] = []
    for position, value in arguments:
        if isinstance(value, fx.Node) and isinstance(position, int):
            holes.append((position, places[value]))
        elif _reads_nodes(value):
            holes.append((position, _resolver(value, places)))
    return holes


def _reads_nodes(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_reads_nodes(item) for item in value)
    return isinstance(value, fx.Node)


def _resolver(value: Any, places: Mapping[fx.Node, int]) -> Callable[[list[Any]], Any]:
    """Return a function that replaces nodes in an argument by their values."""
    if isinstance(value, fx.Node):
        place = places[value]
        return lambda values: values[place]
    if isinstance(value, list | tuple):
        items = [_resolver(item, places) for item in value]
        return lambda values: [item(values) for item in items]
    return lambda values: value


GPU = "gpu.json"
DESCRIPTION = "engine.json"
WEIGHTS = "weights.safetensors"
_FORMAT = 1
_TYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "bool"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "float8_e4m3fn"),
    )
}
_INPUT_TYPES = frozenset(_TYPES) - {"bfloat16", "float8_e4m3fn"}
_MAX_NESTING = 3
"""Maximum nesting of lists in arguments."""
_REFUSED_ARGUMENTS = ("Device", "Layout", "Generator", "Storage", "Stream", "MemoryFormat")
"""Types of arguments that an engine never passes to an operator."""


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """Options of an engine for a GPU.

    Attributes:
        precision: type of non-quantized operations, ``float16`` or ``bfloat16``.
        compiled: whether Inductor compiles the graph at its first call.
        tiles: the file of a ``TileTable`` with the methods that were measured for its linear layers; empty: none.
        usual: usual sizes of dynamic dimensions, by name.
    """

    precision: str
    compiled: bool = False
    tiles: str = ""
    usual: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GraphFile:
    """Contents of an engine file.

    Attributes:
        module: the graph; constants of a compiled engine are on the device ``meta``, without data.
        inputs: inputs in order.
        outputs: names of the outputs, in order.
        compiled: package of a compiled engine; None for an eager engine.
        torch_version: torch version that wrote the file.
        gpu: options of an engine for a GPU, whose graph is not lowered; None for an engine for a CPU.
    """

    module: OperatorGraph
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[str, ...]
    compiled: bytes | None
    torch_version: str
    gpu: GpuOptions | None = None

    def packed(self) -> bytes:
        """Return the archive."""
        try:
            return _pack(self)
        except (TypeError, ValueError) as error:
            raise EngineError(f"the graph cannot be written to an engine file: {error}") from error


@dataclass(frozen=True, slots=True)
class _Input:
    name: str
    dtype: str
    shape: tuple[int | None, ...]
    dimensions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Node:
    op: Literal["placeholder", "get_attr", "call_function", "output"]
    name: str
    target: str
    args: list[Any]
    kwargs: Mapping[str, Any]
    onnx: str


@dataclass(frozen=True, slots=True)
class _Description:
    format: int
    torch: str
    inputs: tuple[_Input, ...]
    outputs: tuple[str, ...]
    constants: Mapping[str, tuple[str, tuple[int, ...]]]
    nodes: tuple[_Node, ...]


def _pack(file: GraphFile) -> bytes:
    constants = dict(_with_own_memory((str(name), tensor.contiguous()) for name, tensor in file.module.named_buffers()))
    description = {
        "format": _FORMAT,
        "torch": file.torch_version,
        "inputs": [
            {"name": spec.name, "dtype": spec.dtype.name, "shape": spec.shape, "dimensions": spec.dimensions}
            for spec in file.inputs
        ],
        "outputs": file.outputs,
        "constants": {name: [_type_name(array.dtype), list(array.shape)] for name, array in constants.items()},
        "nodes": [_node_entry(node) for node in file.module.graph.nodes],
    }
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        if file.gpu is not None:
            # The first bytes of a file name its backend.
            archive.writestr(GPU, json.dumps(asdict(file.gpu)))
        archive.writestr(DESCRIPTION, json.dumps(description))
        if file.compiled is None:
            archive.writestr(WEIGHTS, save_tensors(constants))
        else:
            archive.writestr(COMPILED, file.compiled)
    return stream.getvalue()


def _with_own_memory(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors that do not share memory, as safetensors requires."""
    used: set[int] = set()
    for name, tensor in tensors:
        address = tensor.untyped_storage().data_ptr()
        yield name, tensor.clone() if address in used else tensor
        used.add(address)


def unpack(content: bytes | memoryview) -> GraphFile:
    """Return the contents of an archive of ``GraphFile.packed``."""
    try:
        parts = _parts(content)
        plain = json_values(parts[DESCRIPTION])
        if isinstance(plain, dict) and plain.get("format") != _FORMAT:
            raise EngineError(f"it has the format {plain.get('format')!r}, but this release reads format {_FORMAT}")
        description: _Description = decoded(_Description, plain, "engine")
        compiled = parts.get(COMPILED)
        if compiled is None:
            constants: Mapping[str, torch.Tensor] = load_tensors(parts[WEIGHTS])
        else:
            constants = {name: _empty(*shape_and_type) for name, shape_and_type in description.constants.items()}
        inputs = tuple(_spec(entry, f"engine.inputs[{place}]") for place, entry in enumerate(description.inputs))
        for kind, names in (("inputs", [spec.name for spec in inputs]), ("outputs", description.outputs)):
            if len(set(names)) != len(names):
                raise ValueError(f"engine.{kind}: names must be unique")
        module = _read_graph(description, constants)
        gpu = decoded(GpuOptions, json_values(parts[GPU]), "gpu") if GPU in parts else None
        return GraphFile(module, inputs, description.outputs, compiled, description.torch, gpu)
    except (LookupError, RuntimeError, TypeError, ValueError, SafetensorError) as error:
        raise EngineError(f"it does not contain a graph of this package ({type(error).__name__}: {error})") from error


def _parts(content: bytes | memoryview) -> dict[str, bytes]:
    """Return the files of the archive."""
    known = {GPU, DESCRIPTION, WEIGHTS, COMPILED}
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = [entry for entry in archive.infolist() if entry.filename in known]
            if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries):
                raise ValueError("a file in the archive is compressed or encrypted")
            parts = {entry.filename: archive.read(entry) for entry in entries}
    except (zipfile.BadZipFile, LookupError, NotImplementedError, OSError, OverflowError, EOFError) as error:
        raise ValueError(f"the archive is damaged: {error}") from error
    if DESCRIPTION not in parts or not (WEIGHTS in parts or COMPILED in parts):
        raise ValueError(f"the archive lacks {DESCRIPTION}, or both {WEIGHTS} and {COMPILED}")
    return parts


def _spec(entry: _Input, place: str) -> TensorSpec:
    if entry.dtype not in _INPUT_TYPES:
        raise ValueError(f"{place}.dtype: expected a numeric type, got {entry.dtype[:100]!r}")
    if any(size is not None and size < 0 for size in entry.shape) or len(entry.dimensions) not in (0, len(entry.shape)):
        raise ValueError(f"{place}: expected sizes of 0 or more, and a name for each axis or no names")
    return TensorSpec(entry.name, np.dtype(entry.dtype), entry.shape, entry.dimensions)


def _node_entry(node: fx.Node) -> dict[str, Any]:
    return {
        "op": node.op,
        "name": node.name,
        "target": operator_name(node.target) if node.op == "call_function" else str(node.target),
        "args": _encoded(node.args),
        "kwargs": {"items": {key: _encoded(item) for key, item in node.kwargs.items()}},
        "onnx": node.meta.get("onnx", ""),
    }


def _encoded(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, torch.dtype):
        return {"dtype": _type_name(value)}
    if isinstance(value, list | tuple):
        return [_encoded(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be written to an engine file")


def _decoded(value: Any, nodes: Mapping[str, fx.Node], depth: int = 0) -> Any:
    if isinstance(value, list):
        if depth > _MAX_NESTING:
            raise ValueError(f"an argument has more than {_MAX_NESTING} nested lists")
        return [_decoded(item, nodes, depth + 1) for item in value]
    if not isinstance(value, dict):
        return decoded(bool | int | float | str | None, value, "argument")
    match value:
        case {"node": str(name), **rest} if not rest:
            return nodes[name]
        case {"dtype": str(name), **rest} if not rest:
            return _type(name)
    raise ValueError("an argument is not a number, text, type, node or list of these")


def _read_graph(description: _Description, constants: Mapping[str, torch.Tensor]) -> OperatorGraph:
    """Return the graph with generated names."""
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    buffers = {name: f"c{index}" for index, name in enumerate(constants)}
    inputs = 0
    for index, entry in enumerate(description.nodes):
        where = f"engine.nodes[{index}]"
        if entry.name in nodes or (entry.op == "output") != (index == len(description.nodes) - 1):
            raise ValueError(f"{where}: expected unique names, and one output at the end")
        args = [_decoded(value, nodes) for value in entry.args]
        kwargs = _keywords(entry.kwargs, nodes, where)
        if entry.op == "call_function":
            target = allowed_operator(entry.target)
            _check_call(target, args, kwargs, where)
            node = graph.call_function(target, tuple(args), kwargs)
        elif entry.op == "placeholder":
            if inputs != index:
                raise ValueError(f"{where}: expected the inputs before all other nodes")
            node, inputs = graph.placeholder(f"input_{inputs}"), inputs + 1
        elif entry.op == "get_attr":
            node = graph.get_attr(buffers[entry.target])
        else:
            node = graph.output(_outputs(args, description, where))
        node.meta["onnx"] = entry.onnx
        nodes[entry.name] = node
    if not description.nodes or inputs != len(description.inputs):
        raise ValueError(f"engine.nodes: expected {len(description.inputs)} inputs, got {inputs}")
    graph.lint()
    return OperatorGraph(graph, {buffers[name]: tensor for name, tensor in constants.items()})


def _keywords(entry: Mapping[str, Any], nodes: Mapping[str, fx.Node], where: str) -> dict[str, Any]:
    items = entry.get("items")
    if set(entry) != {"items"} or not isinstance(items, dict):
        raise ValueError(f"{where}.kwargs: expected an object with the field items")
    return {name: _decoded(value, nodes) for name, value in items.items()}


def _outputs(args: Sequence[Any], description: _Description, where: str) -> tuple[fx.Node, ...]:
    outputs = args[0] if len(args) == 1 else None
    if (
        not isinstance(outputs, list)
        or len(outputs) != len(description.outputs)
        or not all(isinstance(item, fx.Node) for item in outputs)
    ):
        raise ValueError(f"{where}.args: expected a list of {len(description.outputs)} nodes")
    return tuple(outputs)


def _check_call(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> None:
    """Raise for unknown arguments, for text where none is expected, and for devices and similar arguments."""
    if not isinstance(target, torch._ops.OpOverload):
        nodes = sum(isinstance(value, fx.Node) for value in args)
        if len(args) != 2 or kwargs or not nodes or not all(isinstance(value, fx.Node | int) for value in args):
            raise ValueError(f"{where}.args: expected two nodes, or a node and an integer")
        return
    arguments = target._schema.arguments
    named = {argument.name: argument for argument in arguments}
    if len(args) > len(arguments) or not set(kwargs) <= set(named):
        raise ValueError(f"{where}: unexpected arguments for {target}")
    missing = [
        parameter.name
        for parameter in arguments[len(args) :]
        if not parameter.has_default_value() and parameter.name not in kwargs
    ]
    if missing:
        raise ValueError(f"{where}: {target} lacks the arguments {', '.join(missing)}")
    passed = [*zip(arguments, args, strict=False), *((named[name], value) for name, value in kwargs.items())]
    for argument, value in passed:
        kind = str(argument.real_type)
        if _holds_text(value) and "str" not in kind:
            raise ValueError(f"{where}: the argument {argument.name} of {target} must not be text")
        if value is not None and any(word in kind for word in _REFUSED_ARGUMENTS):
            raise ValueError(f"{where}: the argument {argument.name} of {target} is not allowed")


def _holds_text(value: Any) -> bool:
    return any(map(_holds_text, value)) if isinstance(value, list) else isinstance(value, str)


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _type(name: str) -> torch.dtype:
    if name not in _TYPES:
        raise ValueError(f"{name[:100]!r} is not a supported tensor type")
    return _TYPES[name]


def _empty(dtype: str, shape: Sequence[int]) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=_type(dtype), device="meta")
