"""Shapes of a graph's values, found without computing: the operators run on tensors that have shapes and no data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from quantizer.engines.base import TensorSpec
from quantizer.engines.measure.dummy_inputs import made_up_inputs
from quantizer.engines.torch_engine.lowered_graph import LoweredGraph
from quantizer.engines.torch_engine.lowering.matching import CONVOLUTION_PREPACK, LINEAR_PREPACK
from quantizer.errors import EngineError

RunnableSizes = tuple[int, int, Mapping[str, int]]
"""The batch, the sequence, and sizes that are known by the name of their dimension."""

_SIZES = ((8, 128), (8, 64), (4, 32), (2, 16), (2, 8), (2, 4), (2, 2))
"""Batch and sequence, the largest first: a table of positions may be shorter. None is 1, which would broadcast."""


def runnable_sizes(
    module: LoweredGraph, specs: Sequence[TensorSpec], usual: Mapping[str, int] = MappingProxyType({})
) -> RunnableSizes:
    """Return sizes with which the graph runs.

    Args:
        module: the graph.
        specs: its inputs.
        usual: sizes by name that are tried first; 2 in the place of 1, which would broadcast.

    Raises:
        EngineError: it runs with none of those that were tried; the message is that of the last.
    """
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
    """Return for each node that makes a tensor one of its shape and type, without data.

    Args:
        module: the graph; its constants may be on the device ``meta``.
        specs: its inputs.
        batch: size of the first dimension of an input, where it is dynamic.
        sequence: size of its other dynamic dimensions.
        sizes: sizes of dynamic dimensions by name, where they are known; they come before the two.

    Raises:
        EngineError: the operators do not fit together with these sizes.
    """
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
    """Interpreter that keeps every tensor.

    Attributes:
        values: by the node that has made them.
    """

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
