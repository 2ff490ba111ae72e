"""Temporary patches of constructors of imported modules, which report each new model.

While a ``patched`` block is open, the constructors of module classes in the named files report every outermost model
that they build, to the thread that opened the block. Existing models and models of other threads are not affected. The
patch is on the class, so it also applies to classes imported by name. Leaving the block restores every class attribute,
also after an exception and with nested blocks.

The whole process shares torch's classes, so only a block with ``everything`` patches them, while it is open. Such a
block also reports layers that are built alone, and classes that are defined meanwhile.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from quantizer.errors import SourceError

Source = str | types.ModuleType | type[nn.Module]
"""A module by its name, as an object, or found from one of its classes."""

_PRIVATE = ("torch", "quantizer")
_LAYERS = "torch.nn.modules."


class _Building(threading.local):
    """State of the models that one thread is building."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[Any], None]] = []
        self.depth = 0


_BUILDING = _Building()
_LOCK = threading.RLock()
_PATCHED: dict[type, tuple[int, Any]] = {}
"""By class: the number of open blocks that patch it, and its own former ``__init__`` (None without one)."""
_OPEN_CLASS_LISTS: list[list[type]] = []
"""The classes that each open block with ``everything`` has patched."""


class patched:
    """Context manager that reports the models built inside it.

    Args:
        sources: modules whose classes are patched; none: all imported modules.
        built: called with each model.
        everything: patch also torch's layers and new classes; only without ``sources``.
    """

    def __init__(self, *sources: Source, built: Callable[[Any], None], everything: bool = False) -> None:
        self._modules = [module for source in sources for module in _modules_of(source)]
        self._discover = not sources
        self._everything = everything and not sources
        self._built = built
        self._entered: list[list[type]] = []

    def __enter__(self) -> patched:
        if self._everything:
            classes = [cls for cls in _subclasses(nn.Module) if _is_wanted(cls)]
        else:
            modules = list(_imported()) if self._discover else self._modules
            classes = list(dict.fromkeys(cls for module in modules for cls in _classes_of(module)))
        with _LOCK:
            for cls in classes:
                _patch(cls)
            if self._everything:
                _watch_new_classes(classes)
        self._entered.append(classes)
        _BUILDING.listeners.append(self._built)
        return self

    def __exit__(self, *exception: object) -> None:
        _BUILDING.listeners.remove(self._built)
        with _LOCK:
            classes = self._entered.pop()
            if self._everything:
                _stop_watching(classes)
            for cls in classes:
                _restore(cls)


def _patch(cls: Any) -> None:
    count, own = _PATCHED.get(cls, (0, cls.__dict__.get("__init__")))
    _PATCHED[cls] = (count + 1, own)
    if count:
        return

    @functools.wraps(cls.__init__)
    def __init__(self: Any, *args: Any, **keywords: Any) -> None:
        # An inherited constructor is looked up at each call: a base class may have been patched or restored since.
        construct = functools.partial(own, self) if own is not None else super(cls, self).__init__
        if not _BUILDING.listeners:
            construct(*args, **keywords)
            return
        _BUILDING.depth += 1
        try:
            construct(*args, **keywords)
        finally:
            _BUILDING.depth -= 1
        if _BUILDING.depth == 0:
            _BUILDING.listeners[-1](self)

    cls.__init__ = __init__


def _restore(cls: Any) -> None:
    count, own = _PATCHED.pop(cls)
    if count > 1:
        _PATCHED[cls] = (count - 1, own)
    elif own is None:
        del cls.__init__
    else:
        cls.__init__ = own


def _watch_new_classes(classes: list[type]) -> None:
    """Patch module classes when they are defined, and add each to ``classes``."""
    if not _OPEN_CLASS_LISTS:
        base: Any = nn.Module
        base.__init_subclass__ = classmethod(_defined)
    _OPEN_CLASS_LISTS.append(classes)


def _stop_watching(classes: list[type]) -> None:
    _OPEN_CLASS_LISTS[:] = [watched for watched in _OPEN_CLASS_LISTS if watched is not classes]
    if not _OPEN_CLASS_LISTS:
        del nn.Module.__init_subclass__


def _defined(cls: Any, /, **keywords: Any) -> None:
    """Replace ``nn.Module.__init_subclass__``, which torch does not define."""
    super(nn.Module, cls).__init_subclass__(**keywords)
    with _LOCK:
        for classes in _OPEN_CLASS_LISTS if _is_wanted(cls) else ():
            _patch(cls)
            classes.append(cls)


def _subclasses(cls: type) -> list[type]:
    subclasses: dict[type, None] = {}
    waiting = [cls]
    while waiting:
        children: list[type] = type.__subclasses__(waiting.pop())
        derived = [child for child in children if child not in subclasses]
        subclasses.update(dict.fromkeys(derived))
        waiting += derived
    return list(subclasses)


def _is_wanted(cls: type) -> bool:
    """Return whether a class is a layer of torch, or neither torch's nor generated by this package."""
    if any(name.startswith("_quantizer") for name in vars(cls)):
        return False
    return cls.__module__.startswith(_LAYERS) or cls.__module__.partition(".")[0] not in _PRIVATE


def _modules_of(source: Source) -> list[types.ModuleType]:
    if isinstance(source, str):
        try:
            module = importlib.import_module(source)
        except ImportError as error:
            raise SourceError(f"{source!r} cannot be imported, so its classes cannot be patched: {error}") from error
        return [_allowed(module)]
    if isinstance(source, types.ModuleType):
        return [_allowed(source)]
    if isinstance(source, type) and issubclass(source, nn.Module):
        owners = [sys.modules[base.__module__] for base in source.__mro__ if issubclass(base, nn.Module)]
        public_modules = [module for module in owners if not _is_private(module)]
        return public_modules or [_allowed(owners[0])]
    raise SourceError(f"expected a module, its name, or a class derived from torch.nn.Module; got {source!r}")


def _allowed(module: types.ModuleType) -> types.ModuleType:
    if _is_private(module):
        raise SourceError(
            f"{module.__name__} is shared by the whole process and is never patched; "
            "name the module whose models use it"
        )
    return module


def _is_private(module: types.ModuleType) -> bool:
    return module.__name__.partition(".")[0] in _PRIVATE


def _imported() -> Iterator[types.ModuleType]:
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType) and not _is_private(module):
            yield module


def _classes_of(module: types.ModuleType) -> Iterator[type]:
    for value in list(vars(module).values()):
        if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == module.__name__:
            yield value
