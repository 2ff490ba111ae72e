"""Frozen proxies of one model under plans that differ in a few groups, one after another, as a search tries them.

A proxy is built once. For each plan it is put back to the state in which it was built and then frozen as any other, so
that nothing is left of the plan before, nor of what was done with the proxy. The codes of a weight depend on its own
entry of the plan alone, so that plans that share the entry share the codes, which are computed once.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.plan.apply import frozen_new, planned_weights
from quantizer.plan.changed_tensors import WatchedTensor
from quantizer.plan.site_plan import OperandPlan, SitePlan
from quantizer.proxy.build import build_proxy
from quantizer.proxy.kept_tensors import memory_of, reached_tensors
from quantizer.proxy.model_sharing import Sharing
from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.proxy.site import SourceCall

_CONTAINERS = (dict, OrderedDict, set, list)
_FIXED = (bool, int, float, str, type(None), torch.dtype, torch.device, BuiltinFunctionType, FunctionType)


class FrozenTries:
    """Frozen proxies of a model, each for use until the next one is asked for.

    A proxy to which somebody still refers by then is left alone, and another one is built.

    Args:
        model: the float model. If its parameters change between two plans, all is made anew; what ``.data`` writes
            between the sampled elements of a parameter is not seen, see ``changed_tensors.py``.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._built: _Built | None = None
        self._weights: list[WatchedTensor] = []
        self._codes: dict[tuple[str, str], tuple[OperandPlan, Tensor]] = {}

    def of(self, plan: Mapping[str, SitePlan]) -> nn.Module:
        """Return the frozen proxy of a plan, equal to that of ``frozen_proxy``."""
        self._forget_if_changed()
        if self._built is None or not self._built.put_back():
            self._built = _Built(build_proxy(self._model, eager_attention=True).eval())
        # No variable holds the proxy, as references to it are counted.
        known = {path: self._with_codes(path, entry) for path, entry in plan.items()}
        frozen_new(self._built.proxy, self._model, known)
        self._keep_codes(self._built.proxy, plan)
        self._built.note_references()
        return self._built.proxy

    def _forget_if_changed(self) -> None:
        now = list(self._model.named_parameters())
        same = len(now) == len(self._weights) and all(
            known.path == path and known.is_unchanged(parameter)
            for known, (path, parameter) in zip(self._weights, now, strict=True)
        )
        if not same:
            self._built, self._codes = None, {}
            self._weights = [WatchedTensor(path, parameter) for path, parameter in now]

    def _with_codes(self, path: str, entry: SitePlan) -> SitePlan:
        operands = []
        for planned in entry.operands:
            of, codes = self._codes.get((path, planned.name), (None, None))
            operands.append(planned if of is not planned else replace(planned, codes=codes))
        return replace(entry, operands=tuple(operands))

    def _keep_codes(self, proxy: nn.Module, plan: Mapping[str, SitePlan]) -> None:
        for site, quantizer, planned in planned_weights(proxy, plan):
            of, _ = self._codes.get((site.path, planned.name), (None, None))
            if planned.codes is None and of is not planned:
                assert quantizer.stored is not None
                # A copy, as others may write into those of the proxy.
                self._codes[site.path, planned.name] = planned, quantizer.stored.clone()


class _Built:
    """A proxy that was just built, with the state of its modules: classes and attributes. Tensors are not copied."""

    def __init__(self, proxy: nn.Module) -> None:
        self.proxy = proxy
        self._modules = list(proxy.modules())
        self._classes = [type(module) for module in self._modules]
        self._references: list[int] = []
        self._same = {id(value): value for value in _left_alone(self._modules)}
        self._state = [vars(module).copy() for module in self._modules]
        seen = Counter(id(value) for attributes in self._state for value in attributes.values())
        shallow, deep = set(), {}
        for place, attributes in enumerate(self._state):
            for name, value in attributes.items():
                if type(value) in _CONTAINERS and seen[id(value)] == 1 and self._holds_only_fixed(value):
                    shallow.add((place, name))
                elif not self._is_fixed(value):
                    deep[place, name] = value
        self._shallow, self._deep = shallow, self._copied(deep)
        self._take_copies()
        self._can_be_put_back = not any(map(_has_own_copy, self._modules))

    def note_references(self) -> None:
        """Count the references to the modules, before others get the proxy."""
        self._references = self._counted()

    def put_back(self) -> bool:
        """Restore classes and attributes; return False, and change nothing, if others still refer to a module."""
        held = any(now > then for now, then in zip(self._counted(), self._references, strict=True))
        if held or not self._can_be_put_back:
            return False
        for module, cls, attributes in zip(self._modules, self._classes, self._state, strict=True):
            module.__class__ = cls
            vars(module).clear()
            vars(module).update(attributes)
        self._take_copies()
        return True

    def _take_copies(self) -> None:
        """Give the modules copies of what can change in place, so that the state here does not."""
        for place, name in self._shallow:
            value = self._state[place][name]
            # An ordered dictionary, which most are, is slow to copy.
            vars(self._modules[place])[name] = value.copy() if value else type(value)()
        for (place, name), value in self._copied(self._deep).items():
            vars(self._modules[place])[name] = value

    def _copied(self, values: dict[tuple[int, str], Any]) -> dict[tuple[int, str], Any]:
        # One memo, so that what modules share, such as a configuration, they still share.
        return copy.deepcopy(values, dict(self._same))

    def _counted(self) -> list[int]:
        return [sys.getrefcount(module) + weakref.getweakrefcount(module) for module in self._modules]

    def _is_fixed(self, value: Any) -> bool:
        return isinstance(value, _FIXED) or id(value) in self._same

    def _holds_only_fixed(self, value: Any) -> bool:
        return all(map(self._is_fixed, value.values() if isinstance(value, dict) else value))


def _left_alone(modules: list[nn.Module]) -> list[Any]:
    """Return what is not copied with the attributes of modules: modules, tensors, and what nobody changes in place."""
    same: list[Any] = list(modules)
    for module in modules:
        for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            of_ours = isinstance(module, SourceCall | OperandQuantizer) and not isinstance(value, dict | set)
            if isinstance(value, Tensor | Sharing) or of_ours:
                same.append(value)
    parameters = {memory_of(p) for module in modules for p in module._parameters.values() if p is not None} - {None}
    return [*same, *(tensor for tensor in reached_tensors(modules) if memory_of(tensor) in parameters)]


def _has_own_copy(module: nn.Module) -> bool:
    """Return whether a class says itself how its modules are copied, so that their attributes are not all."""
    if isinstance(module, SourceCall | OperandQuantizer):
        return False
    cls: Any = type(module)
    return hasattr(cls, "__deepcopy__") or cls.__getstate__ is not nn.Module.__getstate__
