"""Questions about ``torch.fx`` nodes that the passes share.

Shapes of a graph's values, found without computing: the operators run on tensors that have shapes and no data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TypeGuard

import torch
import torch.ao.quantization.fx._decomposed as _decomposed  # registers the operators
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from quantizer.engines.base import TensorSpec
from quantizer.engines.measure.benchmark import made_up_inputs
from quantizer.engines.torch_engine.graph_file import LoweredGraph
from quantizer.errors import EngineError

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


RunnableSizes = tuple[int, int, Mapping[str, int]]
"""The batch, the sequence, and sizes that are known by the name of their dimension."""

_SIZES = ((8, 128), (8, 64), (4, 32), (2, 16), (2, 8), (2, 4), (2, 2))
"""Batch and sequence, the largest first: a table of positions may be shorter. None is 1, which would broadcast."""


def runnable_sizes(
    module: LoweredGraph, specs: Sequence[TensorSpec], usual: Mapping[str, int] = MappingProxyType({})
) -> RunnableSizes:
    """Return sizes with which the graph runs."""
    known: Mapping[str, int] = {name: max(size, 2) for name, size in usual.items()}
    named = [(*_SIZES[0], known)] if usual else []
    for batch, sequence, sizes in (*named, *((*pair, {}) for pair in _SIZES)):
        try:
            node_shapes(module, specs, batch, sequence, sizes)
        except EngineError as error:
            refused = error
        else:
            return batch, sequence, sizes
    raise refused


def node_shapes(
    module: LoweredGraph,
    specs: Sequence[TensorSpec],
    batch: int,
    sequence: int,
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> dict[fx.Node, tuple[int, ...]]:
    """Return the shape of every tensor; arguments and errors as ``node_values``."""
    return {node: tuple(held.shape) for node, held in node_values(module, specs, batch, sequence, sizes).items()}


def node_values(
    module: LoweredGraph,
    specs: Sequence[TensorSpec],
    batch: int,
    sequence: int,
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> dict[fx.Node, torch.Tensor]:
    """Return for each node that makes a tensor one of its shape and type, without data."""
    arrays = made_up_inputs(specs, batch, sequence, sizes=sizes)
    with FakeTensorMode(), prepacking_without_data():
        inputs = [torch.empty(arrays[spec.name].shape, dtype=_dtype(arrays[spec.name])) for spec in specs]
        recorder = _Recorder(module)
        try:
            recorder.run(*inputs)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            first = str(error).partition("\n")[0]
            raise EngineError(f"the graph does not run at {batch} x {sequence}: {first}") from error
    return recorder.values


def _dtype(array: Any) -> torch.dtype:
    found: torch.dtype = torch.from_numpy(array).dtype
    return found


class _Recorder(fx.Interpreter):
    """Interpreter that keeps every tensor."""

    def __init__(self, module: LoweredGraph) -> None:
        super().__init__(module)
        self.values: dict[fx.Node, torch.Tensor] = {}

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        held = super().get_attr(target, args, kwargs)
        return torch.empty(held.shape, dtype=held.dtype)

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        if isinstance(made, torch.Tensor):
            self.values[n] = made
        return made


@contextmanager
def prepacking_without_data() -> Iterator[None]:
    """Let oneDNN's prepacking run on tensors without data inside the block; torch has no rule for it."""
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
