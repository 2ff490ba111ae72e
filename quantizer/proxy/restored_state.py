"""Restoration of a model's state after a pass that wrote into its modules.

The state consists of buffers, and of tensors, numbers, strings, booleans and None in attributes, also nested in lists,
tuples, dictionaries, sets and counters. A pass does not write parameters. Contents of other objects are not restored.
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
"""Attributes of every module that contain its children, hooks and the like, which a pass does not change."""

_DEEPEST = 4

_LONGEST_NESTED = 1024
"""Longer containers, such as vocabularies, are restored, but not the containers inside of them."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """A tensor and a copy of its values."""

    tensor: Tensor
    values: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> _Copy:
        return cls(tensor, tensor.detach().clone())

    def restore(self) -> Tensor:
        """Restore the values and return the tensor, or for an inference tensor a copy of its values."""
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
    """A container and its former contents."""

    container: Any
    before: Any
    inside: tuple[_Copy | _Contents, ...]

    @classmethod
    def of(cls, container: Any, depth: int) -> _Contents:
        values = container.values() if isinstance(container, dict) else container
        nested = [_saved(value, depth + 1) for value in values] if len(container) <= _LONGEST_NESTED else []
        inside = tuple(value for value in nested if isinstance(value, _Copy | _Contents))
        return cls(container, container if isinstance(container, tuple) else copy.copy(container), inside)

    def restore(self) -> Any:
        for value in self.inside:
            value.restore()
        now, before = self.container, self.before
        if now is before:
            # A tuple, which cannot change.
            return now
        if len(now) != len(before) or not all(map(operator.is_, _members(now), _members(before))):
            now.clear()
            now.extend(before) if isinstance(now, list | deque) else now.update(before)
        return now


class SavedState:
    """A copy of the state of a model's modules."""

    def __init__(self, model: nn.Module) -> None:
        # Without the sites, whose state the caller of a pass sets.
        own = [module for module in model.modules() if not isinstance(module, SourceCall | OperandQuantizer)]
        self._saved_attributes = [
            (holder, _saved_attributes(holder)) for module in own for holder in (module._buffers, vars(module))
        ]

    def restore(self) -> None:
        for holder, attributes in self._saved_attributes:
            for name in [name for name, value in holder.items() if name not in attributes and _is_state(name, value)]:
                del holder[name]
            for name, value in attributes.items():
                before = value.restore() if type(value) in _RESTORED else value
                # Only changed entries, one at a time: the dictionaries of scripted modules allow nothing else.
                if name not in holder or holder[name] is not before:
                    holder[name] = before


@contextmanager
def unmoved(model: nn.Module) -> Iterator[None]:
    """Restore the state of a model's modules at the end of the block."""
    state = SavedState(model)
    try:
        yield
    finally:
        state.restore()


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore the state of a model at the end of the block, and give it copies of its inputs inside."""
    with unmoved(model), given_copies(model):
        yield


_RESTORED = (_Copy, _Contents)


def _saved_attributes(holder: dict[str, Any]) -> dict[str, Any]:
    return {name: _saved(value) for name, value in holder.items() if _is_state(name, value)}


def _saved(value: Any, depth: int = 0) -> Any:
    """Return a value, or a copy that can restore it; ``depth`` is the number of containers around it."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return value if isinstance(value, nn.Parameter) else _Copy.of(value)
    # A container may contain itself.
    return _Contents.of(value, depth) if _is_container(value) and depth < _DEEPEST else value


def _is_state(name: str, value: Any) -> bool:
    """Return whether an attribute of a module belongs to the state. Most are plain, which is checked first."""
    if name in _OF_TORCH:
        return False
    if type(value) in _PLAIN:
        return True
    if isinstance(value, Tensor):
        return not isinstance(value, nn.Parameter)
    return isinstance(value, _PLAIN) or _is_container(value)


def _is_container(value: Any) -> bool:
    """Return whether the contents of a value are restored. A tuple cannot change, but tensors inside of it can."""
    return type(value) in _CONTAINERS or isinstance(value, tuple)


def _members(container: Any) -> Iterator[Any]:
    """Yield the contents of a container, for a comparison with its copy."""
    return itertools.chain(container.keys(), container.values()) if isinstance(container, dict) else iter(container)
