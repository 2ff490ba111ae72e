"""Weights: parameters as operands, views of them, and tensors computed from parameters and buffers alone.

A view, such as ``weight.t()``, is recorded as data: an offset, a reshape and a permutation. A computation, such as
weight normalization or a mask, is recorded as a list of torch operations with their arguments. So a weight has values
without a call of the model: to choose its scale, to store it as integers, and to apply a loaded plan to another model.

A plan from a file may be malicious. Only ``aten`` operations that make new tensors or views, from tensors and numbers,
are executed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.numerics.granularity import in_memory_order
from quantizer.utils.fingerprint import TensorStamp
from quantizer.utils.plain_values import json_values

RANDOM = "with random numbers"
"""Why a computation with random numbers cannot be repeated."""

_NAMED = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
"""Types of torch that arguments may have, by their name in JSON."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation.

    Attributes:
        operation: its name, such as ``aten.mul.Tensor``.
        arguments: JSON of a list: positional arguments and an object of keywords. A tensor is ``{"input": I}`` or
            ``{"step": S, "output": O}``, a value of torch is such as ``{"dtype": "float32"}``.
    """

    operation: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Computation:
    """The computation of one tensor.

    Attributes:
        inputs: the paths of the parameters and buffers.
        steps: the operations, in order; empty: the tensor is the first input.
        output: the index of the tensor among the results of the last step.
        buffers: the buffers among the inputs, with checksums of their values in calibration.
    """

    inputs: tuple[str, ...]
    steps: tuple[Step, ...] = ()
    output: int = 0
    buffers: tuple[tuple[str, int], ...] = ()

    def with_buffers_of(self, inputs: Sequence[Tensor]) -> Computation:
        """Return the computation with the checksums of the buffers among its inputs."""
        named = zip(self.inputs, inputs, strict=True)
        checksums = ((path, _checksum(value)) for path, value in named if not isinstance(value, nn.Parameter))
        return replace(self, buffers=tuple(checksums))

    def changed_buffers(self, module: nn.Module) -> list[str]:
        """Return the paths of buffers of a module with other values than in calibration."""
        tensors = named_tensors(module)
        return [path for path, checksum in self.buffers if path in tensors and _checksum(tensors[path]) != checksum]

    def of(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the tensor computed from its inputs, without gradients."""
        results: list[Sequence[Any]] = [[value.detach() for value in inputs]]
        for step in self.steps:
            results.append(_executed(step, results))
        outputs, place = results[-1], self.output if self.steps else 0
        tensor = outputs[place] if 0 <= place < len(outputs) else None
        if not isinstance(tensor, Tensor):
            raise ValueError(f"output {self.output} of {self.steps[-1].operation} is not a tensor")
        return tensor

    def without_copies(self, inputs: Sequence[Tensor]) -> Computation:
        """Return the computation with one entry along each axis that a step fills with copies.

        So ``weight.expand(8, -1, -1)`` becomes ``weight.expand(1, -1, -1)`` for any batch size. The caller checks that
        the broadcast result equals the tensor.
        """
        results: list[Sequence[Any]] = [[value.detach() for value in inputs]]
        steps = []
        for step in self.steps:
            args, keywords = json_values(step.arguments)
            single = _COPIES.get(step.operation)
            if single is not None:
                args = single(args, _tensors(args, results))
                step = replace(step, arguments=json.dumps([args, keywords]))
            results.append(_executed(step, results))
            steps.append(step)
        return replace(self, steps=tuple(steps))

    def inputs_of(self, module: nn.Module) -> list[Tensor]:
        """Return the parameters and buffers of a module that the tensor is computed from."""
        tensors = named_tensors(module)
        return [tensors[path] for path in self.inputs]

    def plain(self) -> dict[str, Any]:
        """Return the computation as plain values, for a file."""
        steps = [asdict(step) for step in self.steps]
        buffers = [list(pair) for pair in self.buffers]
        return {"inputs": list(self.inputs), "steps": steps, "output": self.output, "buffers": buffers}

    def faults(self) -> list[str]:
        """Return the faults of a computation from a file."""
        if not self.inputs:
            return ["inputs: expected the name of a parameter or buffer"]
        for number, step in enumerate(self.steps):
            place = f"steps[{number}]"
            try:
                _operation(step.operation)
                arguments = json_values(step.arguments)
            except ValueError as error:
                return [f"{place}: {error}"]
            if not isinstance(arguments, list) or [type(each) for each in arguments] != [list, dict]:
                return [f"{place}.arguments: expected a list and an object of keywords"]
        return []


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module by path, tied ones under each path."""
    named: Mapping[str, Tensor] = dict(module.named_buffers(remove_duplicate=False))
    return {**named, **dict(module.named_parameters(remove_duplicate=False))}


def why_not_repeated(function: Any) -> str | None:
    """Return why a dispatched operation cannot be a step of a computation; None if it can."""
    if torch.Tag.nondeterministic_seeded in function.tags:
        return RANDOM
    if function._schema.is_mutable:
        return "and changed in place"
    if function.namespace != "aten":
        return f"by {function.name()}, which is not an operation of torch"
    return None


def plain_arguments(args: Any, keywords: Any, device: torch.device, plain_tensor: Callable[[Any], Any]) -> str:
    """Return the arguments of a step as JSON."""

    def plain(value: Any) -> Any:
        tensor = plain_tensor(value)
        if tensor is not None:
            return tensor
        if isinstance(value, (tuple, list)):
            return [plain(item) for item in value]
        if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
            return value
        if isinstance(value, float):
            return {"number": str(value)}
        if isinstance(value, torch.device) and value == device:
            return None
        for name, kind in _NAMED.items():
            if isinstance(value, kind):
                return {name: str(value).removeprefix("torch.")}
        raise TypeError(f"{type(value).__name__} cannot be written as JSON")

    return json.dumps([plain(args), {name: plain(value) for name, value in keywords.items()}])


def _executed(step: Step, results: Sequence[Sequence[Any]]) -> Sequence[Any]:
    """Return the results of a step without gradients, from the inputs and the results of earlier steps."""
    function, (args, keywords) = _operation(step.operation), json_values(step.arguments)
    try:
        with torch.no_grad():
            result = function(
                *_tensors(args, results), **{name: _tensors(value, results) for name, value in keywords.items()}
            )
    except (IndexError, KeyError, RuntimeError, TypeError) as error:
        place = f"steps[{len(results) - 1}]"
        raise ValueError(f"{place}, {step.operation}: {str(error).splitlines()[0]}") from error
    return result if isinstance(result, (tuple, list)) else [result]


def _one_expanded(args: list[Any], values: list[Any]) -> list[Any]:
    """Return the arguments of ``expand`` without expansion of axes of length 1 and of new axes."""
    source, sizes = values[:2]
    new = len(sizes) - source.dim()
    reduced = [1 if place < new or source.shape[place - new] == 1 else size for place, size in enumerate(sizes)]
    return [args[0], reduced, *args[2:]]


def _one_repeated(args: list[Any], values: list[Any]) -> list[Any]:
    """Return the arguments of ``repeat`` without repetition of axes of length 1 and of new axes."""
    source, repeats = values[:2]
    new = len(repeats) - source.dim()
    reduced = [1 if place < new or source.shape[place - new] == 1 else count for place, count in enumerate(repeats)]
    return [args[0], reduced, *args[2:]]


def _one_viewed(args: list[Any], values: list[Any]) -> list[Any]:
    """Return the arguments of ``view`` for a tensor without the copies of earlier steps."""
    source, sizes = values[:2]
    if -1 in sizes or (many := math.prod(sizes)) == source.numel() or source.numel() == 0 or many % source.numel():
        return args
    times = many // source.numel()
    # The first axis with only the copies, otherwise the first axis that contains all of them.
    places = sorted(range(len(sizes)), key=lambda place: (sizes[place] != times, place))
    place = next((place for place in places if sizes[place] % times == 0), None)
    if place is None:
        return args
    return [args[0], [size // times if at == place else size for at, size in enumerate(sizes)], *args[2:]]


def _one_joined(args: list[Any], given: list[Any]) -> list[Any]:
    """Return the arguments of ``stack`` or ``cat`` with a single tensor instead of copies of it."""
    return [args[0][:1], *args[1:]] if all(each == args[0][0] for each in args[0]) else args


_COPIES: dict[str, Callable[[list[Any], list[Any]], list[Any]]] = {
    "aten.expand.default": _one_expanded,
    "aten.repeat.default": _one_repeated,
    "aten.stack.default": _one_joined,
    "aten.cat.default": _one_joined,
    "aten.view.default": _one_viewed,
    "aten._unsafe_view.default": _one_viewed,
    "aten.reshape.default": _one_viewed,
}
"""Operations that copy an entry along an axis or reshape copies, and functions that remove the copies."""


def _checksum(value: Tensor) -> int:
    """Return a checksum of a buffer's values; 0 without readable values, as on the meta device."""
    values = TensorStamp.of(value).values
    return values if isinstance(values, int) else 0


@cache
def _operation(name: str) -> Any:
    namespace, _, qualified = name.partition(".")
    packet, _, overload = qualified.partition(".")
    try:
        if namespace != "aten":
            raise AttributeError
        function = getattr(getattr(torch.ops.aten, packet), overload)
    except AttributeError:
        function = None
    if not isinstance(function, torch._ops.OpOverload):
        raise ValueError(f"operation: {name!r} is not an operation of torch")
    if why_not_repeated(function) is not None or packet == "from_file":
        raise ValueError(f"operation: {name!r} is not a function of tensors and numbers only")
    return function


def _tensors(value: Any, results: Sequence[Sequence[Any]]) -> Any:
    """Return the arguments in JSON with their tensors and values of torch; ``results[0]`` are the inputs."""
    if isinstance(value, list):
        return [_tensors(item, results) for item in value]
    if isinstance(value, str):
        raise TypeError(f"{value!r} is neither a tensor nor a number")
    if not isinstance(value, dict):
        return value
    if "input" in value:
        return results[0][value["input"]]
    if "step" in value:
        return results[1 + value["step"]][value["output"]]
    if "number" in value:
        return float(value["number"])
    for name, kind in _NAMED.items():
        if name in value and isinstance(constant := getattr(torch, str(value[name]), None), kind):
            return constant
    raise KeyError(f"{value} is not a value of torch")


@dataclass(frozen=True, slots=True)
class WeightView:
    """A view of a parameter, or of a contiguous part of it from element ``offset`` on, in another shape.

    It is ``parameter.flatten()[offset : offset + prod(shape)].reshape(shape).permute(order)``. For example, the packed
    projections of an attention are three parts of one parameter.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    offset: int = 0

    def of(self, parameter: Tensor) -> Tensor:
        part = parameter.detach().flatten()[self.offset : self.offset + math.prod(self.shape)]
        return laid_out(part.reshape(self.shape).permute(self.order))


def laid_out(value: Tensor) -> Tensor:
    """Return a contiguous tensor with the strides of a new one, on which kernels depend.

    With an axis of length 1, torch also calls other strides contiguous.
    """
    return value.contiguous().reshape(-1).reshape(value.shape)


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter as an operand, a view of it, or a tensor computed from parameters and buffers alone.

    Attributes:
        parameters: the parameter, or all inputs of the computation.
        paths: their paths; empty: no module registered the parameter.
        view: the operand as a view of the parameter; None: it is the parameter itself, or computed.
        computation: how the operand is computed; None: it is not computed.
    """

    parameters: tuple[Tensor, ...]
    paths: tuple[str, ...]
    view: WeightView | None = None
    computation: Computation | None = None

    @classmethod
    def computed(cls, computation: Computation, inputs: Sequence[Tensor]) -> Weight:
        """Return the weight of a computation on these parameters and buffers, with their current values."""
        return cls(tuple(inputs), computation.inputs, computation=computation.with_buffers_of(inputs))

    @property
    def path(self) -> str | None:
        """The path of the parameter, or of the largest input of a computation; None if no module registered it."""
        sizes = [value.numel() for value in self.parameters]
        return self.paths[sizes.index(max(sizes))] if self.paths else None

    @property
    def shape(self) -> tuple[int, ...]:
        if self.computation is not None:
            return tuple(self.tensor().shape)
        first, view = self.parameters[0], self.view
        return tuple(first.shape if view is None else (view.shape[at] for at in view.order))

    def tensor(self) -> Tensor:
        return operand_of(self.parameters, self.view, self.computation)

    def is_same(self, other: Weight) -> bool:
        """Return whether another weight has the same parameters, view and computation."""
        # Other values of buffers make another computation, because a model may write into them.
        if self.view != other.view or self.computation != other.computation:
            return False
        pairs = zip(self.parameters, other.parameters, strict=True)
        # Proxies have their own buffers.
        return all(first is second or not isinstance(first, nn.Parameter) for first, second in pairs)


def operand_of(parameters: Sequence[Tensor], view: WeightView | None, computation: Computation | None) -> Tensor:
    """Return the values [*] of a weight."""
    if computation is not None:
        return laid_out(computation.of(parameters))
    return parameters[0].detach() if view is None else view.of(parameters[0])


class Weights:
    """The parameters of a model, to recognize them and their views among operands.

    A view shares memory with its parameter. This works in every gradient mode, and for ``.detach()`` and ``.data``.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]] = ()) -> None:
        self._paths: dict[int, str] = {}
        self._owners: dict[int, list[nn.Parameter]] = {}
        for path, parameter in parameters:
            self._paths[id(parameter)] = path
            if parameter.layout == torch.strided:
                self._owners.setdefault(_storage(parameter), []).append(parameter)

    def find(self, value: object) -> Weight | None:
        """Return the weight of an operand; None unless the operand is a parameter or a contiguous part."""
        if isinstance(value, nn.Parameter):
            path = self._paths.get(id(value))
            return Weight((value,), () if path is None else (path,))
        if not isinstance(value, Tensor) or is_transformed(value) or value.layout != torch.strided:
            return None
        for parameter in self._owners.get(_storage(value), ()):
            view = _view(parameter, value)
            if view is not None:
                return Weight((parameter,), (self._paths[id(parameter)],), view)
        return None

    def shown_by(self, value: Tensor) -> list[str]:
        """Return the paths of the parameters whose memory a tensor shares, fully or in part."""
        if isinstance(value, nn.Parameter):
            return [self._paths[id(value)]] if id(value) in self._paths else []
        if is_transformed(value) or value.layout != torch.strided:
            return []
        return [self._paths[id(parameter)] for parameter in self._owners.get(_storage(value), ())]


def is_transformed(value: object) -> bool:
    """Return whether a tensor is a wrapper of ``torch.vmap`` or ``torch.func``, which has no memory of its own."""
    return isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)


def non_finite(value: Tensor) -> str | None:
    """Return ``NaN``, ``inf`` or ``-inf`` if a weight [*] contains it; None if all values are finite."""
    if value.is_meta or value.layout != torch.strided or value.numel() == 0 or not value.is_floating_point():
        return None
    # torch has no aminmax for 8-bit floats.
    low, high = torch.stack(torch.aminmax(_wide(in_memory_order(value.detach())))).tolist()
    if math.isnan(low) or math.isnan(high):
        return "NaN"
    return None if math.isfinite(low) and math.isfinite(high) else "-inf" if high != math.inf else "inf"


def _wide(value: Tensor) -> Tensor:
    return value.float() if value.dtype.itemsize == 1 else value


def _storage(value: Tensor) -> int:
    # The id of the storage, because empty tensors may share an address.
    identity: int = value.untyped_storage()._cdata
    return identity


def _view(parameter: nn.Parameter, value: Tensor) -> WeightView | None:
    """Return ``value`` as a view of ``parameter`` or of a part; None unless each element occurs once."""
    offset = int(value.storage_offset() - parameter.storage_offset())
    inside = offset >= 0 and offset + value.numel() <= parameter.numel()
    if value.dtype != parameter.dtype or not inside or not parameter.is_contiguous():
        return None
    # From the slowest axis in memory to the fastest; the place of an axis of length 1 does not matter.
    strides = value.stride()
    order = sorted(range(value.dim()), key=lambda axis: (-strides[axis], value.shape[axis] != 1))
    shape = tuple(value.shape[axis] for axis in order)
    dense = all(
        size == 1 or strides[axis] == math.prod(shape[place + 1 :])
        for place, (axis, size) in enumerate(zip(order, shape, strict=True))
    )
    if not dense:
        return None
    return WeightView(shape, tuple(order.index(axis) for axis in range(value.dim())), offset)
