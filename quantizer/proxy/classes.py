"""Generated classes: a module's own class with its functions rewritten.

For a class ``C(P)`` the generated class of C derives from C *and* from the generated class of P, in this order of
resolution: generated C, C, generated P, P. So ``super()`` in C's rewritten method, whose ``__class__`` is still C,
finds P's rewritten method.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch import nn

from quantizer.proxy.sharing import end_sharing
from quantizer.proxy.site import Site
from quantizer.source.find import SiteSource
from quantizer.source.rebuild import Rebuilder
from quantizer.source.text import Key

__all__ = [
    "REWRITER",
    "ClassRewriter",
    "Rewritten",
    "as_sharer",
    "kept_methods",
    "original_class",
    "restore",
    "with_stored_weight",
]

_FUNCTIONS = (types.FunctionType, property, staticmethod, classmethod)

# They compute nothing, and the additions in their source are of indices.
_LEFT_ALONE = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(kw_only=True, slots=True)
class Rewritten:
    """What became of one class: the generated class (the class itself where nothing changed), its sites, problems."""

    cls: type[nn.Module]
    original: type[nn.Module]
    sites: tuple[SiteSource, ...]
    keys: frozenset[tuple[str, Key]]
    problems: tuple[str, ...]


class ClassRewriter:
    """Makes generated classes, each once.

    Attributes:
        rebuilder: rewrites the functions.
        done: results by original class and those of its functions, by name, that may run in a forward pass. The
            functions themselves are in the key, because a class may be patched between two proxies.
        read: attribute names that a function mentions, by function.
    """

    def __init__(self) -> None:
        self.rebuilder = Rebuilder()
        self.done: dict[tuple[type[nn.Module], frozenset[str], tuple[Any, ...]], Rewritten] = {}
        self.read: dict[Any, set[str]] = {}

    def reachable(self, model: nn.Module) -> frozenset[str]:
        """Names of the functions that a forward pass of ``model`` may run.

        Starts from ``forward`` and from what the root's own class defines, and follows every attribute name that a
        function found so far mentions. That leaves out construction, resizing, saving and the like, whose arithmetic
        is none of ours.
        """
        classes = {cls for module in model.modules() for cls in original_class(module).__mro__ if _is_ours(cls)}
        root = vars(original_class(model))
        names = {"forward"} | {name for name in root if not name.startswith("_")}
        names |= {value.__name__ for module in model.modules() for value in kept_methods(module).values()}
        reached: set[str] = set()
        while names - reached:
            name = (names - reached).pop()
            reached.add(name)
            for cls in classes:
                names |= self._functions(cls).get(name, set())
        return frozenset(name for cls in classes for name in self._functions(cls) if name in reached)

    def _functions(self, cls: type[nn.Module]) -> dict[str, set[str]]:
        functions = {name: attribute for name, attribute in vars(cls).items() if isinstance(attribute, _FUNCTIONS)}
        for attribute in functions.values():
            if attribute not in self.read:
                self.read[attribute] = self.rebuilder.names_read(attribute)
        read = {name: self.read[attribute] for name, attribute in functions.items()}
        # A forward that is no function cannot be looked into, but must be reported.
        return read | {name: set() for name in {"forward"} & vars(cls).keys() - read.keys()}

    def rewrite(self, cls: type[nn.Module], reachable: frozenset[str]) -> Rewritten:
        """The generated class of a module class, with those of its functions rewritten that are ``reachable``."""
        bases = [vars(base) for base in cls.__mro__ if _is_ours(base)]
        relevant = frozenset(name for base in bases for name in base) & reachable
        functions = (base[name] for base in bases for name in sorted(relevant & base.keys()))
        key = (cls, relevant, tuple(function for function in functions if isinstance(function, _FUNCTIONS)))
        if key not in self.done:
            self.done[key] = self._rewrite(cls, relevant)
        return self.done[key]

    def _rewrite(self, cls: type[nn.Module], reachable: frozenset[str]) -> Rewritten:
        if not _is_ours(cls):
            return Rewritten(cls=cls, original=cls, sites=(), keys=frozenset(), problems=())
        namespace: dict[str, Any] = {}
        sites: list[SiteSource] = []
        keys: set[tuple[str, Key]] = set()
        problems: list[str] = []
        for name, attribute in vars(cls).items():
            if name not in reachable:
                continue
            rebuilt = self.rebuilder.rebuild(attribute)
            if name == "forward" and not isinstance(attribute, _FUNCTIONS):
                problems.append(f"its forward is a {type(attribute).__name__} and no function, so it stays as it is")
            sites += [site for site in rebuilt.sites if site not in sites]
            keys |= rebuilt.keys
            if rebuilt.function is not None:
                namespace[name] = rebuilt.function
            if rebuilt.problem is not None and rebuilt.problem not in problems:
                problems.append(rebuilt.problem)
        parents = []
        for base in cls.__bases__:
            parent, left_out = self._parent(base, reachable, sites)
            parents.append(parent)
            if left_out & set().union(*self._functions(cls).values()):
                clash = f"{', '.join(sorted(left_out))} of {base.__qualname__} and of {cls.__qualname__}"
                problems.append(
                    f"{clash} have sites of the same names, so those of {base.__qualname__} stay as they are"
                )
            sites += [site for site in parent.sites if site not in sites]
            keys |= parent.keys
            problems += [problem for problem in parent.problems if problem not in problems]
        generated = [parent.cls for parent in parents if parent.cls is not parent.original]
        made = cls
        if namespace or generated:
            made = self._derive(cls, (cls, *generated), namespace, reachable)
        return Rewritten(cls=made, original=cls, sites=tuple(sites), keys=frozenset(keys), problems=tuple(problems))

    def _parent(
        self, base: type[nn.Module], reachable: frozenset[str], taken: list[SiteSource]
    ) -> tuple[Rewritten, frozenset[str]]:
        """The generated class of a base, and which of its functions were left out.

        A module can hold one site of a name: functions whose sites have names that are ``taken`` stay as they are.
        """
        names = {site.attribute: site for site in taken}

        def clashes(parent: Rewritten) -> frozenset[str]:
            found = (site for site in parent.sites if names.get(site.attribute, site) != site)
            return frozenset(site.name.partition(".")[0] for site in found)

        left_out = clashes(self.rewrite(base, reachable))
        parent = self.rewrite(base, reachable - left_out)
        if clashes(parent):
            # The sites are those of a function that a method calls; which one does is not known here.
            left_out = reachable
            parent = self.rewrite(base, frozenset())
        return parent, left_out

    def _derive(
        self, cls: type[nn.Module], bases: tuple[type, ...], namespace: dict[str, Any], reachable: frozenset[str]
    ) -> type[nn.Module]:
        body = {**namespace, **_naming(cls, reachable)}
        if issubclass(cls, nn.Sequential | nn.ModuleList):
            body.update(_SEQUENCE)
        elif issubclass(cls, nn.ModuleDict):
            body.update(_MAPPING)
        made: type[nn.Module] = types.new_class(cls.__name__, bases, exec_body=lambda ns: ns.update(body))
        return made


def _own_children(container: nn.Module) -> dict[str, nn.Module]:
    """A container's own children: its sites are children too, and must not run as a layer."""
    return {
        name: module
        for name, module in container._modules.items()
        if module is not None and not isinstance(module, Site)
    }


def _iterate_modules(container: nn.Module) -> Iterator[nn.Module]:
    return iter(_own_children(container).values())


def _iterate_names(container: nn.Module) -> Iterator[str]:
    return iter(_own_children(container))


_SEQUENCE = {"__iter__": _iterate_modules, "__len__": lambda container: len(_own_children(container))}
_MAPPING = {
    "__iter__": _iterate_names,
    "__len__": _SEQUENCE["__len__"],
    "keys": lambda container: _own_children(container).keys(),
    "items": lambda container: _own_children(container).items(),
    "values": lambda container: _own_children(container).values(),
}


REWRITER = ClassRewriter()
"""One for the process: classes and synthetic modules are made once and shared by all proxies."""


def original_class(module: nn.Module) -> type[nn.Module]:
    """A module's class as its author wrote it."""
    original: type[nn.Module] = getattr(type(module), "_quantizer_original_class", type(module))
    return original


def _is_ours(cls: type) -> bool:
    return cls is not object and cls not in _LEFT_ALONE


def kept_methods(module: nn.Module) -> dict[str, types.MethodType]:
    """Methods of modules that a module keeps as attributes, by attribute."""
    kept = {name: value for name, value in vars(module).items() if isinstance(value, types.MethodType)}
    return {name: method for name, method in kept.items() if _is_own(method)}


def _is_own(method: types.MethodType) -> bool:
    owner = method.__self__
    if not isinstance(owner, nn.Module):
        return False
    return getattr(original_class(owner), method.__name__, None) is method.__func__


def as_sharer(module: nn.Module) -> None:
    """Make a module of a proxy end the sharing before ``.to()``, ``.half()`` and the like change its tensors."""
    cls = type(module)
    if cls not in _SHARERS:

        def apply(self: nn.Module, fn: Any, recurse: bool = True) -> Any:
            end_sharing(self)
            return super(made, self)._apply(fn, recurse)  # type: ignore[misc]

        reachable: frozenset[str] = getattr(cls, "_quantizer_reachable", frozenset())
        body = {**_naming(original_class(module), reachable), "_apply": apply, "_quantizer_is_sharer": True}
        made: type[nn.Module] = types.new_class(cls.__name__, (cls,), exec_body=lambda ns: ns.update(body))
        _SHARERS[cls] = made
    module.__class__ = _SHARERS[cls]


def with_stored_weight(cls: type[nn.Module], name: str, site: str, operand: str) -> type[nn.Module]:
    """A subclass whose parameter ``name`` is a property that reads the integers of an operand of the child ``site``."""
    key = (cls, name, site, operand)
    if key not in _STORED:

        def read(self: nn.Module) -> Tensor:
            weight: Tensor = getattr(self, site).quantizer_of(operand).dequantized()
            return weight

        read.__doc__ = "The stored weight, dequantized at each read."
        known: Any = cls
        body = {
            **_naming(known._quantizer_original_class, known._quantizer_reachable),
            name: property(read),
            "_quantizer_stored": (*getattr(known, "_quantizer_stored", ()), (name, site, operand)),
        }
        _STORED[key] = types.new_class(cls.__name__, (cls,), exec_body=lambda ns: ns.update(body))
    return _STORED[key]


def restore(
    original: type[nn.Module], reachable: frozenset[str], stored: tuple[tuple[str, str, str], ...], is_sharer: bool
) -> nn.Module:
    """An empty instance of the class that a pickled or copied proxy module had."""
    cls = REWRITER.rewrite(original, reachable).cls
    for entry in stored:
        cls = with_stored_weight(cls, *entry)
    module = cls.__new__(cls)
    if is_sharer:
        as_sharer(module)
    return module


_SHARERS: dict[type[nn.Module], type[nn.Module]] = {}
_STORED: dict[tuple[type[nn.Module], str, str, str], type[nn.Module]] = {}


def _naming(original: type[nn.Module], reachable: frozenset[str]) -> dict[str, Any]:
    """What makes a generated class call itself what its original does.

    Libraries look classes up by ``str(type(module))``, which is made of ``__module__`` and ``__qualname__``; with
    another name they would find nothing, silently.
    """
    return {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__reduce_ex__": _reduce_ex,
        "_quantizer_original_class": original,
        "_quantizer_reachable": reachable,
    }


def _reduce_ex(self: nn.Module, protocol: Any) -> Any:
    # A class made at run time cannot be found by its name; its original can, and is rewritten again on arrival.
    cls: Any = type(self)
    recipe = (
        cls._quantizer_original_class,
        cls._quantizer_reachable,
        getattr(cls, "_quantizer_stored", ()),
        getattr(cls, "_quantizer_is_sharer", False),
    )
    return restore, recipe, self.__getstate__()  # type: ignore[no-untyped-call]
