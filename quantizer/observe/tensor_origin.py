"""Origins of tensors: the product before one, or operations on parameters alone.

The origin of a tensor is the last site that computed it or its inputs. A dispatch mode sees every operation below
Python and passes the origin of the inputs on to the result. The table of origins is keyed by identity and keeps no
tensor alive; nothing is stored on tensors. The mode runs for every operation of a pass, so it does little for each.

Readers of the results of convolutions: the values that they read give an output quantizer its range.

A rectifier or a move (a maximum of neighbours, a reshaping) commutes with rounding, so that an engine computes it in
integers between a convolution and its output quantizer. What counts are the values that anything else reads.
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
"""The most calls one on the result of the other: a weight is made in a few, and a recurrence in thousands."""


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
    """A tensor that cannot be made again."""

    why: str


class ParameterSteps:
    """The calls that made tensors of parameters, buffers and constants alone, in one pass.

    The table is keyed by identity and keeps no tensor alive.
    """

    def __init__(self, writes: Callable[[Tensor], int], named: Iterable[tuple[str, Tensor]] = ()) -> None:
        self._writes = writes
        self._paths = {id(tensor): path for path, tensor in named}
        self._made: dict[int, tuple[weakref.ref[Tensor], _Made, int]] = {}

    def add(self, function: Any, args: Any, keywords: Any, result: Any) -> None:
        """Record a call all of whose tensors come from parameters, buffers and constants."""
        given, named = kept = _pytree.tree_map_only(Tensor, self._found, (args, keywords))
        before = [one.call for one in _pytree.tree_leaves(kept) if isinstance(one, _Made)]
        depth = 1 + max((one.depth for one in before), default=0)
        why = why_not_repeated(function) if depth <= _DEEPEST else f"in more than {_DEEPEST} steps"
        # Dropout writes its random numbers in place, and of the two reasons this is the one that matters.
        why = RANDOM if any(one.why == RANDOM for one in before) else why
        call = _Call(function, given, named, why, depth)
        for output, tensor in enumerate(result if isinstance(result, (tuple, list)) else [result]):
            if isinstance(tensor, Tensor):
                self._made[id(tensor)] = (weakref.ref(tensor), _Made(call, output), self._writes(tensor))

    def hold(self, values: Iterable[Tensor]) -> bool:
        """Return whether calls that are recorded made all these tensors, or the model registered them."""
        return all(
            id(value) in self._paths or ((known := self._made.get(id(value))) is not None and known[0]() is value)
            for value in values
        )

    def computation(self, value: Tensor) -> Computation | str:
        """Return how a tensor was computed, or why that cannot be repeated."""
        written = _Written(value)
        try:
            found = written.reference(self._found(value))
        except _CannotBeRepeated as error:
            return str(error)
        return Computation(tuple(written.inputs), tuple(written.steps), found.get("output", 0))

    def _found(self, value: Tensor) -> _Source | _Made | _Lost:
        known = self._made.get(id(value))
        if known is not None and known[0]() is value:
            same = known[2] == self._writes(value) or known[1].call.why == RANDOM
            return known[1] if same else _Lost("and changed in place")
        if id(value) in self._paths and not self._writes(value):
            return _Source(self._paths[id(value)])
        return _Lost("from a tensor that no module of the model has registered, or that a call changes")


class _CannotBeRepeated(Exception):
    """A computation has a step that cannot be repeated."""


class _Written:
    """A computation while it is written down, the calls in the order in which they ran."""

    def __init__(self, value: Tensor) -> None:
        self.inputs: list[str] = []
        self.steps: list[Step] = []
        self._device = value.device
        self._places: dict[_Call, int] = {}

    def reference(self, found: object) -> Any:
        """Return what stands for a tensor, and write down the calls that made it; None for what is no tensor."""
        if isinstance(found, _Lost):
            raise _CannotBeRepeated(found.why)
        if isinstance(found, _Source):
            if found.path not in self.inputs:
                self.inputs.append(found.path)
            return {"input": self.inputs.index(found.path)}
        if not isinstance(found, _Made):
            return None
        call = found.call
        if call not in self._places:
            if call.why is not None:
                raise _CannotBeRepeated(call.why)
            try:
                arguments = plain_arguments(call.args, call.keywords, self._device, self.reference)
            except TypeError as error:
                raise _CannotBeRepeated(f"by {call.function}, whose {error}") from error
            self._places[call] = len(self.steps)
            self.steps.append(Step(str(call.function), arguments))
        return {"step": self._places[call], "output": found.output}


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
"""Operations that an engine computes together with the product before them, or not at all."""

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
"""Operations through which a factor of a channel of a convolution's output can move."""

_NUMBERS = frozenset({torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default})
"""Operations that give Python code a number of a tensor."""

_UNWRITTEN = frozenset(
    f"aten::{name}"
    for name in (
        *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
        *("resize", "resize_", "resize_as", "resize_as_"),
    )
)
"""Operations whose result is memory as other code left it, in full or at its end."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The last product, add or softmax on the way to a tensor.

    Attributes:
        kind: ``weighted`` (a linear or convolution), ``product`` (of two activations), ``add`` (of two tensors),
            ``softmax`` or ``parameter`` (computed from parameters alone).
        name: the path of the site; empty for softmax and parameters.
        direct: whether the tensor is the product's result itself and not computed from it.
        channelwise: whether only operations through which a factor of a channel can move are in between.
    """

    kind: str
    name: str
    direct: bool = field(default=False, compare=False)
    channelwise: bool = field(default=False, compare=False)


_OF_PARAMETERS = Origin("parameter", "")
_OF_SOFTMAX = Origin("softmax", "")


class OriginTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that tracks origins, and reports every product and every operation."""

    def __init__(
        self,
        counter: ProductCounter,
        magnitudes: OverflowTracker,
        read: Callable[[Tensor], None] | None = None,
        outputs: OutputReaders | None = None,
    ) -> None:
        """
        Args:
            counter: receives every product.
            magnitudes: receive every operation.
            read: receives every parameter, or view of one, that code outside of sites computes with.
            outputs: receives every operation outside of sites.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._read = read
        self._outputs = outputs
        # By id, with the tensor, since a new tensor may get the id of a deleted one. torch's WeakIdKeyDictionary does
        # the same, but takes several Python calls.
        self._origins: dict[int, tuple[weakref.ref[Tensor], Origin]] = {}
        self._constants: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._written: Counter[int] = Counter()
        self._steps = ParameterSteps(self._writes_into)
        self._number_readers: set[str] = set()
        self._counter = counter
        self._magnitudes = magnitudes

    def mark(self, value: Any, origin: Origin) -> None:
        """Set the origin of ``value``."""
        if isinstance(value, Tensor):
            self._origins[id(value)] = (weakref.ref(value), origin)

    def mark_constants(self, parameters: Iterable[tuple[str, Tensor]], buffers: Iterable[tuple[str, Tensor]]) -> None:
        """Mark the buffers of the model, by path, as independent of its inputs until something writes into them.

        Those of whole numbers are not: what they look up in a parameter often depends on the length of the inputs.
        """
        buffers = list(buffers)
        self._steps = ParameterSteps(self._writes_into, [*buffers, *parameters])
        for _, value in buffers:
            constant = value.is_floating_point() or value.dtype is torch.bool
            if constant and (memory := _memory(value)) is not None:
                self._constants[id(value)] = (weakref.ref(value), memory)

    def computation(self, value: Tensor, path: str) -> Computation | str | None:
        """Return how the module of a path computed a tensor from parameters and constants alone.

        Or return why that cannot be repeated; None if it did not.
        """
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
        """Return how often a tensor was written; torch counts this too, but not under ``inference_mode``."""
        if not value.is_inference():
            return value._version
        return self._writes_into(value)

    def origin(self, value: Tensor) -> Origin | None:
        """Return the origin of a tensor; None if it has none."""
        # The isinstance is slow, and the type alone rules it out for most tensors: no parameter is a plain Tensor.
        if type(value) is not Tensor and isinstance(value, nn.Parameter):
            return _OF_PARAMETERS
        found = self._origins.get(id(value))
        if found is not None and found[0]() is value:
            return found[1]
        constant = self._constants.get(id(value))
        unwritten = constant is not None and constant[0]() is value and not self._written[constant[1]]
        return _OF_PARAMETERS if unwritten else None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        composite, product = _known_of(func)
        if composite and not any(tensor.is_nested for tensor in _tensors(args)):
            # Only under inference_mode: elsewhere torch decomposes it before the mode sees it.
            with self:
                return func._op_dk(COMPOSITE, *args, **kwargs)
        inputs = _tensors((*args, *kwargs.values()))
        outputs = self._outputs
        # A site's operands are noted by itself.
        followed = None if outputs is None or self._counter.in_site else outputs.computes(func, args, inputs)
        result = _filled(func, args, kwargs)
        if outputs is not None and followed is not None:
            outputs.follow_results(result, *followed)
        if _writes(func):
            for tensor in _tensors((*args[:1], kwargs.get("out"))):
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
                made = self.origin(tensor)
                if made is not None and made.kind == "parameter":
                    self._read(tensor)
        return result

    def _joined(self, inputs: Iterable[Tensor]) -> Origin | None:
        """Return the origin of a result of ``inputs``: of the first with one; ``parameter`` only if all have that.

        Integers count as inputs: the rows that an embedding looks up in a parameter depend on the data.
        """
        parameters, others = None, False
        for tensor in inputs:
            origin = self.origin(tensor)
            if origin is None:
                others = True
            elif origin.kind != "parameter":
                return origin
            else:
                parameters = origin
        return None if others else parameters


def _memory(value: Tensor) -> int | None:
    """Return an identity of a tensor's memory; None if it has no plain storage."""
    if value.is_meta or value.layout is not torch.strided or value.is_nested or is_transformed(value):
        return None
    identity: int = value.untyped_storage()._cdata
    return identity


def _filled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation, with zeros where it leaves memory as it was.

    Such memory holds what other code wrote there: values of no model, and other ones each time.
    """
    if not _leaves_memory(func):
        return func(*args, **kwargs)
    before = args[0].numel() if func._schema.is_mutable and args and isinstance(args[0], Tensor) else 0
    result = func(*args, **kwargs)
    if isinstance(result, Tensor) and _memory(result) is not None and not result.is_quantized:
        rest = result if before == 0 else result.view(-1)[before:] if result.is_contiguous() else result[:0]
        rest.zero_()
    return result


@cache
def _leaves_memory(func: Any) -> bool:
    """Return whether an operation gives memory that nobody has written."""
    return func.name().partition(".")[0] in _UNWRITTEN


@cache
def _writes(func: Any) -> bool:
    """Return whether an operation writes into its inputs."""
    return bool(func._schema.is_mutable)


@cache
def _known_of(func: Any) -> tuple[bool, str | None]:
    """Return whether an operation is composite, and its name among the products."""
    return is_composite(func), product_name(func)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += [item for item in value if isinstance(item, Tensor)]
    return found


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
    """The tensors of one pass that an output site rounds, or that are moved or rectified ones of such."""

    def __init__(self, observe: Callable[[Site, Tensor, int], None]) -> None:
        self._observe = observe
        # As in OriginTracker: a new tensor may get the id of a deleted one.
        self._sites: dict[int, tuple[weakref.ref[Tensor], Site, int]] = {}
        self._whole: set[int] = set()

    def begin(self, value: Tensor, site: Site, call: int) -> None:
        """Follow the result of a call, by its number in the pass."""
        self._follow(value, site, call)
        self._whole.add(id(value))

    def site_of(self, value: Any) -> Site | None:
        """Return the output site that rounds a tensor; None if none does."""
        found = self._sites.get(id(value))
        return found[1] if found is not None and found[0]() is value else None

    def take(self, value: Tensor) -> Site | None:
        """Return the output site of the result of a call that nothing has read yet, and follow it no more."""
        site = self.site_of(value)
        if site is None or id(value) not in self._whole:
            return None
        del self._sites[id(value)]
        self._whole.discard(id(value))
        return site

    def read(self, value: Any) -> None:
        """Note that a tensor is read."""
        site = self.site_of(value)
        if site is not None:
            self._whole.discard(id(value))
            self._observe(site, value, self._sites[id(value)][2])

    def computes(self, func: Any, args: Iterable[Any], inputs: Iterable[Tensor]) -> tuple[Site, int] | None:
        """Note that an operation reads tensors; return the output site and call of its result (None: of none)."""
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
        """Follow what a rectifier or a move made."""
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self._follow(tensor, site, call)

    def _follow(self, value: Tensor, site: Site, call: int) -> None:
        self._sites[id(value)] = (weakref.ref(value), site, call)


def _keeps_zero(name: str, limits: list[Any]) -> bool:
    """Return whether a rectifier has 0 as its lower limit, so that it commutes with rounding."""
    if name.startswith("relu"):
        return True
    low = limits[0] if limits else (-1.0 if name.startswith("hardtanh") else None)
    return isinstance(low, int | float) and low == 0
