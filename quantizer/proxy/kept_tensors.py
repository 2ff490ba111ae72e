"""Tensors that modules reach through what they keep: containers, objects, partials, closures, bound methods."""

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
    """Return an identity of a tensor's memory; None if it has no plain storage."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        return None
    identity: int = tensor.untyped_storage()._cdata
    return identity


def reached_tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return all tensors that modules reach, each once."""
    return _tensors_in([vars(module) for module in modules])


def tensors_of_functions(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the tensors that functions in the attributes of modules reach, each once, those in hooks apart."""
    kept = (value for module in modules for name, value in vars(module).items() if name not in _HOOKS)
    return _tensors_in([value for value in _reached(list(kept), modules=False) if isinstance(value, _FUNCTIONS)])


def replace_tensors(modules: Iterable[nn.Module], twin: Twin) -> None:
    """Put ``twin(tensor)`` in the place of each tensor that has one, wherever modules of a proxy reach it.

    What is the proxy's own changes in place; what functions hold may be the user's, and they get a copy of it.
    """
    replacement = _Replacement(twin)
    for module in modules:
        replacement.inside(module)


def _tensors_in(values: list[Any]) -> list[Tensor]:
    return [value for value in _reached(values) if isinstance(value, Tensor)]


def _reached(values: list[Any], *, modules: bool = True, but: Mapping[int, Any] = _NOTHING) -> Iterator[Any]:
    """Yield what values lead to, themselves included, each once; ``but``: ids of what is passed over."""
    # The objects too, as the id of one that is gone may be that of another one.
    seen: dict[int, Any] = {}
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if _is_leaf(value) or id(value) in seen or id(value) in but or (isinstance(value, nn.Module) and not modules):
            continue
        seen[id(value)] = value
        yield value
        waiting += _parts(value)


def _is_leaf(value: Any) -> bool:
    """Return whether nothing behind a value belongs to the model: a plain value, or a calibration that a hook holds."""
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
    """Return what an object keeps, in its dictionary and its slots."""
    held = dict(getattr(value, "__dict__", None) or {})
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if isinstance(vars(cls).get(name), types.MemberDescriptorType) and hasattr(value, name):
                held[name] = getattr(value, name)
    return held


class _Replacement:
    """One replacement of tensors, which visits each object once."""

    def __init__(self, twin: Twin) -> None:
        self._twin = twin
        self._visited: dict[int, Any] = {}
        self._copies: dict[int, tuple[Any, Any]] = {}
        # Modules share objects: what was found of one is not looked for again.
        self._reaching: dict[int, tuple[Any, bool]] = {}
        self._without_twins: dict[int, Any] = {}

    def inside(self, value: Any) -> None:
        """Replace the tensors inside of a module or another object that is the proxy's own."""
        if id(value) in self._visited:
            return
        self._visited[id(value)] = value
        held = vars(value) if isinstance(value, nn.Module) else _attributes(value)
        for name, part in list(held.items()):
            new = self.of(part)
            if new is part:
                continue
            if isinstance(value, nn.Module):
                vars(value)[name] = new
            else:
                object.__setattr__(value, name, new)

    def of(self, value: Any) -> Any:
        """Return what is in the place of a value that is the proxy's own: itself, unless it cannot change in place."""
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
        """Return the copy of what a function holds that has twins inside; None if it has none."""
        if isinstance(value, Tensor):
            return self._twin(value)
        if isinstance(value, (nn.Module, torch.jit.ScriptFunction, *_FUNCTIONS)) or _is_leaf(value):
            return None
        if id(value) in self._visited:
            return None  # the proxy's own, in which the tensors are replaced
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
        """Return whether a value leads to a tensor that has a twin. None gets one later."""
        seen: dict[int, Any] = {}
        for part in _reached([value], but=self._without_twins):
            seen[id(part)] = part
            if isinstance(part, Tensor) and self._twin(part) is not None:
                return True
        self._without_twins |= seen
        return False

    def _reaches_tensors(self, value: Any) -> bool:
        """Return whether a value leads to a tensor, and find it out of all that it leads to."""
        if id(value) not in self._reaching:
            parents: dict[int, list[int]] = {}
            held: list[Any] = []
            leading: list[int] = []
            for part in _reached([value], but=self._reaching):
                held.append(part)
                for inner in [] if isinstance(part, Tensor) else _parts(part):
                    parents.setdefault(id(inner), []).append(id(part))
                    if self._reaching.get(id(inner), (None, False))[1]:
                        leading.append(id(inner))
                if isinstance(part, Tensor):
                    leading.append(id(part))
            found: set[int] = set()
            while leading:
                one = leading.pop()
                if one not in found:
                    found.add(one)
                    leading += parents.get(one, [])
            self._reaching |= {id(part): (part, id(part) in found) for part in held}
        return self._reaching[id(value)][1]
