"""Building functions from rewritten text: transplanted code, synthetic globals, cloned decorators.

Nothing is executed again: no import, no class body, no decorator. A rewritten function is the compiled code of the
rewritten text put into a new function object that keeps the original's defaults and closure (so ``super()`` works).
Its globals are the dictionary of a *synthetic module*: a copy of the original module's, in which rewritten functions
stand in the place of theirs. The synthetic module is in ``sys.modules`` under its own ``__name__``, because
``torch.compile`` and ``torch.export`` look globals up by that name. The original module is never changed.
"""

from __future__ import annotations
import __future__

import sys
import types
from dataclasses import dataclass
from dataclasses import field
from typing import Any
from typing import TypeGuard

from quantizer.errors import SourceError
from quantizer.source.find import SiteSource
from quantizer.source.text import Key
from quantizer.source.text import SourceFile

__all__ = ["Rebuilt", "Rebuilder"]


@dataclass(kw_only=True, slots=True)
class Rebuilt:
    """What became of one function.

    ``function`` replaces the original (None: it stays); ``sites`` lists every site reached from it, those of helpers
    included; ``keys`` says which functions of which file take part; ``problem`` why it could not be rewritten.
    """

    function: Any = None
    sites: list[SiteSource] = field(default_factory=list)
    keys: set[tuple[str, Key]] = field(default_factory=set)
    problem: str | None = None


class Rebuilder:
    """Rewrites functions, each once, and remembers the results.

    Attributes:
        files: source files by (path, id of the globals their functions run in, compiler flags).
        synthetic: synthetic modules by id of the original globals, with those globals (which keeps the id valid).
        helpers: by id of the original globals and by name, the functions replaced there: (original, rewritten).
        done: results by id of the innermost function, with that function.
    """

    def __init__(self) -> None:
        self.files: dict[tuple[str, int, int], SourceFile] = {}
        self.synthetic: dict[int, tuple[types.ModuleType, dict[str, Any]]] = {}
        self.helpers: dict[int, dict[str, tuple[Any, Any]]] = {}
        self.done: dict[int, tuple[types.FunctionType, Rebuilt]] = {}

    def file(self, function: types.FunctionType) -> SourceFile:
        """The source file of a function, parsed once.

        Raises:
            SourceError: the text cannot be read or parsed.
        """
        # A notebook compiles a cell with the __future__ imports of earlier ones.
        flags = function.__code__.co_flags & __future__.annotations.compiler_flag
        key = (function.__code__.co_filename, id(function.__globals__), flags)
        if key not in self.files or not self.files[key].holds(function):
            # Read again: a module may have been reloaded.
            self.files[key] = SourceFile(key[0], function.__globals__, flags)
        return self.files[key]

    def names_read(self, attribute: Any) -> set[str]:
        """Attribute names that a function mentions, those of the helpers it reaches included."""
        plain = attribute.fget if isinstance(attribute, property) else attribute
        if isinstance(plain, staticmethod | classmethod):
            plain = plain.__func__
        if not isinstance(plain, types.FunctionType):
            return set()
        return self._names_read(_innermost(plain), set())

    def _names_read(self, function: types.FunctionType, seen: set[int]) -> set[str]:
        if id(function) in seen:
            return set()
        seen.add(id(function))
        try:
            source = self.file(function).find(function)
        except SourceError:
            # Without text, ask the compiled code.
            return set(function.__code__.co_names)
        names = set(source.attributes_read)
        for name in source.globals_read:
            helper = function.__globals__.get(name)
            if _may_be_rewritten(helper):
                names |= self._names_read(_innermost(helper), seen)
        return names

    def rebuild(self, attribute: Any) -> Rebuilt:
        """Rewrite a function as it stands in a class or module: plain, a property, or under decorators."""
        if isinstance(attribute, property):
            inner = self.rebuild(attribute.fget)
            function = property(inner.function, attribute.fset, attribute.fdel) if inner.function else None
            return Rebuilt(function=function, sites=inner.sites, keys=inner.keys, problem=inner.problem)
        if isinstance(attribute, staticmethod | classmethod):
            inner = self.rebuild(attribute.__func__)
            wrapped = type(attribute)(inner.function) if inner.function else None
            return Rebuilt(function=wrapped, sites=inner.sites, keys=inner.keys, problem=inner.problem)
        if not isinstance(attribute, types.FunctionType):
            return Rebuilt()
        innermost = _innermost(attribute)
        result = self._rebuild_plain(innermost)
        if result.function is None or innermost is attribute:
            return result
        clone = _clone_chain(attribute, innermost, result.function)
        if clone is None:
            return Rebuilt(
                problem=f"the decorators of {innermost.__qualname__} hold it in a way that cannot be cloned",
            )
        return Rebuilt(function=clone, sites=result.sites, keys=result.keys)

    def _rebuild_plain(self, function: types.FunctionType) -> Rebuilt:
        known = self.done.get(id(function))
        if known is not None:
            return known[1]
        result = Rebuilt()
        # Registered before the work is done: two functions that call each other must not recurse for ever.
        self.done[id(function)] = (function, result)
        try:
            self._rewrite(function, result)
        except SourceError as error:
            result.problem = str(error)
            result.sites.clear()
        return result

    def _rewrite(self, function: types.FunctionType, result: Rebuilt) -> None:
        file = self.file(function)
        source = file.find(function)
        result.sites = list(source.sites)
        helpers: dict[str, Any] = {}
        for name in sorted(source.globals_read):
            helper = self._helper(function, name)
            if helper is not None:
                result.sites += [site for site in helper.sites if site not in result.sites]
                result.keys |= helper.keys
                if helper.function is not None:
                    helpers[name] = helper.function
        if not helpers and not any(site.edits for site in source.sites):
            return
        code = file.code(source.key)
        if code.co_freevars != function.__code__.co_freevars:
            raise SourceError(f"{file.path}: {source.key[0]} has other closure variables once it is rewritten")
        result.keys.add((file.rewritten_name, source.key))
        result.function = _transplant(function, code, self._globals(function, helpers))

    def _helper(self, function: types.FunctionType, name: str) -> Rebuilt | None:
        """A function that ``function`` reaches through a global name, when it has sites of its own."""
        value = function.__globals__.get(name)
        if not _may_be_rewritten(value):
            return None
        rebuilt = self.rebuild(value)
        return rebuilt if rebuilt.sites else None

    def _globals(self, function: types.FunctionType, helpers: dict[str, Any]) -> dict[str, Any]:
        """The synthetic module's dictionary, brought up to date with the original's."""
        original = function.__globals__
        if id(original) not in self.synthetic:
            name = f"quantizer.rewritten.{original.get('__name__', 'unnamed')}"
            while name in sys.modules:
                name += "_"
            module = types.ModuleType(name)
            module.__dict__.update({**original, "__name__": name})
            sys.modules[name] = module
            self.synthetic[id(original)] = (module, original)
            self.helpers[id(original)] = {}
        module = self.synthetic[id(original)][0]
        self.helpers[id(original)].update({key: (original[key], helper) for key, helper in helpers.items()})
        self._refresh(id(original))
        return module.__dict__

    def refresh(self) -> None:
        """Bring all synthetic modules up to date: globals may have been set since they were made."""
        for key in self.synthetic:
            self._refresh(key)

    def _refresh(self, key: int) -> None:
        module, original = self.synthetic[key]
        # A helper that was replaced since then is taken as it is: its sites are not known.
        helpers = {name: new for name, (old, new) in self.helpers[key].items() if original.get(name) is old}
        module.__dict__.update({**original, "__name__": module.__name__, **helpers})


def _may_be_rewritten(helper: Any) -> TypeGuard[types.FunctionType]:
    """Whether a global is a function to look into. Torch's own functions take no module, so they hold no site."""
    return isinstance(helper, types.FunctionType) and helper.__module__.partition(".")[0] != "torch"


def _innermost(function: types.FunctionType) -> types.FunctionType:
    """The function that decorators wrap, found through ``__wrapped__``."""
    seen: set[int] = set()
    while id(function) not in seen:
        seen.add(id(function))
        wrapped = getattr(function, "__wrapped__", None)
        if not isinstance(wrapped, types.FunctionType):
            return function
        function = wrapped
    return function


def _transplant(original: types.FunctionType, code: types.CodeType, namespace: dict[str, Any]) -> types.FunctionType:
    function = types.FunctionType(code, namespace, original.__name__, original.__defaults__, original.__closure__)
    _copy_attributes(original, function)
    return function


def _copy_attributes(original: types.FunctionType, function: types.FunctionType) -> None:
    function.__kwdefaults__ = dict(original.__kwdefaults__) if original.__kwdefaults__ else None
    function.__annotations__ = dict(original.__annotations__)
    function.__doc__ = original.__doc__
    function.__qualname__ = original.__qualname__
    function.__module__ = original.__module__
    function.__dict__.update(original.__dict__)


def _clone_chain(
    wrapper: types.FunctionType, innermost: types.FunctionType, replacement: types.FunctionType
) -> types.FunctionType | None:
    """The same wrappers around ``replacement``; None where no closure cell leads to the function."""
    clones = {id(innermost): replacement}
    reached = False

    def clone(function: types.FunctionType) -> types.FunctionType:
        nonlocal reached
        if function is innermost:
            reached = True
        if id(function) in clones:
            return clones[id(function)]
        # Cells are filled after the clone is known: a wrapper may hold itself.
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        copied = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
        )
        clones[id(function)] = copied
        _copy_attributes(function, copied)
        for old, new in zip(function.__closure__ or (), cells, strict=True):
            value = _contents(old)
            if value is not _EMPTY:
                new.cell_contents = clone(value) if _leads_to(value, innermost) else value
        wrapped = getattr(function, "__wrapped__", None)
        if _leads_to(wrapped, innermost):
            copied.__wrapped__ = clone(wrapped)  # type: ignore[attr-defined]
        return copied

    result = clone(wrapper)
    held = any(_leads_to(_contents(cell), innermost) for cell in wrapper.__closure__ or ())
    return result if reached and held else None


def _leads_to(value: Any, innermost: types.FunctionType) -> TypeGuard[types.FunctionType]:
    return isinstance(value, types.FunctionType) and _innermost(value) is innermost


_EMPTY = object()


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell: the name was never bound
        return _EMPTY
