"""Origins of tensors: the layer, MatMul, add or softmax before one, or a computation from parameters only.

The origin of a tensor is the last site that computed it or its inputs. A dispatch mode sees every operation below
Python and passes the origin of the inputs on to the result. The table of origins is keyed by identity and keeps no
tensor alive; nothing is stored on tensors. The mode runs for every operation of a pass, so it does little for each.

``OutputReaders`` finds the values that other operations read of a convolution's output. A ReLU or a move (max pooling,
a reshape) commutes with quantization, so an engine computes it in integers before the output quantizer.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from quantizer.observe.completeness import ProductCounter
from quantizer.observe.float16_overflow import OverflowTracker
from quantizer.proxy.site import Site
from quantizer.proxy.weight import RANDOM, Computation, Step, is_transformed, plain_arguments, why_not_repeated
from quantizer.rewrite.torch_products import COMPOSITE, PRODUCTS, is_composite, product_name

_DEEPEST = 100
"""The largest depth of nested calls: a weight takes a few, a recurrence thousands."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A parameter or buffer of the model."""

    path: str


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A call of an operation."""

    function: Any
    args: Any
    keywords: Any
    why: str | None
    depth: int


@dataclass(frozen=True, slots=True, eq=False)
class _Made:
    """Result number ``output`` of a call."""

    call: _Call
    output: int


@dataclass(frozen=True, slots=True)
class _Lost:
    """A tensor that cannot be recomputed."""

    why: str


class ParameterSteps:
    """The calls of one pass that computed tensors from parameters, buffers and constants only.

    The table is keyed by identity and keeps no tensor alive.
    """

    def __init__(self, writes: Callable[[Tensor], int], named: Iterable[tuple[str, Tensor]] = ()) -> None:
        self._writes = writes
        self._paths = {id(tensor): path for path, tensor in named}
        self._made: dict[int, tuple[weakref.ref[Tensor], _Made, int]] = {}

    def add(self, function: Any, args: Any, keywords: Any, result: Any) -> None:
        """Record a call whose tensors all come from parameters, buffers and constants."""
        positional, named = sources = _pytree.tree_map_only(Tensor, self._source_of, (args, keywords))
        before = [item.call for item in _pytree.tree_leaves(sources) if isinstance(item, _Made)]
        depth = 1 + max((item.depth for item in before), default=0)
        why = why_not_repeated(function) if depth <= _DEEPEST else f"in more than {_DEEPEST} steps"
        # Dropout writes its random numbers in place; randomness is the more useful of the two reasons.
        why = RANDOM if any(item.why == RANDOM for item in before) else why
        call = _Call(function, positional, named, why, depth)
        for output, tensor in enumerate(result if isinstance(result, (tuple, list)) else [result]):
            if isinstance(tensor, Tensor):
                self._made[id(tensor)] = (weakref.ref(tensor), _Made(call, output), self._writes(tensor))

    def hold(self, values: Iterable[Tensor]) -> bool:
        """Return whether recorded calls computed all these tensors, or the model registered them."""
        return all(
            id(value) in self._paths or ((known := self._made.get(id(value))) is not None and known[0]() is value)
            for value in values
        )

    def computation(self, value: Tensor) -> Computation | str:
        """Return how a tensor was computed, or why that cannot be repeated."""
        written = _Written(value)
        try:
            reference = written.reference(self._source_of(value))
        except _CannotBeRepeated as error:
            return str(error)
        return Computation(tuple(written.inputs), tuple(written.steps), reference.get("output", 0))

    def _source_of(self, value: Tensor) -> _Source | _Made | _Lost:
        known = self._made.get(id(value))
        if known is not None and known[0]() is value:
            same = known[2] == self._writes(value) or known[1].call.why == RANDOM
            return known[1] if same else _Lost("and is changed in place")
        if id(value) in self._paths and not self._writes(value):
            return _Source(self._paths[id(value)])
        return _Lost("from a tensor that no module of the model registers, or that a call changes")


class _CannotBeRepeated(Exception):
    """A computation has a step that cannot be repeated."""


class _Written:
    """The recorded steps of a computation, in the order in which they ran."""

    def __init__(self, value: Tensor) -> None:
        self.inputs: list[str] = []
        self.steps: list[Step] = []
        self._device = value.device
        self._places: dict[_Call, int] = {}

    def reference(self, source: object) -> Any:
        """Return the reference to a tensor, and record the calls that computed it; None for other values."""
        if isinstance(source, _Lost):
            raise _CannotBeRepeated(source.why)
        if isinstance(source, _Source):
            if source.path not in self.inputs:
                self.inputs.append(source.path)
            return {"input": self.inputs.index(source.path)}
        if not isinstance(source, _Made):
            return None
        call = source.call
        if call not in self._places:
            if call.why is not None:
                raise _CannotBeRepeated(call.why)
            try:
                arguments = plain_arguments(call.args, call.keywords, self._device, self.reference)
            except TypeError as error:
                raise _CannotBeRepeated(f"by {call.function}, whose {error}") from error
            self._places[call] = len(self.steps)
            self.steps.append(Step(str(call.function), arguments))
        return {"step": self._places[call], "output": source.output}


_SOFTMAX = (torch.ops.aten._softmax.default, torch.ops.aten._safe_softmax.default)
_PART_OF_PRODUCT = frozenset(
    {
        torch.ops.aten.view.default,
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.alias.default,
        torch.ops.aten.detach.default,
        torch.ops.aten.clone.default,
        # In eval mode it is folded into the convolution before it.
        torch.ops.aten.native_batch_norm.default,
        torch.ops.aten.cudnn_batch_norm.default,
        torch.ops.aten._native_batch_norm_legit_no_training.default,
    }
)
"""Operations that an engine fuses into the layer before them, or removes."""

_CHANNELWISE = frozenset(
    {
        *(_PART_OF_PRODUCT - {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default}),
        torch.ops.aten.relu.default,
        torch.ops.aten.relu_.default,
        torch.ops.aten.hardtanh.default,
        torch.ops.aten.hardtanh_.default,
        torch.ops.aten.constant_pad_nd.default,
        torch.ops.aten.minimum.default,
    }
)
"""Operations that commute with a factor per channel of a convolution's output."""

_NUMBERS = frozenset({torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default})
"""Operations that return a Python number from a tensor."""

_UNWRITTEN = frozenset(
    f"aten::{name}"
    for name in (
        *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
        *("resize", "resize_", "resize_as", "resize_as_"),
    )
)
"""Operations whose result is uninitialized memory, in full or at its end."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The last layer, MatMul, add or softmax before a tensor.

    Attributes:
        kind: ``weighted`` (a linear layer or convolution), ``product`` (a MatMul of two activations), ``add`` (of two
            tensors), ``softmax`` or ``parameter`` (computed from parameters only).
        name: the path of the site; empty for softmax and parameters.
        direct: whether the tensor is the result itself and not computed from it.
        channelwise: whether all operations in between commute with a factor per channel.
    """

    kind: str
    name: str
    direct: bool = field(default=False, compare=False)
    channelwise: bool = field(default=False, compare=False)


_OF_PARAMETERS = Origin("parameter", "")
_OF_SOFTMAX = Origin("softmax", "")


class OriginTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that tracks origins, and reports every operation."""

    def __init__(
        self,
        counter: ProductCounter,
        magnitudes: OverflowTracker,
        read: Callable[[Tensor], None] | None = None,
        outputs: OutputReaders | None = None,
    ) -> None:
        """
        Args:
            counter: receives every matrix multiplication and convolution.
            magnitudes: receives every operation.
            read: receives every parameter, or view of one, that code outside of sites computes with.
            outputs: receives every operation outside of sites."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._read = read
        self._outputs = outputs
        # By id, with the tensor, because a new tensor may get the id of a deleted one. torch's WeakIdKeyDictionary does
        # the same, but takes several Python calls.
        self._origins: dict[int, tuple[weakref.ref[Tensor], Origin]] = {}
        self._constants: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._written: Counter[int] = Counter()
        self._steps = ParameterSteps(self._writes_into)
        self._number_readers: set[str] = set()
        self._counter = counter
        self._magnitudes = magnitudes

    def mark(self, value: Any, origin: Origin) -> None:
        if isinstance(value, Tensor):
            self._origins[id(value)] = (weakref.ref(value), origin)

    def mark_constants(self, parameters: Iterable[tuple[str, Tensor]], buffers: Iterable[tuple[str, Tensor]]) -> None:
        """Mark the buffers of the model, by path, as independent of its inputs until they are written.

        Integer buffers are not marked: the entries that they look up in a parameter often depend on the length of the
        inputs.
        """
        buffers = list(buffers)
        self._steps = ParameterSteps(self._writes_into, [*buffers, *parameters])
        for _, value in buffers:
            constant = value.is_floating_point() or value.dtype is torch.bool
            if constant and (memory := _memory(value)) is not None:
                self._constants[id(value)] = (weakref.ref(value), memory)

    def computation(self, value: Tensor, path: str) -> Computation | str | None:
        """Return how a module computed a tensor from parameters only, or why it cannot be repeated; else None."""
        if not self._steps.hold([value]):
            return None
        if any(reader == path or reader.startswith(f"{path}." if path else "") for reader in self._number_readers):
            return "and from numbers that Python code reads from parameters"
        return self._steps.computation(value)

    def _writes_into(self, value: Tensor) -> int:
        """Return how often the memory of a tensor was written in this pass."""
        memory = _memory(value)
        return 0 if memory is None else self._written[memory]

    def version(self, value: Tensor) -> int:
        """Return how often a tensor was written; torch's own counter is missing under ``inference_mode``."""
        if not value.is_inference():
            return value._version
        return self._writes_into(value)

    def origin(self, value: Tensor) -> Origin | None:
        # The isinstance is slow, and the type alone rules it out for most tensors: no parameter is a plain Tensor.
        if type(value) is not Tensor and isinstance(value, nn.Parameter):
            return _OF_PARAMETERS
        known = self._origins.get(id(value))
        if known is not None and known[0]() is value:
            return known[1]
        constant = self._constants.get(id(value))
        unwritten = constant is not None and constant[0]() is value and not self._written[constant[1]]
        return _OF_PARAMETERS if unwritten else None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        composite, product = _known_of(func)
        if composite and not any(tensor.is_nested for tensor in _tensors(args)):
            # Only under inference_mode; otherwise torch decomposes it before the mode sees it.
            with self:
                return func._op_dk(COMPOSITE, *args, **kwargs)
        inputs = _tensors((*args, *kwargs.values()))
        outputs = self._outputs
        # A site reports its own operands.
        followed = None if outputs is None or self._counter.in_site else outputs.computes(func, args, inputs)
        written = _tensors((*args[:1], kwargs.get("out"))) if _writes(func) else []
        if outputs is not None and followed is None and written:
            outputs.forget(written)
        result = _filled(func, args, kwargs)
        if outputs is not None and followed is not None:
            outputs.follow_results(result, *followed)
        for tensor in written:
            if (memory := _memory(tensor)) is not None:
                self._written[memory] += 1
        if product is not None:
            origins = map(self.origin, PRODUCTS[product].tensors(args))
            of_parameters = all(origin is not None and origin.kind == "parameter" for origin in origins)
            self._counter.count(product, args, result, of_parameters)
        origin = _OF_SOFTMAX if func in _SOFTMAX else self._joined(inputs)
        if origin is _OF_PARAMETERS or self._steps.hold(inputs):
            self._steps.add(func, args, kwargs, result)
        if origin is _OF_PARAMETERS and func in _NUMBERS and (frames := self._counter.frames()):
            self._number_readers.add(frames[-1][0])
        if origin is not None:
            if (origin.direct and func not in _PART_OF_PRODUCT) or (origin.channelwise and func not in _CHANNELWISE):
                direct = origin.direct and func in _PART_OF_PRODUCT
                origin = replace(origin, direct=direct, channelwise=origin.channelwise and func in _CHANNELWISE)
            for tensor in _tensors((result,)):
                if tensor.is_floating_point() or (origin is _OF_PARAMETERS and tensor.dtype is torch.bool):
                    self.mark(tensor, origin)
        self._magnitudes.see(func, args, kwargs, result, self._counter.frames)
        if self._read is not None and not func.is_view and not self._counter.in_site:
            for tensor in inputs:
                source = self.origin(tensor)
                if source is not None and source.kind == "parameter":
                    self._read(tensor)
        return result

    def _joined(self, inputs: Iterable[Tensor]) -> Origin | None:
        """Return the first origin among the inputs of a result; ``parameter`` only if all inputs have it.

        Integers count as inputs: the entries that an embedding looks up depend on the data.
        """
        parameters, unknown = None, False
        for tensor in inputs:
            origin = self.origin(tensor)
            if origin is None:
                unknown = True
            elif origin.kind != "parameter":
                return origin
            else:
                parameters = origin
        return None if unknown else parameters


def _memory(value: Tensor) -> int | None:
    if value.is_meta or value.layout is not torch.strided or value.is_nested or is_transformed(value):
        return None
    identity: int = value.untyped_storage()._cdata
    return identity


def _filled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation, with zeros instead of uninitialized memory.

    Uninitialized values differ at each run and would enter the ranges.
    """
    if not _leaves_memory(func):
        return func(*args, **kwargs)
    before = args[0].numel() if func._schema.is_mutable and args and isinstance(args[0], Tensor) else 0
    result = func(*args, **kwargs)
    if isinstance(result, Tensor) and _memory(result) is not None and not result.is_quantized:
        uninitialized = result if before == 0 else result.view(-1)[before:] if result.is_contiguous() else result[:0]
        uninitialized.zero_()
    return result


@cache
def _leaves_memory(func: Any) -> bool:
    """Return whether an operation returns uninitialized memory."""
    return func.name().partition(".")[0] in _UNWRITTEN


@cache
def _writes(func: Any) -> bool:
    """Return whether an operation writes into its inputs."""
    return bool(func._schema.is_mutable)


@cache
def _known_of(func: Any) -> tuple[bool, str | None]:
    return is_composite(func), product_name(func)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (tuple, list)):
            tensors += [item for item in value if isinstance(item, Tensor)]
    return tensors


_aten = torch.ops.aten
_RECTIFIERS = frozenset({"relu", "relu_", "hardtanh", "hardtanh_", "clamp", "clamp_", "clamp_min", "clamp_min_"})
_MOVES = frozenset(
    [
        *("max_pool2d_with_indices", "max_pool3d_with_indices", "upsample_nearest1d", "upsample_nearest2d"),
        *("upsample_nearest3d", "_upsample_nearest_exact2d", "constant_pad_nd", "view", "_unsafe_view", "reshape"),
        *("permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "slice", "select", "split", "clone", "alias"),
        *("split_with_sizes", "detach", "flatten", "as_strided", "lift_fresh", "_reshape_alias", "pixel_shuffle"),
        *("pixel_unshuffle", "channel_shuffle", "native_channel_shuffle", "max_pool2d", "dropout"),
    ]
)


@cache
def _name(func: Any) -> str:
    return str(func._schema.name).removeprefix("aten::")


class OutputReaders:
    """The results of output sites in one pass, and the tensors derived from them by moves and ReLUs."""

    def __init__(self, observe: Callable[[Site, Tensor, int], None]) -> None:
        self._observe = observe
        # As in OriginTracker, because a new tensor may get the id of a deleted one.
        self._sites: dict[int, tuple[weakref.ref[Tensor], Site, int]] = {}
        self._whole: set[int] = set()

    def begin(self, value: Tensor, site: Site, call: int) -> None:
        """Follow the result of call ``call`` of a pass."""
        self._follow(value, site, call)
        self._whole.add(id(value))

    def site_of(self, value: Any) -> Site | None:
        known = self._sites.get(id(value))
        return known[1] if known is not None and known[0]() is value else None

    def take(self, value: Tensor) -> Site | None:
        """Return the output site of an unread result, and stop following it; None for other tensors."""
        site = self.site_of(value)
        if site is None or id(value) not in self._whole:
            return None
        del self._sites[id(value)]
        self._whole.discard(id(value))
        return site

    def read(self, value: Any) -> None:
        """Record that a tensor is read."""
        site = self.site_of(value)
        if site is not None:
            self._whole.discard(id(value))
            self._observe(site, value, self._sites[id(value)][2])

    def computes(self, func: Any, args: Iterable[Any], inputs: Iterable[Tensor]) -> tuple[Site, int] | None:
        """Record that an operation reads tensors; return the output site and call of its result (None: none)."""
        if not self._sites:
            return None
        followed = [(tensor, site) for tensor in inputs if (site := self.site_of(tensor)) is not None]
        if not followed:
            return None
        name = _name(func)
        if name in _MOVES or (name in _RECTIFIERS and _keeps_zero(name, list(args)[1:])):
            self._whole.discard(id(followed[0][0]))
            return followed[0][1], self._sites[id(followed[0][0])][2]
        for tensor, _ in followed:
            self.read(tensor)
        return None

    def follow_results(self, result: Any, site: Site, call: int) -> None:
        """Follow the results of a ReLU or a move."""
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self._follow(tensor, site, call)

    def forget(self, written: Iterable[Tensor]) -> None:
        """Read and stop following all tensors in the memory that an operation is about to write other values into."""
        if not self._sites:
            return
        memories = {_memory(tensor) for tensor in written} - {None}
        for reference, _, _ in list(self._sites.values()):
            tensor = reference()
            if tensor is not None and _memory(tensor) in memories:
                self.read(tensor)
                self._whole.discard(id(tensor))
                del self._sites[id(tensor)]

    def _follow(self, value: Tensor, site: Site, call: int) -> None:
        self._sites[id(value)] = (weakref.ref(value), site, call)


def _keeps_zero(name: str, limits: list[Any]) -> bool:
    """Return whether an activation clamps at 0 from below, so that it commutes with quantization."""
    if name.startswith("relu"):
        return True
    low = limits[0] if limits else (-1.0 if name.startswith("hardtanh") else None)
    return isinstance(low, int | float) and low == 0
