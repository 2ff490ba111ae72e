"""Parameters as operands, also through a view: ``weight.t()`` is a weight, with its axes in another order.

A view is recorded as data (an offset, a reshape, a permutation), so that a saved plan can apply it to a parameter. What
is computed from parameters and buffers alone is a weight too, and so is its computation data.

Computations of weights from parameters and buffers, as data: operations of torch with their arguments.

So a weight that the model computes at each call (weight normalization, a mask) has values without a call of the model:
to choose its scale, to store it as integers, and for another model of the same parameters, when a plan is loaded.

A plan of a file is carried out as any other. So only operations of ``aten`` are taken that make new tensors or views of
tensors, from tensors and numbers.
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
"""Why a computation of random numbers cannot be repeated."""

_NAMED = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
"""The values of torch that arguments may have, by how they are written."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation.

    Attributes:
        operation: its name, such as ``aten.mul.Tensor``.
        arguments: JSON of a list: positional arguments and an object of keywords. A tensor is ``{"input": I}`` or
            ``{"step": S, "output": O}``, a value of torch such as ``{"dtype": "float32"}``.
    """

    operation: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Computation:
    """The computation of one tensor.

    Attributes:
        inputs: the paths of the parameters and buffers.
        steps: the operations, in order; none: the first input is the tensor.
        output: which result of the last step the tensor is.
        buffers: the buffers among the inputs, with checksums of the values that they had in calibration.
    """

    inputs: tuple[str, ...]
    steps: tuple[Step, ...] = ()
    output: int = 0
    buffers: tuple[tuple[str, int], ...] = ()

    def with_buffers_of(self, inputs: Sequence[Tensor]) -> Computation:
        """Return the computation with the checksums of the buffers among its inputs."""
        named = zip(self.inputs, inputs, strict=True)
        found = ((path, _checksum(value)) for path, value in named if not isinstance(value, nn.Parameter))
        return replace(self, buffers=tuple(found))

    def changed_buffers(self, module: nn.Module) -> list[str]:
        """Return the paths of buffers that have other values in a module than they had in calibration."""
        tensors = named_tensors(module)
        return [path for path, checksum in self.buffers if path in tensors and _checksum(tensors[path]) != checksum]

    def of(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the tensor computed from its inputs, without gradients."""
        made: list[Sequence[Any]] = [[value.detach() for value in inputs]]
        for step in self.steps:
            made.append(_carried_out(step, made))
        found = made[-1][self.output if self.steps else 0]
        if not isinstance(found, Tensor):
            raise ValueError(f"output {self.output} of {self.steps[-1].operation} is no tensor")
        return found

    def without_copies(self, inputs: Sequence[Tensor]) -> Computation:
        """Return the computation with one entry along each axis that a step fills with copies of an entry.

        So ``weight.expand(8, -1, -1)`` becomes ``weight.expand(1, -1, -1)``, whatever the size of the batch is. That
        the result, broadcast, is still the tensor is for the caller to see.
        """
        made: list[Sequence[Any]] = [[value.detach() for value in inputs]]
        steps = []
        for step in self.steps:
            args, keywords = json_values(step.arguments)
            single = _COPIES.get(step.operation)
            if single is not None:
                args = single(args, _tensors(args, made))
                step = replace(step, arguments=json.dumps([args, keywords]))
            made.append(_carried_out(step, made))
            steps.append(step)
        return replace(self, steps=tuple(steps))

    def inputs_of(self, module: nn.Module) -> list[Tensor]:
        """Return the parameters and buffers of a module that the tensor is computed from."""
        tensors = named_tensors(module)
        return [tensors[path] for path in self.inputs]

    def plain(self) -> dict[str, Any]:
        """Return the computation as plain values, to be saved."""
        steps = [asdict(step) for step in self.steps]
        buffers = [list(pair) for pair in self.buffers]
        return {"inputs": list(self.inputs), "steps": steps, "output": self.output, "buffers": buffers}

    def faults(self) -> list[str]:
        """Return what is wrong with a computation from a file."""
        if not self.inputs:
            return ["inputs: expected the name of a parameter or buffer"]
        for number, step in enumerate(self.steps):
            place = f"steps[{number}]"
            try:
                _operation(step.operation)
                given = json_values(step.arguments)
            except ValueError as error:
                return [f"{place}: {error}"]
            if not isinstance(given, list) or [type(one) for one in given] != [list, dict]:
                return [f"{place}.arguments: expected a list and an object of keywords"]
        return []


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module by path; one that is tied has several."""
    named: Mapping[str, Tensor] = dict(module.named_buffers(remove_duplicate=False))
    return {**named, **dict(module.named_parameters(remove_duplicate=False))}


def why_not_repeated(function: Any) -> str | None:
    """Return why an operation that torch dispatched is no step of a computation; None if it can be one."""
    if torch.Tag.nondeterministic_seeded in function.tags:
        return RANDOM
    if function._schema.is_mutable:
        return "and changed in place"
    if function.namespace != "aten":
        return f"by {function.name()}, which is no operation of torch"
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
        raise TypeError(f"{type(value).__name__} cannot be written down")

    return json.dumps([plain(args), {name: plain(value) for name, value in keywords.items()}])


def _carried_out(step: Step, made: Sequence[Sequence[Any]]) -> Sequence[Any]:
    """Return the results of a step, without gradients; ``made`` are the inputs and the results of the steps before."""
    function, (args, keywords) = _operation(step.operation), json_values(step.arguments)
    try:
        with torch.no_grad():
            result = function(
                *_tensors(args, made), **{name: _tensors(value, made) for name, value in keywords.items()}
            )
    except (IndexError, KeyError, RuntimeError, TypeError) as error:
        place = f"steps[{len(made) - 1}]"
        raise ValueError(f"{place}, {step.operation}: {str(error).splitlines()[0]}") from error
    return result if isinstance(result, (tuple, list)) else [result]


def _one_expanded(args: list[Any], given: list[Any]) -> list[Any]:
    """Return the arguments of ``expand`` with which no axis of length 1, and no new axis, gets longer."""
    source, sizes = given[:2]
    new = len(sizes) - source.dim()
    kept = [1 if place < new or source.shape[place - new] == 1 else size for place, size in enumerate(sizes)]
    return [args[0], kept, *args[2:]]


def _one_repeated(args: list[Any], given: list[Any]) -> list[Any]:
    """Return the arguments of ``repeat`` with which no axis of length 1, and no new axis, gets longer."""
    source, repeats = given[:2]
    new = len(repeats) - source.dim()
    kept = [1 if place < new or source.shape[place - new] == 1 else count for place, count in enumerate(repeats)]
    return [args[0], kept, *args[2:]]


def _one_viewed(args: list[Any], given: list[Any]) -> list[Any]:
    """Return the arguments of ``view`` for a tensor that a step before has not filled with copies."""
    source, sizes = given[:2]
    if -1 in sizes or (many := math.prod(sizes)) == source.numel() or source.numel() == 0 or many % source.numel():
        return args
    times = many // source.numel()
    # The first axis that holds nothing but the copies, or else the first that holds them all.
    places = sorted(range(len(sizes)), key=lambda place: (sizes[place] != times, place))
    place = next((place for place in places if sizes[place] % times == 0), None)
    if place is None:
        return args
    return [args[0], [size // times if at == place else size for at, size in enumerate(sizes)], *args[2:]]


def _one_joined(args: list[Any], given: list[Any]) -> list[Any]:
    """Return the arguments of ``stack`` or ``cat`` with one tensor in the place of the same one many times."""
    return [args[0][:1], *args[1:]] if all(one == args[0][0] for one in args[0]) else args


_COPIES: dict[str, Callable[[list[Any], list[Any]], list[Any]]] = {
    "aten.expand.default": _one_expanded,
    "aten.repeat.default": _one_repeated,
    "aten.stack.default": _one_joined,
    "aten.cat.default": _one_joined,
    "aten.view.default": _one_viewed,
    "aten._unsafe_view.default": _one_viewed,
    "aten.reshape.default": _one_viewed,
}
"""Operations that copy an entry along an axis, or lay out what does; each with what returns its arguments without."""


def _checksum(value: Tensor) -> int:
    """Return a checksum of a buffer's values; 0 for those that cannot be read, as on the meta device."""
    values = TensorStamp.of(value).values
    return values if isinstance(values, int) else 0


@cache
def _operation(name: str) -> Any:
    """Return an operation of ``aten`` by name."""
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    try:
        if namespace != "aten":
            raise AttributeError
        found = getattr(getattr(torch.ops.aten, packet), overload)
    except AttributeError:
        found = None
    if not isinstance(found, torch._ops.OpOverload):
        raise ValueError(f"operation: {name!r} is no operation of torch")
    if why_not_repeated(found) is not None or packet == "from_file":
        raise ValueError(f"operation: {name!r} does not compute a tensor from tensors and numbers alone")
    return found


def _tensors(value: Any, made: Sequence[Sequence[Any]]) -> Any:
    """Return arguments with the tensors and values of torch that stand in their JSON; ``made[0]`` are the inputs."""
    if isinstance(value, list):
        return [_tensors(item, made) for item in value]
    if isinstance(value, str):
        raise TypeError(f"{value!r} is neither a tensor nor a number")
    if not isinstance(value, dict):
        return value
    if "input" in value:
        return made[0][value["input"]]
    if "step" in value:
        return made[1 + value["step"]][value["output"]]
    if "number" in value:
        return float(value["number"])
    for name, kind in _NAMED.items():
        if name in value and isinstance(found := getattr(torch, str(value[name]), None), kind):
            return found
    raise KeyError(f"{value} is no value of torch")


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
        """Return the operand, contiguous."""
        part = parameter.detach().flatten()[self.offset : self.offset + math.prod(self.shape)]
        return laid_out(part.reshape(self.shape).permute(self.order))


def laid_out(value: Tensor) -> Tensor:
    """Return a tensor with the strides of a new one: with an axis of length 1, torch calls other strides contiguous
    too, and kernels depend on the strides."""
    return value.contiguous().reshape(-1).reshape(value.shape)


@dataclass(frozen=True, slots=True)
class Weight:
    """An operand that is a parameter, or is computed from parameters and buffers alone.

    Attributes:
        parameters: the parameter, or all that the computation reads.
        paths: their paths; empty: no module registered the parameter.
        view: the operand as a view of the parameter (None: it is the parameter itself, or computed).
        computation: how the operand is computed (None: it is not).
    """

    parameters: tuple[Tensor, ...]
    paths: tuple[str, ...]
    view: WeightView | None = None
    computation: Computation | None = None

    @classmethod
    def computed(cls, computation: Computation, inputs: Sequence[Tensor]) -> Weight:
        """Return the weight of a computation on these parameters and buffers, with the values that they have now."""
        return cls(tuple(inputs), computation.inputs, computation=computation.with_buffers_of(inputs))

    @property
    def path(self) -> str | None:
        """The path of the parameter, or of the largest one of a computation; None if no module registered it."""
        sizes = [value.numel() for value in self.parameters]
        return self.paths[sizes.index(max(sizes))] if self.paths else None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the operand."""
        if self.computation is not None:
            return tuple(self.tensor().shape)
        first, view = self.parameters[0], self.view
        return tuple(first.shape if view is None else (view.shape[at] for at in view.order))

    def tensor(self) -> Tensor:
        """Return the operand's values [*]."""
        return operand_of(self.parameters, self.view, self.computation)

    def is_same(self, other: Weight) -> bool:
        """Return whether another weight is this one: of the same parameters, in the same way."""
        # With other values of buffers it is another computation: a model may write into them.
        if self.view != other.view or self.computation != other.computation:
            return False
        both = zip(self.parameters, other.parameters, strict=True)
        # Proxies have buffers of their own.
        return all(one is two or not isinstance(one, nn.Parameter) for one, two in both)


def operand_of(parameters: Sequence[Tensor], view: WeightView | None, computation: Computation | None) -> Tensor:
    """Return the values [*] of a weight."""
    if computation is not None:
        return laid_out(computation.of(parameters))
    return parameters[0].detach() if view is None else view.of(parameters[0])


class Weights:
    """The parameters of a model, to tell which operands are parameters or views of them.

    A view is recognized by the memory that it shares with a parameter. This works in every gradient mode, and for
    ``.detach()`` and ``.data`` too.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]] = ()) -> None:
        self._paths: dict[int, str] = {}
        self._owners: dict[int, list[nn.Parameter]] = {}
        for path, parameter in parameters:
            self._paths[id(parameter)] = path
            if parameter.layout == torch.strided:
                self._owners.setdefault(_storage(parameter), []).append(parameter)

    def find(self, value: object) -> Weight | None:
        """Return the weight that an operand is; None if it is neither a parameter nor a contiguous part of one."""
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
    """Return whether a tensor is a wrapper inside ``torch.vmap`` or ``torch.func``, which has no memory of its own."""
    return isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)


def non_finite(value: Tensor) -> str | None:
    """Return the first of ``NaN``, ``inf`` and ``-inf`` that is in a weight [*]; None if all its values are finite."""
    if value.is_meta or value.layout != torch.strided or value.numel() == 0 or not value.is_floating_point():
        return None
    # torch has no aminmax of 8-bit floats.
    low, high = (float(bound) for bound in torch.aminmax(_wide(in_memory_order(value.detach()))))
    if math.isnan(low) or math.isnan(high):
        return "NaN"
    return None if math.isfinite(low) and math.isfinite(high) else "-inf" if high != math.inf else "inf"


def _wide(value: Tensor) -> Tensor:
    return value.float() if value.dtype.itemsize == 1 else value


def _storage(value: Tensor) -> int:
    # The id of the storage: addresses are not unique, since empty tensors may share one.
    identity: int = value.untyped_storage()._cdata
    return identity


def _view(parameter: nn.Parameter, value: Tensor) -> WeightView | None:
    """Return ``value`` as a view of ``parameter`` or a part of it; None if it is not one with each element once."""
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
