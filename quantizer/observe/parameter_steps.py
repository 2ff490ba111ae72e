"""Records of the operations that made tensors of parameters and buffers alone during a pass, given as data."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree

from quantizer.proxy.computed.computation import RANDOM, Computation, Step, plain_arguments, why_not_repeated

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
