"""Tensors in attributes of modules, also nested in containers, objects, partials, closures and bound methods."""

from __future__ import annotations

import copy
import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.rewrite.closures import cells, rebound

_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_LEAVES = (bool, int, float, complex, str, bytes, type(None), type, types.ModuleType, Enum, torch.dtype, torch.device)
_HOOKS = frozenset(name for name in vars(nn.Module()) if "hook" in name)

_NOTHING: Mapping[int, Any] = types.MappingProxyType({})

Twin = Callable[[Tensor], Tensor | None]


def memory_of(tensor: Tensor) -> int | None:
    """Return an identity of a tensor's memory; None without a plain storage."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        return None
    identity: int = tensor.untyped_storage()._cdata
    return identity


def reached_tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return all tensors that modules reach, each once."""
    return _tensors_in([vars(module) for module in modules])


def tensors_of_functions(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the tensors that functions in the attributes of modules reach, each once, except those in hooks."""
    attributes = (value for module in modules for name, value in vars(module).items() if name not in _HOOKS)
    return _tensors_in([value for value in _reached(list(attributes), modules=False) if isinstance(value, _FUNCTIONS)])


def replace_tensors(modules: Iterable[nn.Module], twin: Twin) -> None:
    """Replace each tensor with a twin by ``twin(tensor)``, wherever modules of a proxy reach it.

    Objects of the proxy change in place. Objects in functions may belong to the user's model, so they are copied.
    """
    replacement = _Replacement(twin)
    for module in modules:
        replacement.inside(module)


def _tensors_in(values: list[Any]) -> list[Tensor]:
    return [value for value in _reached(values) if isinstance(value, Tensor)]


def _reached(values: list[Any], *, modules: bool = True, but: Mapping[int, Any] = _NOTHING) -> Iterator[Any]:
    """Yield all values that ``values`` reach, including themselves, each once; ``but`` has the ids to skip."""
    # With the objects, because the id of a deleted object may be reused.
    visited: dict[int, Any] = {}
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if (
            _is_leaf(value)
            or id(value) in visited
            or id(value) in but
            or (isinstance(value, nn.Module) and not modules)
        ):
            continue
        visited[id(value)] = value
        yield value
        waiting += _parts(value)


def _is_leaf(value: Any) -> bool:
    """Return whether a value leads to no tensors of the model: a plain value, or a calibration in a hook."""
    ours = type(value).__module__.partition(".")[0] == "quantizer" and not isinstance(value, nn.Module)
    return ours or isinstance(value, _LEAVES)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Tensor | torch.jit.ScriptModule | torch.jit.ScriptFunction):
        return []
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, types.FunctionType):
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [*cells(value), *defaults, *vars(value).values()]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    return list(_attributes(value).values())


def _attributes(value: Any) -> Mapping[str, Any]:
    attributes = dict(getattr(value, "__dict__", None) or {})
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if isinstance(vars(cls).get(name), types.MemberDescriptorType) and hasattr(value, name):
                attributes[name] = getattr(value, name)
    return attributes


class _Replacement:
    """One replacement of tensors, which visits each object once."""

    def __init__(self, twin: Twin) -> None:
        self._twin = twin
        self._visited: dict[int, Any] = {}
        self._copies: dict[int, tuple[Any, Any]] = {}
        # Modules share objects, so the result for an object is cached.
        self._reaching: dict[int, tuple[Any, bool]] = {}
        self._without_twins: dict[int, Any] = {}

    def inside(self, value: Any) -> None:
        """Replace the tensors inside of a module or another object of the proxy."""
        if id(value) in self._visited:
            return
        self._visited[id(value)] = value
        attributes = vars(value) if isinstance(value, nn.Module) else _attributes(value)
        for name, part in list(attributes.items()):
            new = self.of(part)
            if new is part:
                continue
            if isinstance(value, nn.Module):
                vars(value)[name] = new
            else:
                object.__setattr__(value, name, new)

    def of(self, value: Any) -> Any:
        """Return the replacement of a value of the proxy: itself, unless it cannot change in place."""
        if isinstance(value, Tensor):
            return self._of_tensor(value)
        if isinstance(value, _FUNCTIONS):
            return rebound(value, self._of_function_part)
        if isinstance(value, tuple | frozenset):
            return self._rebuilt(value, self.of) if self._reaches_tensors(value) else value
        if _is_leaf(value) or id(value) in self._visited or not self._reaches_tensors(value):
            return value
        if isinstance(value, list | deque | dict | set):
            self._visited[id(value)] = value
            self._fill(value)
        else:
            self.inside(value)
        return value

    def _fill(self, value: Any) -> None:
        if isinstance(value, set):
            parts = [self.of(part) for part in value]
            value.clear()
            value.update(parts)
            return
        for key, part in list(value.items() if isinstance(value, dict) else enumerate(value)):
            new = self.of(part)
            if new is not part:
                value[key] = new

    def _of_tensor(self, value: Tensor) -> Tensor:
        other = self._twin(value)
        return value if other is None else other

    def _rebuilt(self, value: Any, of: Callable[[Any], Any]) -> Any:
        parts = [of(part) for part in value]
        if all(new is part for new, part in zip(parts, value, strict=True)):
            return value
        return tuple.__new__(type(value), parts) if isinstance(value, tuple) else type(value)(parts)

    def _of_function_part(self, value: Any) -> Any:
        """Return a copy of an object in a function if it reaches tensors with twins; otherwise None."""
        if isinstance(value, Tensor):
            return self._twin(value)
        if isinstance(value, (nn.Module, torch.jit.ScriptFunction, *_FUNCTIONS)) or _is_leaf(value):
            return None
        if id(value) in self._visited:
            return None  # an object of the proxy, whose tensors are replaced in place
        if id(value) not in self._copies:
            if not self._reaches_twins(value):
                return None
            # A copy in which tensors, modules and functions are the same ones.
            memo: dict[int, Any] = {}
            for part in _reached([value]):
                if isinstance(part, (Tensor, nn.Module, *_FUNCTIONS)):
                    memo[id(part)] = part
            self._copies[id(value)] = value, self.of(copy.deepcopy(value, memo))
        return self._copies[id(value)][1]

    def _reaches_twins(self, value: Any) -> bool:
        """Return whether a value reaches a tensor with a twin. No tensor gets a twin later."""
        visited: dict[int, Any] = {}
        for part in _reached([value], but=self._without_twins):
            visited[id(part)] = part
            if isinstance(part, Tensor) and self._twin(part) is not None:
                return True
        self._without_twins |= visited
        return False

    def _reaches_tensors(self, value: Any) -> bool:
        """Return whether a value reaches a tensor, and cache the answer for all values that it reaches."""
        if id(value) not in self._reaching:
            parents: dict[int, list[int]] = {}
            visited: list[Any] = []
            pending: list[int] = []
            for part in _reached([value], but=self._reaching):
                visited.append(part)
                for inner in [] if isinstance(part, Tensor) else _parts(part):
                    parents.setdefault(id(inner), []).append(id(part))
                    if self._reaching.get(id(inner), (None, False))[1]:
                        pending.append(id(inner))
                if isinstance(part, Tensor):
                    pending.append(id(part))
            reaching: set[int] = set()
            while pending:
                identity = pending.pop()
                if identity not in reaching:
                    reaching.add(identity)
                    pending += parents.get(identity, [])
            self._reaching |= {id(part): (part, id(part) in reaching) for part in visited}
        return self._reaching[id(value)][1]
