"""Functions rebuilt from edited source, with their decorators, closures and globals.

Nothing is executed again: no import, no class body, no decorator. A rewritten function is the compiled code of the
rewritten source in a new function object with the original's defaults and closure, so ``super()`` works. Its globals
are the dictionary of a synthetic module: a copy of the original module's, with rewritten functions. The synthetic
module is in ``sys.modules`` under its own ``__name__``, because ``torch.compile`` and ``torch.export`` look globals up
by that name. The original module does not change.

A function that needs a host gets it as a keyword, through the wrappers around it. A wrapper that filters or reads its
keywords would drop the host or fail on it; this is determined from its source.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import sys
import types
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

from quantizer.errors import SourceError
from quantizer.plan.reasons import ReasonCode
from quantizer.rewrite.closures import cells, contents, copy_attributes, rebound
from quantizer.rewrite.host_argument import Wrapped, guarded
from quantizer.rewrite.module_globals import SyntheticModules
from quantizer.rewrite.operations import operation
from quantizer.rewrite.source_file import Key, SourceFile, definition_of, future_flags
from quantizer.rewrite.source_sites import FunctionSource, HelperCall, SiteSource


def innermost(function: types.FunctionType, name: str | None = None) -> types.FunctionType:
    """Return the function that decorators wrap.

    The search follows ``__wrapped__``. For a decorator without ``functools.wraps``, it follows closure cells: a nested
    function is a wrapper if its cells reach exactly one function that was written under ``name``.
    """
    name = name or function.__name__
    visited: set[int] = set()
    while id(function) not in visited:
        visited.add(id(function))
        wrapped = getattr(function, "__wrapped__", None)
        if isinstance(wrapped, types.FunctionType):
            function = wrapped
        elif function.__code__.co_name != name and "<locals>." in function.__code__.co_qualname:
            inner = [candidate for candidate in _reached(function) if candidate.__code__.co_name == name]
            function = inner[0] if len(inner) == 1 else function
    return function


def clone_chain(
    wrapper: types.FunctionType,
    inner: types.FunctionType,
    replacement: types.FunctionType,
    registries: Mapping[int, Any] = types.MappingProxyType({}),
) -> types.FunctionType | None:
    """Return the same wrappers around ``replacement``; None if no closure cell reaches ``inner``.

    ``registries`` replace other registries, by their ids.
    """
    # A wrapper with the function only in __wrapped__ calls it through an object that was not cloned.
    if not any(_leads_to(value, inner, cells_only=True) for value in cells(wrapper)):
        return None
    clone: types.FunctionType = rebound(
        wrapper, lambda value: replacement if value is inner else registries.get(id(value))
    )
    return clone


def between(wrapper: types.FunctionType, inner: types.FunctionType) -> list[types.FunctionType]:
    """Return the functions around ``inner``, from ``wrapper`` on."""
    return [
        wrapper,
        *(function for function in _reached(wrapper) if function is not inner and _leads_to(function, inner)),
    ]


def registries_of(wrapper: types.FunctionType, inner: types.FunctionType) -> Iterator[MutableMapping[Any, Any]]:
    """Yield the registries in closure cells of wrappers around ``inner``, in which they look up functions."""
    for function in between(wrapper, inner):
        yield from (value for value in cells(function) if isinstance(value, MutableMapping))


def copied_registry(registry: MutableMapping[Any, Any]) -> MutableMapping[Any, Any]:
    """Return a copy of a registry with the same values."""
    copied = copy.copy(registry)
    # A registry class stores its entries in attributes.
    for name, value in vars(copied).items() if hasattr(copied, "__dict__") else ():
        if isinstance(value, MutableMapping):
            vars(copied)[name] = copy.copy(value)
    return copied


def variables_that_lead_to(inner: types.FunctionType, wrapper: types.FunctionType) -> set[str]:
    """Return the closure variables of a wrapper that reach ``inner``."""
    named = zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True)
    return {name for name, cell in named if _leads_to(contents(cell), inner)}


def transplant(original: types.FunctionType, code: types.CodeType, namespace: dict[str, Any]) -> types.FunctionType:
    """Return a copy of ``original`` with other code and globals."""
    function = types.FunctionType(code, namespace, original.__name__, original.__defaults__, original.__closure__)
    copy_attributes(original, function)
    return function


def _reached(function: types.FunctionType, cells_only: bool = False) -> list[types.FunctionType]:
    """Return the functions that closure cells (and ``__wrapped__``) reach, each once, without the function itself."""
    functions: dict[int, types.FunctionType] = {id(function): function}
    waiting = [function]
    while waiting:
        current = waiting.pop()
        wrapped = () if cells_only else (getattr(current, "__wrapped__", None),)
        for value in (*cells(current), *wrapped):
            if isinstance(value, types.FunctionType) and id(value) not in functions:
                functions[id(value)] = value
                waiting.append(value)
    return list(functions.values())[1:]


def _leads_to(value: Any, inner: types.FunctionType, cells_only: bool = False) -> bool:
    if not isinstance(value, types.FunctionType):
        return False
    return value is inner or any(reached is inner for reached in _reached(value, cells_only))


def hand_on_keywords(wrapper: types.FunctionType, inner: types.FunctionType) -> bool:
    """Return whether all wrappers around ``inner`` only pass their additional keywords on to it."""
    return all(_hands_on(function, inner) for function in between(wrapper, inner))


def _hands_on(wrapper: types.FunctionType, inner: types.FunctionType) -> bool:
    """Return whether a wrapper passes ``**keywords`` in each call of the wrapped function, and nowhere else."""
    try:
        node = definition_of(wrapper)
    except SourceError:
        return False
    if node is None or node.args.kwarg is None:
        return False
    keywords, wrapped = node.args.kwarg.arg, variables_that_lead_to(inner, wrapper)
    body = [child for statement in node.body for child in ast.walk(statement)]
    if any(isinstance(child, ast.arg) and child.arg in {keywords, *wrapped} for child in body):
        return False
    calls = [child for child in body if isinstance(child, ast.Call) and _passes_keywords(child, wrapped, keywords)]
    names = [child.id for child in body if isinstance(child, ast.Name)]
    if {"locals", "vars"} & {*names}:
        return False
    uses = sum(names.count(name) for name in wrapped)
    return len(calls) == names.count(keywords) == uses > 0


def _passes_keywords(call: ast.Call, wrapped: set[str], keywords: str) -> bool:
    starred = [word.value for word in call.keywords if word.arg is None]
    return (
        isinstance(call.func, ast.Name)
        and call.func.id in wrapped
        and any(isinstance(value, ast.Name) and value.id == keywords for value in starred)
    )


HostTargets = Mapping[str, tuple[types.FunctionType, ...]]
"""Static and class methods with sites, by name: the possible targets of ``self.name(...)``."""

_NO_TARGETS: HostTargets = types.MappingProxyType({})


_TORCH_FUNCTIONAL = "torch.nn.functional"
_NOT_SEARCHED = sys.stdlib_module_names | {"torch"}


class Rebuilder:
    """Rewriter of functions, which rewrites each once and caches the results.

    Attributes:
        files: source files by (path, id of the globals of their functions, compiler flags).
        modules: the globals of rewritten functions.
        done: results by id of the function and of its ``host_targets``, with that function.
    """

    def __init__(self, hidden: tuple[type, ...] = (), *, qualified: bool = False) -> None:
        self.qualified = qualified
        self.files: dict[tuple[str, int, int], SourceFile] = {}
        self.modules = SyntheticModules(hidden)
        self.done: dict[tuple[int, frozenset[int]], tuple[types.FunctionType, Rebuilt]] = {}

    def file(self, function: types.FunctionType) -> SourceFile:
        """Return the source file of a function, parsed once."""
        flags = future_flags(function.__code__)
        key = (function.__code__.co_filename, id(function.__globals__), flags)
        if key not in self.files or not self.files[key].holds(function):
            # Read again, because a module may have been reloaded.
            self.files[key] = SourceFile(key[0], function.__globals__, flags, qualified=self.qualified)
        return self.files[key]

    def settle(self) -> None:
        """Register newly rebuilt functions, so that callers pass them a host."""
        self.modules.settle()

    def refresh(self) -> None:
        """Update all synthetic modules, because globals may have been set in the meantime."""
        self.modules.refresh()

    def names_read(self, attribute: Any) -> set[str]:
        """Return the attribute names in the source of a function and of the helpers that it reaches."""
        plain = _plain(attribute)
        return self._names_read(plain, None, set()) if plain is not None else set()

    def _names_read(self, function: types.FunctionType, name: str | None, visited: set[int]) -> set[str]:
        function = innermost(function, name)
        if id(function) in visited:
            return set()
        visited.add(id(function))
        try:
            source = self.file(function).find(function)
        except SourceError:
            # Without source, read the names in the compiled code.
            return set(function.__code__.co_names)
        names = set(source.attributes_read)
        for called, helper in self._helpers(function, source):
            names |= self._names_read(helper, called, visited)
        return names

    def _helpers(
        self, function: types.FunctionType, source: FunctionSource
    ) -> Iterator[tuple[str, types.FunctionType]]:
        for name in sorted(source.globals_read):
            value = function.__globals__.get(name)
            if _may_be_rewritten(value):
                yield name, value
        for call in source.calls:
            for target in _targets(function, call, _NO_TARGETS):
                yield call.target[-1], target

    def needs_host(self, attribute: Any, name: str | None = None, host_targets: HostTargets = _NO_TARGETS) -> bool:
        """Return whether a function without a module argument contains a site, or calls a function that does."""
        plain = _plain(attribute)
        return plain is not None and self._needs_host(plain, name, host_targets, set())

    def holds_sites(self, value: Any) -> bool:
        """Return whether a value is a function, or a ``functools.partial`` of one, that contains or reaches sites."""
        value = value.func if isinstance(value, functools.partial) else value
        return _may_be_rewritten(value) and any(
            site.edits and not operation(site.operation).is_place for site in self.rebuild(value).sites
        )

    def _needs_host(
        self, function: types.FunctionType, name: str | None, host_targets: HostTargets, visited: set[int]
    ) -> bool:
        function = innermost(function, name)
        if id(function) in visited:
            return False
        visited.add(id(function))
        try:
            source = self.file(function).find(function)
        except SourceError:
            return False
        if not source.host_is_argument:
            return False
        return any(site.edits for site in source.sites) or any(
            self._needs_host(target, call.target[-1], host_targets, visited)
            for call in source.calls
            for target in _targets(function, call, host_targets)
        )

    def rebuild(self, attribute: Any, name: str | None = None, host_targets: HostTargets = _NO_TARGETS) -> Rebuilt:
        """Return the result for an attribute of a class or module: a plain function, a property, or decorated."""
        if isinstance(attribute, property):
            if str(getattr(attribute.fget, "__module__", "")).partition(".")[0] == "torch":
                # Properties of parametrized layers call modules, and contain no quantizable call.
                return Rebuilt()
            inner = self.rebuild(attribute.fget, name, host_targets)
            function = property(inner.function, attribute.fset, attribute.fdel) if inner.function else None
            return replace(inner, function=function)
        if isinstance(attribute, staticmethod | classmethod):
            inner = self.rebuild(attribute.__func__, name, host_targets)
            if inner.is_method and inner.function is not None:
                # The source suggests that the first argument is the module, but the class shows that it is not.
                return Rebuilt(problem=ReasonCode.LATE_DECORATOR.text(name=name))
            return replace(inner, function=type(attribute)(inner.function) if inner.function else None)
        if not isinstance(attribute, types.FunctionType):
            return Rebuilt()
        key = (id(attribute), frozenset(id(target) for targets in host_targets.values() for target in targets))
        if key not in self.done:
            result = Rebuilt()
            # Registered before the work is done, because two functions may call each other.
            self.done[key] = (attribute, result)
            try:
                self._rebuild(attribute, name, host_targets, result)
            except SourceError as error:
                result.problem = str(error)
                result.own.clear()
                result.helpers.clear()
        return self.done[key][1]

    def _rebuild(
        self, function: types.FunctionType, name: str | None, host_targets: HostTargets, result: Rebuilt
    ) -> None:
        inner = innermost(function, name)
        rewritten = self._rewrite(inner, host_targets, result)
        registries = {} if inner is function else self._registries(function, inner, result)
        if (rewritten is not None or registries) and inner is not function:
            clone = clone_chain(function, inner, rewritten or inner, registries)
            if clone is None:
                raise SourceError(ReasonCode.HELD_BY_DECORATOR.text(name=inner.__qualname__))
            if rewritten is not None and result.host_is_argument and not hand_on_keywords(function, inner):
                result.function = Wrapped(function, inner, rewritten)
                return
            rewritten = clone
        result.function = rewritten

    def _registries(
        self, wrapper: types.FunctionType, inner: types.FunctionType, result: Rebuilt
    ) -> dict[int, MutableMapping[Any, Any]]:
        """Return copies of the registries of wrappers, with rewritten functions in them, by the id of the original.

        Functions with sites only in helpers are not replaced, because a shared helper has one site for all of them.
        """
        copies: dict[int, MutableMapping[Any, Any]] = {}
        for registry in registries_of(wrapper, inner):
            for name, value in dict(registry).items():
                rebuilt = self.rebuild(value) if _may_be_rewritten(value) else Rebuilt()
                if rebuilt.function is None or not any(site.edits for site in rebuilt.own):
                    continue
                result.helpers.append(rebuilt)
                if id(registry) not in copies:
                    copies[id(registry)] = copied_registry(registry)
                copies[id(registry)][name] = rebuilt.function
        return copies

    def _rewrite(
        self, function: types.FunctionType, host_targets: HostTargets, result: Rebuilt
    ) -> types.FunctionType | None:
        file = self.file(function)
        source = file.find(function)
        result.own = list(source.sites)
        result.is_method = source.is_method
        replaced: dict[str, Any] = {}
        for name in sorted(source.globals_read):
            value = function.__globals__.get(name)
            if _may_be_rewritten(value) and not self.needs_host(value, name, host_targets):
                helper = self.rebuild(value, name, host_targets)
                result.helpers.append(helper)
                if helper.function is not None and not helper.host_is_argument:
                    replaced[name] = helper.function
        receivers = self._pass_host(function, file, source, host_targets, result)
        result.host_is_argument = source.takes_host
        for names in sorted(source.values_read):
            value = _look_up(function.__globals__, names)
            for helper_function in [value] if _may_be_rewritten(value) else _items(value):
                is_item = helper_function is not value
                if id(helper_function) not in receivers and (
                    is_item or self.needs_host(helper_function, names[-1], host_targets)
                ):
                    result.passed_on.append(self.rebuild(helper_function, None if is_item else names[-1], host_targets))
        result.refused = file.refused
        if not replaced and not source.changed:
            return None
        code = file.code(source.key)
        if code.co_freevars != function.__code__.co_freevars:
            raise SourceError(f"{file.path}: rewriting changes the closure variables of {source.key[0]}")
        result.key = (file.rewritten_name, source.key)
        rewritten = transplant(function, code, self.modules.namespace(function.__globals__, replaced, receivers))
        mark = next((site.mark for site in source.sites if site.edits), None)
        if mark is None or source.is_method or source.host_is_argument or source.host is None:
            return rewritten
        return guarded(rewritten, function, source.host, mark)

    def _pass_host(
        self,
        function: types.FunctionType,
        file: SourceFile,
        source: FunctionSource,
        host_targets: HostTargets,
        result: Rebuilt,
    ) -> dict[int, tuple[types.FunctionType, Rebuilt]]:
        """Activate the calls whose targets need the function's host; return those targets, by id."""
        receivers: dict[int, tuple[types.FunctionType, Rebuilt]] = {}
        for call in source.calls:
            for target in _targets(function, call, host_targets):
                name = None if call.item else call.target[-1]
                needed = self.needs_host(target, name, host_targets)
                if not needed and not (call.item and self.rebuild(target, name, host_targets).sites):
                    continue
                file.pass_host(call)
                helper = self.rebuild(target, name, host_targets)
                receivers[id(target)] = (target, helper)
                if call.of_class:
                    result.handed_to.add(call.target[-1])
                else:
                    result.helpers.append(helper)
        return receivers


def _may_be_rewritten(helper: Any) -> TypeGuard[types.FunctionType]:
    """Return whether a global is a function to search: not of Python's library, and of torch only ``nn.functional``."""
    if not isinstance(helper, types.FunctionType):
        return False
    module = helper.__module__ or ""
    package = module.partition(".")[0]
    return package not in _NOT_SEARCHED or module == _TORCH_FUNCTIONAL


def _plain(attribute: Any) -> types.FunctionType | None:
    """Return the function of a property, a static or a class method."""
    plain = attribute.fget if isinstance(attribute, property) else attribute
    if isinstance(plain, staticmethod | classmethod):
        plain = plain.__func__
    return plain if isinstance(plain, types.FunctionType) else None


def _targets(
    function: types.FunctionType, call: HelperCall, host_targets: HostTargets
) -> tuple[types.FunctionType, ...]:
    if call.of_class:
        return host_targets.get(call.target[-1], ())
    target = _look_up(function.__globals__, call.target)
    if call.item:
        return _items(target)
    return (target,) if _may_be_rewritten(target) else ()


def _items(registry: Any) -> tuple[types.FunctionType, ...]:
    # Other kinds of registries compute their items.
    values = registry.values() if type(registry) is dict else registry if type(registry) in (list, tuple) else ()
    return tuple(value for value in values if _may_be_rewritten(value))


def _look_up(namespace: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """Return the object of a dotted name: a global, an object of another module, or a static or class method."""
    value: Any = namespace.get(names[0])
    for name in names[1:]:
        if isinstance(value, types.ModuleType):
            # The module's own dictionary, because getattr on a lazy module imports much of a library.
            value = value.__dict__.get(name)
        elif isinstance(value, type):
            value = inspect.getattr_static(value, name, None)
            value = value.__func__ if isinstance(value, staticmethod | classmethod) else None
        else:
            return None
    return value


@dataclass(kw_only=True, slots=True)
class Rebuilt:
    """Result of rewriting one function.

    Attributes:
        function: replaces the original; None: the original stays.
        host_is_argument: ``function`` needs a host from its callers, so it cannot replace the original.
        is_method: its source suggests that its first argument is the module.
        own: the sites in the function itself.
        helpers: results for the functions that it calls.
        passed_on: results for functions that it mentions, but to which it passes no host.
        handed_to: names of static and class methods to which it passes its host.
        key: file and key of the rewritten function.
        problem: why it could not be rewritten.
        refused: why operator patches were not applied to its file.
    """

    function: Any = None
    host_is_argument: bool = False
    is_method: bool = False
    own: list[SiteSource] = field(default_factory=list)
    helpers: list[Rebuilt] = field(default_factory=list)
    passed_on: list[Rebuilt] = field(default_factory=list)
    handed_to: set[str] = field(default_factory=set)
    key: tuple[str, Key] | None = None
    problem: str | None = None
    refused: list[str] = field(default_factory=list)

    def reached(self) -> Iterator[Rebuilt]:
        """Yield this result and the results of all reached helpers, each once; helpers may call each other."""
        visited: set[int] = set()
        waiting = [self]
        while waiting:
            current = waiting.pop(0)
            if id(current) not in visited:
                visited.add(id(current))
                yield current
                waiting += current.helpers

    @property
    def sites(self) -> list[SiteSource]:
        """Sites in the function and its helpers, then sites in helpers without a host, with the reason."""
        sites: dict[SiteSource, None] = {}
        refused: dict[SiteSource, None] = {}
        for rebuilt in self.reached():
            sites.update(dict.fromkeys(rebuilt.own))
            for helper in rebuilt.passed_on:
                refused.update({_without_host(site): None for other in helper.reached() for site in other.own})
        names = {site.name for site in sites}
        return [*sites, *(site for site in refused if site.name not in names)]

    @property
    def keys(self) -> set[tuple[str, Key]]:
        return {rebuilt.key for rebuilt in self.reached() if rebuilt.key is not None}

    @property
    def problems(self) -> list[str]:
        return list(dict.fromkeys(rebuilt.problem for rebuilt in self.reached() if rebuilt.problem is not None))

    @property
    def refused_patches(self) -> list[str]:
        """Reasons why operator patches were not applied to the files that take part."""
        return list(dict.fromkeys(message for rebuilt in self.reached() for message in rebuilt.refused))

    @property
    def hands_host_to(self) -> set[str]:
        """Names of static and class methods that get a host, also from helpers."""
        return set().union(*(rebuilt.handed_to for rebuilt in self.reached()))


def _without_host(site: SiteSource) -> SiteSource:
    """Return the site as not quantized, because its function gets no module."""
    passed_on = ReasonCode.PASSED_ON.text(function=site.name.rpartition(".")[0])
    return replace(site, reason=site.reason or passed_on, edits=())
