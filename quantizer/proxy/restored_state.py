"""Restoration of a model's state after a pass that wrote into its modules.

The state is buffers and other tensors, numbers, strings, booleans and None that modules keep as attributes, and what
lists, dictionaries, sets and counters there hold, these nested too. A pass does not write parameters, and the contents
of objects of any other kind are not restored.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.proxy.site import SourceCall
from quantizer.utils.batches import given_copies

_PLAIN = (bool, int, float, str, type(None))

_CONTAINERS = (list, dict, set, deque, Counter, defaultdict, OrderedDict)

_OF_TORCH = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set))
"""Attributes of every module that hold its children, its hooks and the like, which a pass does not change."""

_DEEPEST = 4

_LOOKED_INTO = 1024
"""The contents of longer containers, such as vocabularies, are restored, and not what is inside of these."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """A tensor, and a copy of its values."""

    tensor: Tensor
    values: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> _Copy:
        return cls(tensor, tensor.detach().clone())

    def put_back(self) -> Tensor:
        """Restore the values and return the tensor, or the copy if it is an inference tensor."""
        if self.tensor.is_meta or self.tensor.layout is not torch.strided:
            return self.tensor
        if self.tensor.is_inference():
            # An inference tensor has no version, and cannot be written outside of inference mode.
            return self.values.clone()
        # Compare values, not versions: a normalization in training changes its statistics without a new version.
        if not torch.equal(self.tensor, self.values):
            with torch.no_grad():
                self.tensor.copy_(self.values)
        return self.tensor


@dataclass(frozen=True, slots=True)
class _Contents:
    """A container, and what it held."""

    container: Any
    before: Any
    inside: tuple[_Copy | _Contents, ...]

    @classmethod
    def of(cls, container: Any, depth: int) -> _Contents:
        values = container.values() if isinstance(container, dict) else container
        looked_into = [_kept(value, depth + 1) for value in values] if len(container) <= _LOOKED_INTO else []
        inside = tuple(value for value in looked_into if isinstance(value, _Copy | _Contents))
        return cls(container, copy.copy(container), inside)

    def put_back(self) -> Any:
        """Restore the contents and return the container."""
        for value in self.inside:
            value.put_back()
        now, before = self.container, self.before
        if len(now) != len(before) or not all(map(operator.is_, _members(now), _members(before))):
            now.clear()
            now.extend(before) if isinstance(now, list | deque) else now.update(before)
        return now


class Held:
    """A copy of the state of a model's modules at one time."""

    def __init__(self, model: nn.Module) -> None:
        # Not the sites: the caller of a pass sets their state.
        own = [module for module in model.modules() if not isinstance(module, SourceCall | OperandQuantizer)]
        self._held = [(holder, _held(holder)) for module in own for holder in (module._buffers, vars(module))]

    def put_back(self) -> None:
        """Restore the state."""
        for holder, held in self._held:
            for name in _held_names(holder) - held.keys():
                del holder[name]
            for name, value in held.items():
                before = value.put_back() if isinstance(value, _Copy | _Contents) else value
                # Entry by entry, and only those that moved: the dictionaries of scripted modules take nothing else.
                if name not in holder or holder[name] is not before:
                    holder[name] = before


@contextmanager
def unmoved(model: nn.Module) -> Iterator[None]:
    """Restore the state of a model's modules at the end of the block."""
    held = Held(model)
    try:
        yield
    finally:
        held.put_back()


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Call the user's model in the block, or a proxy in its place, without a change of its state or of its inputs."""
    with unmoved(model), given_copies(model):
        yield


def _held(holder: dict[str, Any]) -> dict[str, Any]:
    return {name: _kept(holder[name]) for name in _held_names(holder)}


def _kept(value: Any, depth: int = 0) -> Any:
    """Return a value with what is needed to restore it; ``depth`` is the number of containers around it."""
    if isinstance(value, Tensor):
        return value if isinstance(value, nn.Parameter) else _Copy.of(value)
    # A container may hold itself.
    return _Contents.of(value, depth) if type(value) in _CONTAINERS and depth < _DEEPEST else value


def _held_names(holder: dict[str, Any]) -> set[str]:
    return {name for name, value in holder.items() if name not in _OF_TORCH and _is_held(value)}


def _is_held(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not isinstance(value, nn.Parameter)
    return isinstance(value, _PLAIN) or type(value) in _CONTAINERS


def _members(container: Any) -> Iterator[Any]:
    """Yield what a container holds, for a comparison with its copy."""
    return itertools.chain(container.keys(), container.values()) if isinstance(container, dict) else iter(container)
