"""The generated classes of a proxy, and versions of torch's containers that do not count sites as items.

A site is a child module, so torch's containers would count it, remove it instead of the last layer, or renumber it. In
the method resolution order, these classes come after those of a model and before torch's, so that a method that a model
overrides stays overridden.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import inspect
import types
from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from quantizer.proxy.call_numbers import with_numbered_calls
from quantizer.proxy.classes import ClassRewriter
from quantizer.proxy.model_sharing import end_sharing, hand_back
from quantizer.proxy.site import SourceCall
from quantizer.rewrite.closures import held, rebound
from quantizer.rewrite.host_argument import WRITTEN, as_written


def _own(container: nn.Module) -> dict[str, nn.Module]:
    modules: dict[str, Any] = container._modules
    return {name: module for name, module in modules.items() if not isinstance(module, SourceCall)}


@contextmanager
def _alone(container: nn.Module) -> Iterator[None]:
    """Remove the sites inside the block, while a method of torch renumbers the children."""
    own = _own(container)
    sites = {name: module for name, module in container._modules.items() if name not in own}
    for name in sites:
        del container._modules[name]
    try:
        yield
    finally:
        container._modules.update(sites)


class _Sequence(nn.Module):
    """The methods that ``Sequential`` and ``ModuleList`` share."""

    def __len__(self) -> int:
        return len(_own(self))

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(_own(self).values())

    def __delitem__(self, index: Any) -> None:
        with _alone(self):
            super().__delitem__(index)  # type: ignore[misc]

    def insert(self, index: int, module: nn.Module) -> Any:
        with _alone(self):
            return super().insert(index, module)  # type: ignore[misc]


class _Sequential(_Sequence, nn.Sequential):
    """A ``Sequential`` without sites as items; a slice has the original class and is not quantized."""

    def __getitem__(self, index: Any) -> Any:
        own = _own(self)
        if isinstance(index, slice):
            return as_written(type(self))(OrderedDict(list(own.items())[index]))
        return self._get_item_by_idx(own.values(), index)

    def __setitem__(self, index: int, module: nn.Module) -> None:
        setattr(self, self._get_item_by_idx(_own(self).keys(), index), module)


class _ModuleList(_Sequence, nn.ModuleList):
    """A ``ModuleList`` without sites as items; a slice is of the original class."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return as_written(type(self))(list(_own(self).values())[index])
        return super().__getitem__(index)


class _ModuleDict(nn.ModuleDict):
    """A ``ModuleDict`` without sites as items."""

    def __len__(self) -> int:
        return len(_own(self))

    def __iter__(self) -> Iterator[str]:
        return iter(_own(self))

    def __contains__(self, key: str) -> bool:
        return key in _own(self)

    def keys(self) -> KeysView[str]:
        return _own(self).keys()

    def items(self) -> ItemsView[str, nn.Module]:
        return _own(self).items()

    def values(self) -> ValuesView[nn.Module]:
        return _own(self).values()

    def clear(self) -> None:
        with _alone(self):
            super().clear()


_VIEWS: tuple[type[nn.Module], ...] = (_Sequential, _ModuleList, _ModuleDict)


def container_views(bases: tuple[type, ...]) -> tuple[type, ...]:
    """Return the additional bases of a generated class that hide sites from its items."""
    return tuple(
        view
        for view in _VIEWS
        if any(issubclass(base, view.__bases__[-1]) for base in bases)
        and not any(issubclass(base, view) for base in bases)
    )


_CALLABLES = (types.FunctionType, types.MethodType, functools.partial)


def _derive(
    cls: type[nn.Module], bases: tuple[type, ...], namespace: dict[str, Any], reachable: frozenset[str]
) -> type[nn.Module]:
    return _generated((*bases, *container_views(bases)), {**namespace, **_naming(cls, reachable)})


def _unannounced() -> Any:
    """Return a temporary first base for a new class, which skips the model's ``__init_subclass__``.

    Each class needs its own: where Python does not allow its removal, classes with a common one could not inherit from
    each other (no consistent method resolution order).
    """

    class Unannounced:
        is_made = False

        def __init_subclass__(cls, **keywords: Any) -> None:
            # If it stays a base, classes that the user derives must still reach the model's method.
            if Unannounced.is_made:
                super().__init_subclass__(**keywords)

    return Unannounced


def _generated(bases: tuple[type, ...], body: dict[str, Any]) -> type[nn.Module]:
    """Return a class named after its first base, without calling ``__init_subclass__`` or metaclasses of the model.

    Models are registered there, and a registry would then return the generated class.
    """
    meta, first = type(bases[0]), _unannounced()
    maker: Any = abc.ABCMeta if issubclass(meta, abc.ABCMeta) else type
    new_class: type[nn.Module] = maker.__new__(meta, bases[0].__name__, (first, *bases), body)
    first.is_made = True
    # Classes with a mixin before the module have another object layout, so Python refuses to change their bases.
    with contextlib.suppress(TypeError):
        new_class.__bases__ = bases
    return new_class


REWRITER = ClassRewriter(_derive)
"""The rewriter of this process: all proxies share generated classes and modules."""


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return a module's class as its author wrote it."""
    original: type[nn.Module] = as_written(type(module))
    return original


def reachable_in(model: nn.Module) -> frozenset[str]:
    """Return the names of the functions that a forward pass of a model or proxy may run."""
    method_names = [method.__name__ for module in model.modules() for method in kept_methods(module)]
    if any(_has_no_forward(original_class(module)) for module in model.modules()):
        method_names.append("__call__")
    return REWRITER.reachable(model, original_class, method_names)


def kept_methods(module: nn.Module) -> Iterator[types.MethodType]:
    """Yield the methods of modules in a module's attributes and hooks, also those that functions there refer to."""
    for attribute in vars(module).values():
        for value in attribute.values() if isinstance(attribute, dict) else (attribute,):
            yield from (part for part in held(value) if _is_own(part))


def leads_to_forward(value: Any, module: nn.Module) -> bool:
    """Return whether a function in an attribute is, or wraps, the forward of the module's class."""
    return any(_is_own(part) and part.__self__ is module and part.__name__ == "forward" for part in held(value))


def rebind_kept(module: nn.Module, twin: Callable[[Any], Any]) -> None:
    """Make the functions in a module's attributes and hooks refer to ``twin(x)`` instead of x."""
    for attribute, stored in vars(module).items():
        if isinstance(stored, dict):
            stored.update({key: rebound(value, twin) for key, value in stored.items() if isinstance(value, _CALLABLES)})
        elif isinstance(stored, _CALLABLES):
            vars(module)[attribute] = rebound(stored, twin)


def rewritten_method(value: Any) -> types.MethodType | None:
    """Return the rewritten version of a module's own method; None for anything else."""
    if not _is_own(value):
        return None
    function = getattr(type(value.__self__), value.__name__)
    return None if function is value.__func__ else types.MethodType(function, value.__self__)


def _is_own(value: Any) -> bool:
    if not isinstance(value, types.MethodType) or not isinstance(value.__self__, nn.Module):
        return False
    owner, name = value.__self__, value.__name__
    return value.__func__ in (getattr(original_class(owner), name, None), getattr(type(owner), name, None))


def as_sharer(module: nn.Module) -> None:
    """Make a module of a proxy end the sharing before ``.to()``, ``.half()`` and the like change its tensors.

    A module that shares permanently passes the changed tensors on to the model's module instead.
    """
    cls = type(module)
    if cls not in _SHARERS:

        def apply(self: nn.Module, fn: Any, recurse: bool = True) -> Any:
            end_sharing(self)
            result = super(made, self)._apply(fn, recurse)  # type: ignore[misc]
            hand_back(self)
            return result

        reachable: frozenset[str] = getattr(cls, "_quantizer_reachable", frozenset())
        body = {**_naming(original_class(module), reachable), "_apply": apply, "_quantizer_is_sharer": True}
        made = _generated((cls,), body)
        _SHARERS[cls] = made
    module.__class__ = _SHARERS[cls]


def with_forward(cls: type[nn.Module], reachable: frozenset[str]) -> type[nn.Module]:
    """Return a subclass that uses ``__call__`` as ``forward`` if the class has no ``forward``; otherwise the class.

    Calls of the subclass then run hooks as calls of any module do.
    """
    if not _has_no_forward(cls):
        return cls
    key = (cls, reachable)
    if key not in _WITH_FORWARD:
        original: type[nn.Module] = getattr(cls, "_quantizer_original_class", cls)
        body = {**_naming(original, reachable), "forward": cls.__call__, "__call__": nn.Module.__call__}
        _WITH_FORWARD[key] = _generated((cls,), body)
    return _WITH_FORWARD[key]


def _has_no_forward(cls: type[nn.Module]) -> bool:
    # Static, because the class of scripted modules has a forward that only its instances can look up.
    unset = inspect.getattr_static(cls, "forward") is inspect.getattr_static(nn.Module, "forward")
    return unset and cls.__call__ is not nn.Module.__call__


def called_through(module: nn.Module, call: Callable[[nn.Module, functools.partial[Any]], Any]) -> Callable[[], None]:
    """Replace each call of a module by ``call(module, run)``; return a function that ends this.

    ``run()`` makes the original call; ``run.args[1:]`` and ``run.keywords`` are the inputs. Calls of a copied or
    pickled module are not replaced.
    """
    cls = type(module)

    def around(self: nn.Module, *args: Any, **keywords: Any) -> Any:
        return call(self, functools.partial(cls.__call__, self, *args, **keywords))

    reachable: frozenset[str] = getattr(cls, "_quantizer_reachable", frozenset())
    body = {**_naming(original_class(module), reachable), "__call__": around}
    wrapped_class = _generated((cls,), body)
    module.__class__ = wrapped_class

    def end() -> None:
        if type(module) is wrapped_class:
            module.__class__ = cls

    return end


def with_stored_weight(cls: type[nn.Module], name: str, site: str, operand: str) -> type[nn.Module]:
    """Return a subclass whose parameter ``name`` is a property that reads the integer weight of a site."""
    key = (cls, name, site, operand)
    if key not in _STORED:

        def read(self: nn.Module) -> Tensor:
            weight: Tensor = getattr(self, site).quantizer_of(operand).as_parameter()
            return weight

        read.__doc__ = "The stored weight, dequantized at each read."
        known: Any = cls
        body = {
            **_naming(known._quantizer_original_class, known._quantizer_reachable),
            name: property(read),
            "_quantizer_stored": (*getattr(known, "_quantizer_stored", ()), (name, site, operand)),
        }
        _STORED[key] = _generated((cls,), body)
    return _STORED[key]


def with_listed_weights(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass whose ``parameters()`` lists the stored weights below in place of the float ones.

    Models read type and device of their first parameter. The stored weights are dequantized at each read and cannot be
    trained. ``named_parameters()`` and the state dict list only registered parameters.
    """
    if cls not in _LISTED:

        def parameters(self: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
            """Yield all parameters, and the stored weights dequantized, which cannot be trained."""
            for _, parameter in self._named_members(_with_stored, recurse=recurse):
                yield parameter

        known: Any = cls
        reachable: frozenset[str] = getattr(known, "_quantizer_reachable", frozenset())
        body = {**_naming(as_written(cls), reachable), "parameters": parameters, "_quantizer_lists": True}
        _LISTED[cls] = _generated((cls,), body)
    return _LISTED[cls]


def _with_stored(module: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the stored weights of a module itself and then its parameters, as torch's modules list the weight first."""
    for name, *_ in getattr(type(module), "_quantizer_stored", ()):
        yield name, nn.Parameter(getattr(module, name), requires_grad=False)
    yield from module._parameters.items()


def number_calls(proxy: nn.Module) -> None:
    """Make each forward pass of a proxy number the calls of its sites, see ``call_numbers.py``."""
    cls = type(proxy)
    if getattr(cls, "_quantizer_numbers", False):
        return
    if cls not in _NUMBERED:
        reachable: frozenset[str] = getattr(cls, "_quantizer_reachable", frozenset())
        _NUMBERED[cls] = _generated((cls,), {**_naming(original_class(proxy), reachable), **with_numbered_calls(cls)})
    proxy.__class__ = _NUMBERED[cls]


def restore(
    original: type[nn.Module],
    reachable: frozenset[str],
    stored: tuple[tuple[str, str, str], ...],
    is_sharer: bool,
    lists: bool = False,
    numbers: bool = False,
) -> nn.Module:
    """Return an empty instance of the class that a pickled or copied proxy module had."""
    cls = with_forward(REWRITER.rewrite(original, reachable).cls, reachable)
    for entry in stored:
        cls = with_stored_weight(cls, *entry)
    if lists:
        cls = with_listed_weights(cls)
    module = cls.__new__(cls)
    if is_sharer:
        as_sharer(module)
    if numbers:
        number_calls(module)
    return module


_WITH_FORWARD: dict[tuple[type[nn.Module], frozenset[str]], type[nn.Module]] = {}
_SHARERS: dict[type[nn.Module], type[nn.Module]] = {}
_LISTED: dict[type[nn.Module], type[nn.Module]] = {}
_NUMBERED: dict[type[nn.Module], type[nn.Module]] = {}
_STORED: dict[tuple[type[nn.Module], str, str, str], type[nn.Module]] = {}


def _naming(original: type[nn.Module], reachable: frozenset[str]) -> dict[str, Any]:
    """Return the attributes that give a generated class the name, docstring and pickling of its original.

    Libraries look classes up by ``str(type(module))``, which contains ``__module__`` and ``__qualname__``; with other
    names they would find nothing.
    """
    return {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__reduce_ex__": _reduce_ex,
        WRITTEN: original,
        "_quantizer_reachable": reachable,
    }


def _reduce_ex(self: nn.Module, protocol: Any) -> Any:
    # A generated class cannot be looked up by its name. Its original can, and is rewritten again on loading.
    cls: Any = type(self)
    recipe = (
        cls._quantizer_original_class,
        cls._quantizer_reachable,
        getattr(cls, "_quantizer_stored", ()),
        getattr(cls, "_quantizer_is_sharer", False),
        getattr(cls, "_quantizer_lists", False),
        getattr(cls, "_quantizer_numbers", False),
    )
    return restore, recipe, self.__getstate__()  # type: ignore[no-untyped-call]
