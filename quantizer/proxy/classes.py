"""The rewritten classes of a proxy, and which of their functions are rewritten.

For a class ``C(P)``, the generated class of C derives from C and from the generated class of P. The method resolution
order is generated C, C, generated P, P. So ``super()`` in C's rewritten method, whose ``__class__`` is still C, finds
P's rewritten method.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import nn

from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.proxy.recurrence import Recurrence, RecurrentLayer
from quantizer.proxy.site import SourceCall
from quantizer.rewrite.host_argument import HOSTS
from quantizer.rewrite.operator_patches import changes
from quantizer.rewrite.rebuild import Rebuilder, Rebuilt
from quantizer.rewrite.source_file import Key, SourceFile
from quantizer.rewrite.source_sites import SiteSource

FUNCTIONS = (types.FunctionType, property, staticmethod, classmethod)

# These classes compute nothing; the additions in their source are of indices.
_LEFT_ALONE = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

# Children that instrumentation adds, hidden from loops of a model over its children.
HIDDEN = (SourceCall, OperandQuantizer, Recurrence, RecurrentLayer)

# Python calls these without their name in the text, for example in a loop over a module.
IMPLICIT = frozenset({"__iter__", "__len__", "__getitem__", "__contains__", "__reversed__"})


def own_functions(cls: type) -> dict[str, Any]:
    """Return the functions that a class defines itself, by name, and its ``forward`` of any type."""
    return {name: own for name, own in vars(cls).items() if name == "forward" or isinstance(own, FUNCTIONS)}


def reachable_attributes(cls: type, reachable: frozenset[str]) -> Iterator[tuple[type, str, Any]]:
    """Yield every reachable attribute of a class and its bases, the most derived first."""
    for base in cls.__mro__:
        if is_ours(base):
            yield from ((base, name, attribute) for name, attribute in vars(base).items() if name in reachable)


def is_ours(cls: type) -> bool:
    """Return whether the functions of ``cls`` may be rewritten."""
    left_alone = (*_LEFT_ALONE, OperandQuantizer, Recurrence)
    return cls is not object and cls not in left_alone and not issubclass(cls, SourceCall)


_P = ParamSpec("_P")
_T = TypeVar("_T")

_Place = tuple[type, str]
_Derive = Callable[[type[nn.Module], tuple[type, ...], dict[str, Any], frozenset[str]], type[nn.Module]]


@dataclass(kw_only=True, slots=True)
class Rewritten:
    """Result for one class: the generated class (the original if nothing changed), sites, problems, refused patches."""

    cls: type[nn.Module]
    original: type[nn.Module]
    sites: tuple[SiteSource, ...]
    keys: frozenset[tuple[str, Key]]
    problems: tuple[str, ...]
    refused: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """The variants of the functions of a class and its bases.

    Names of sites are unique in a module. If a class and a base have sites of the same name (for example, both have a
    linear in ``forward``), those of the base are named with its class. All bases share one choice: with two variants of
    a base that is inherited twice, ``super()`` would not resolve as in the original.
    """

    qualified: frozenset[_Place] = frozenset()
    left_out: frozenset[_Place] = frozenset()
    unused: frozenset[_Place] = frozenset()
    host_targets: tuple[tuple[str, tuple[types.FunctionType, ...]], ...] = ()
    hands_host_to: frozenset[str] = frozenset()

    def within(self, cls: type) -> _Choice:
        def part(places: frozenset[_Place]) -> frozenset[_Place]:
            return frozenset(place for place in places if place[0] in cls.__mro__)

        return replace(self, qualified=part(self.qualified), left_out=part(self.left_out), unused=part(self.unused))


def _one_at_a_time(
    method: Callable[Concatenate[ClassRewriter, _P], _T],
) -> Callable[Concatenate[ClassRewriter, _P], _T]:
    """Return a method that one thread runs at a time, because results are registered before they are complete."""

    @functools.wraps(method)
    def locked(self: ClassRewriter, /, *args: _P.args, **keywords: _P.kwargs) -> _T:
        with self.lock:
            return method(self, *args, **keywords)

    return locked


class ClassRewriter:
    """A thread-safe cache of generated classes, which makes each of them once.

    Attributes:
        lock: held while anything is rewritten.
        rebuilder: rewrites the functions.
        qualified: rewrites functions whose sites are named with their class.
        done: results by class, names of the functions that may run in a forward pass, these functions, and choice. The
            functions are in the key because a class may be patched between two proxies.
        chosen: choices by the same key without the choice, for classes of modules (not those that are only bases).
        read: attribute names in the source of a function, by function.
    """

    def __init__(self, derive: _Derive) -> None:
        self._derive = derive
        self.lock = threading.RLock()
        self._start()

    def _start(self) -> None:
        self.rebuilder = Rebuilder(HIDDEN)
        self.qualified = Rebuilder(HIDDEN, qualified=True)
        self.done: dict[Any, Rewritten] = {}
        self.chosen: dict[Any, _Choice] = {}
        self.read: dict[Any, set[str]] = {}
        self._patches = changes()

    def _renew(self) -> None:
        """Clear all results if patches or operations were registered since; existing proxies keep their classes."""
        if self._patches != changes():
            self._start()

    @_one_at_a_time
    def refresh(self) -> None:
        """Update the globals of rewritten functions."""
        self.rebuilder.refresh()
        self.qualified.refresh()

    @_one_at_a_time
    def files(self) -> list[SourceFile]:
        """Return all source files whose functions were searched."""
        return [*self.rebuilder.files.values(), *self.qualified.files.values()]

    @_one_at_a_time
    def holds_sites(self, value: Any) -> bool:
        """Return whether a value is a function, or a ``functools.partial`` of one, that contains or reaches sites."""
        return self.rebuilder.holds_sites(value)

    @_one_at_a_time
    def reachable(self, model: nn.Module, original: Callable[[nn.Module], type], kept: Iterable[str]) -> frozenset[str]:
        """Return the names of the functions that a forward pass of ``model`` may run.

        The search starts from ``forward``, the public names of the root's class and ``kept`` names, and follows every
        attribute name in the source of a reached function. It omits construction, resizing, saving and the like, whose
        arithmetic is not quantized.
        """
        self._renew()
        classes = {cls for module in model.modules() for cls in original(module).__mro__ if is_ours(cls)}
        functions = [own_functions(cls) for cls in classes]
        names = {"forward", *IMPLICIT, *kept} | {name for name in vars(original(model)) if not name.startswith("_")}
        reached: set[str] = set()
        while names - reached:
            name = (names - reached).pop()
            reached.add(name)
            # Read only reached functions: other functions of a library's base classes lead into dozens of files.
            names = names.union(*(self._names_read(of_class[name]) for of_class in functions if name in of_class))
        return frozenset(name for of_class in functions for name in of_class if name in reached)

    def _names_read(self, attribute: Any) -> set[str]:
        """Return the attribute names in the source of a function; none for a ``forward`` of another type."""
        if not isinstance(attribute, FUNCTIONS):
            return set()
        if attribute not in self.read:
            self.read[attribute] = self.rebuilder.names_read(attribute)
        return self.read[attribute]

    @_one_at_a_time
    def rewrite(self, cls: type[nn.Module], reachable: frozenset[str]) -> Rewritten:
        """Return the generated class of a module class, with its ``reachable`` functions rewritten."""
        self._renew()
        key = self._key(cls, reachable)
        if key not in self.chosen:
            self.chosen[key] = self._choose(cls, reachable)
        rewritten = self._rewrite(cls, reachable, self.chosen[key])
        self.rebuilder.settle()
        self.qualified.settle()
        return rewritten

    def _key(self, cls: type, reachable: frozenset[str]) -> tuple[type, frozenset[str], tuple[Any, ...]]:
        places = list(reachable_attributes(cls, reachable))
        relevant = frozenset(name for _, name, _ in places)
        return cls, relevant, tuple(attribute for *_, attribute in places if isinstance(attribute, FUNCTIONS))

    def _choose(self, cls: type, reachable: frozenset[str]) -> _Choice:
        host_targets = self._host_targets(cls, reachable)
        site_names: dict[str, SiteSource] = {}
        qualified: set[_Place] = set()
        left_out: set[_Place] = set()
        unused: set[_Place] = set()
        hands_host_to: set[str] = set()
        for owner, name, attribute in reachable_attributes(cls, reachable):
            rebuilt = self.rebuilder.rebuild(attribute, name, dict(host_targets))
            if _clash(rebuilt, site_names):
                if not self._is_mentioned(cls, owner, name):
                    unused.add((owner, name))
                    continue
                rebuilt = self.qualified.rebuild(attribute, name, dict(host_targets))
                if _clash(rebuilt, site_names):
                    left_out.add((owner, name))
                    continue
                qualified.add((owner, name))
            hands_host_to |= rebuilt.hands_host_to
            site_names.update({site.attribute: site for site in rebuilt.sites if site.reason is None})
        self._share(host_targets, qualified)
        return _Choice(
            qualified=frozenset(qualified),
            left_out=frozenset(left_out),
            unused=frozenset(unused),
            host_targets=host_targets,
            hands_host_to=frozenset(hands_host_to),
        )

    def _share(
        self, host_targets: tuple[tuple[str, tuple[types.FunctionType, ...]], ...], qualified: set[_Place]
    ) -> None:
        """Make the functions of a class pass their host to the chosen variants of its static and class methods."""
        places = {(name, getattr(vars(owner)[name], "__func__", None)) for owner, name in qualified}
        for name, functions in host_targets:
            for function in functions:
                rebuilder = self.qualified if (name, function) in places else self.rebuilder
                rebuilt = rebuilder.rebuild(function, name, dict(host_targets))
                self.rebuilder.modules.add_variant(function, rebuilt)
                self.qualified.modules.add_variant(function, rebuilt)

    def _is_mentioned(self, cls: type, owner: type, name: str) -> bool:
        """Return whether a function of a base may run: not overridden, or mentioned by name in a subclass."""
        above = [base for base in cls.__mro__[: cls.__mro__.index(owner)] if is_ours(base)]
        if not any(name in vars(base) for base in above):
            return True
        return any(name in self._names_read(own) for base in above for own in own_functions(base).values())

    def _host_targets(
        self, cls: type, reachable: frozenset[str]
    ) -> tuple[tuple[str, tuple[types.FunctionType, ...]], ...]:
        candidates: dict[str, tuple[types.FunctionType, ...]] = {}
        for _, name, attribute in reachable_attributes(cls, reachable):
            function = attribute.__func__ if isinstance(attribute, staticmethod | classmethod) else None
            if isinstance(function, types.FunctionType):
                candidates[name] = (*candidates.get(name, ()), function)
        targets = {
            name: tuple(f for f in functions if self.rebuilder.needs_host(f, name, candidates))
            for name, functions in candidates.items()
        }
        return tuple((name, functions) for name, functions in targets.items() if functions)

    def _rewrite(self, cls: type[nn.Module], reachable: frozenset[str], choice: _Choice) -> Rewritten:
        choice = choice.within(cls)
        key = (*self._key(cls, reachable), choice)
        if key not in self.done:
            self.done[key] = self._make(cls, key[1], choice)
        return self.done[key]

    def _make(self, cls: type[nn.Module], reachable: frozenset[str], choice: _Choice) -> Rewritten:
        if not is_ours(cls):
            return Rewritten(cls=cls, original=cls, sites=(), keys=frozenset(), problems=())
        namespace: dict[str, Any] = {}
        sites: dict[SiteSource, None] = {}
        keys: set[tuple[str, Key]] = set()
        problems: dict[str, None] = {}
        refused: dict[str, None] = {}
        for name, attribute in vars(cls).items():
            if name not in reachable:
                continue
            if name == "forward" and not isinstance(attribute, FUNCTIONS):
                kind = type(attribute).__name__
                problems[f"its forward is a {kind}, not a function, so it is not rewritten"] = None
            rebuilt = self._rebuild(cls, name, attribute, choice)
            sites.update(dict.fromkeys(rebuilt.sites))
            keys |= rebuilt.keys
            problems.update(dict.fromkeys(rebuilt.problems))
            refused.update(dict.fromkeys(rebuilt.refused_patches))
            if rebuilt.function is not None and not rebuilt.host_is_argument:
                namespace[name] = rebuilt.function
        parents = [self._rewrite(base, reachable, choice) for base in cls.__bases__]
        for parent in parents:
            sites.update(dict.fromkeys(parent.sites))
            keys |= parent.keys
            problems.update(dict.fromkeys(parent.problems))
            refused.update(dict.fromkeys(parent.refused))
        generated = [parent.cls for parent in parents if parent.cls is not parent.original]
        result_class = cls
        if namespace or generated:
            namespace[HOSTS] = frozenset(site.mark for site in sites if site.reason is None)
            result_class = self._derive(cls, (cls, *generated), namespace, reachable)
        return Rewritten(
            cls=result_class,
            original=cls,
            sites=_each_once(sites),
            keys=frozenset(keys),
            problems=tuple(problems),
            refused=tuple(refused),
        )

    def _rebuild(self, cls: type, name: str, attribute: Any, choice: _Choice) -> Rebuilt:
        if (cls, name) in choice.unused:
            return Rebuilt()
        if (cls, name) in choice.left_out:
            clash = f"{name} of {cls.__qualname__} has sites of the same names as other functions of this module"
            return Rebuilt(problem=f"{clash}, so it is not rewritten")
        rebuilder = self.qualified if (cls, name) in choice.qualified else self.rebuilder
        rebuilt = rebuilder.rebuild(attribute, name, dict(choice.host_targets))
        if rebuilt.host_is_argument and name not in choice.hands_host_to:
            return Rebuilt(passed_on=[rebuilt], host_is_argument=True)
        return rebuilt


def _clash(rebuilt: Rebuilt, site_names: dict[str, SiteSource]) -> bool:
    names = dict(site_names)
    hosted = [site for site in rebuilt.sites if site.reason is None]
    return any(names.setdefault(site.attribute, site) != site for site in hosted)


def _each_once(sites: Iterable[SiteSource]) -> tuple[SiteSource, ...]:
    """Return the sites without the skipped ones whose name another function's rewritten site has."""
    sites = list(sites)
    names = {site.name for site in sites if site.reason is None}
    return tuple(site for site in sites if site.reason is None or site.name not in names)
