"""Generated classes: a module's own class with its functions rewritten, and what such a class does besides."""

from __future__ import annotations

import abc
import contextlib
import functools
import types
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch import nn

from quantizer.proxy.class_rewriter import ClassRewriter
from quantizer.proxy.containers import container_views
from quantizer.proxy.model_sharing import end_sharing
from quantizer.proxy.model_sharing import hand_back
from quantizer.rewrite.closures import held
from quantizer.rewrite.closures import rebound
from quantizer.rewrite.host_argument import WRITTEN
from quantizer.rewrite.host_argument import as_written

__all__ = [
    "REWRITER",
    "as_sharer",
    "called_through",
    "kept_methods",
    "leads_to_forward",
    "original_class",
    "reachable_in",
    "rebind_kept",
    "restore",
    "with_forward",
    "rewritten_method",
    "with_listed_weights",
    "with_stored_weight",
]

_CALLABLES = (types.FunctionType, types.MethodType, functools.partial)


def _derive(
    cls: type[nn.Module], bases: tuple[type, ...], namespace: dict[str, Any], reachable: frozenset[str]
) -> type[nn.Module]:
    return _generated((*bases, *container_views(bases)), {**namespace, **_naming(cls, reachable)})


def _unannounced() -> Any:
    """Return a first base while a class is made: no ``__init_subclass__`` of the model's classes hears of that class.

    One for each class: as a base that stays, it must stand in the order of resolution once for each of them.
    """

    class Unannounced:
        is_made = False

        def __init_subclass__(cls, **keywords: Any) -> None:
            # Where it has to stay a base, a class that the user derives is announced.
            if Unannounced.is_made:
                super().__init_subclass__(**keywords)

    return Unannounced


def _generated(bases: tuple[type, ...], body: dict[str, Any]) -> type[nn.Module]:
    """Return a class named after its first base, unknown to ``__init_subclass__`` and metaclasses of the model.

    Registries of models are filled there, and would give generated classes to who asks for the model's.
    """
    meta, first = type(bases[0]), _unannounced()
    maker: Any = abc.ABCMeta if issubclass(meta, abc.ABCMeta) else type
    made: type[nn.Module] = maker.__new__(meta, bases[0].__name__, (first, *bases), body)
    first.is_made = True
    # Python lays out classes with a mixin before the module in another way, and does not let them change.
    with contextlib.suppress(TypeError):
        made.__bases__ = bases
    return made


REWRITER = ClassRewriter(_derive)
"""One for the process: classes and synthetic modules are made once and shared by all proxies."""


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return a module's class as its author wrote it."""
    original: type[nn.Module] = as_written(type(module))
    return original


def reachable_in(model: nn.Module) -> frozenset[str]:
    """Names of the functions that a forward pass of a model or proxy may run."""
    kept = [method.__name__ for module in model.modules() for method in kept_methods(module)]
    if any(_has_no_forward(original_class(module)) for module in model.modules()):
        kept.append("__call__")
    return REWRITER.reachable(model, original_class, kept)


def kept_methods(module: nn.Module) -> Iterator[types.MethodType]:
    """Methods of modules that a module keeps in an attribute or hook, also where a function there holds them."""
    for kept in vars(module).values():
        for value in kept.values() if isinstance(kept, dict) else (kept,):
            yield from (part for part in held(value) if _is_own(part))


def leads_to_forward(value: Any, module: nn.Module) -> bool:
    """Return whether a function kept on a module leads to the forward of its class: it stands around it."""
    return any(_is_own(part) and part.__self__ is module and part.__name__ == "forward" for part in held(value))


def rebind_kept(module: nn.Module, twin: Callable[[Any], Any]) -> None:
    """Let the functions that a module keeps in attributes and hooks hold ``twin(x)`` instead of x."""
    for attribute, kept in vars(module).items():
        if isinstance(kept, dict):
            kept.update({key: rebound(value, twin) for key, value in kept.items() if isinstance(value, _CALLABLES)})
        elif isinstance(kept, _CALLABLES):
            vars(module)[attribute] = rebound(kept, twin)


def rewritten_method(value: Any) -> types.MethodType | None:
    """Return the rewritten method for a module's own one; None for anything else."""
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

    One that shares for good hands back to the model what became of them.
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
    """Return a subclass whose ``forward`` is the ``__call__`` of a class without any; every other class as it is.

    It is called as torch calls modules, by way of their hooks, and everybody who goes by ``forward`` finds it.
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
    return cls.forward is nn.Module.forward and cls.__call__ is not nn.Module.__call__


def called_through(module: nn.Module, call: Callable[[nn.Module, Callable[[], Any]], Any]) -> Callable[[], None]:
    """Let ``call(module, run)`` stand around every call of a module, where ``run()`` is the call; what ends it.

    A copy of the module, or one that was pickled, is called as its author wrote it.
    """
    cls = type(module)

    def around(self: nn.Module, *args: Any, **keywords: Any) -> Any:
        return call(self, functools.partial(cls.__call__, self, *args, **keywords))

    reachable: frozenset[str] = getattr(cls, "_quantizer_reachable", frozenset())
    body = {**_naming(original_class(module), reachable), "__call__": around}
    made = _generated((cls,), body)
    module.__class__ = made

    def end() -> None:
        if type(module) is made:
            module.__class__ = cls

    return end


def with_stored_weight(cls: type[nn.Module], name: str, site: str, operand: str) -> type[nn.Module]:
    """Return a subclass whose parameter ``name`` is a property that reads the codes of an operand of ``site``."""
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
    """Yield a subclass whose ``parameters()`` lists the stored weights below too, where the float ones stood.

    Models ask their first parameter for its type and its device. What is listed is the weight as the model computes
    with it, made at each read, and not trained; ``named_parameters()`` and the state dict hold what is there.
    """
    if cls not in _LISTED:

        def parameters(self: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
            """Return all parameters; stored weights as they are computed with, which cannot be trained."""
            for _, parameter in self._named_members(_with_stored, recurse=recurse):
                yield parameter

        known: Any = cls
        reachable: frozenset[str] = getattr(known, "_quantizer_reachable", frozenset())
        body = {**_naming(as_written(cls), reachable), "parameters": parameters, "_quantizer_lists": True}
        _LISTED[cls] = _generated((cls,), body)
    return _LISTED[cls]


def _with_stored(module: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the parameters of a module itself; a weight that it handed over stands first, as in torch's modules."""
    for name, *_ in getattr(type(module), "_quantizer_stored", ()):
        yield name, nn.Parameter(getattr(module, name), requires_grad=False)
    yield from module._parameters.items()


def restore(
    original: type[nn.Module],
    reachable: frozenset[str],
    stored: tuple[tuple[str, str, str], ...],
    is_sharer: bool,
    lists: bool = False,
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
    return module


_WITH_FORWARD: dict[tuple[type[nn.Module], frozenset[str]], type[nn.Module]] = {}
_SHARERS: dict[type[nn.Module], type[nn.Module]] = {}
_LISTED: dict[type[nn.Module], type[nn.Module]] = {}
_STORED: dict[tuple[type[nn.Module], str, str, str], type[nn.Module]] = {}


def _naming(original: type[nn.Module], reachable: frozenset[str]) -> dict[str, Any]:
    """Return what makes a generated class call itself what its original does.

    Libraries look classes up by ``str(type(module))``, which is made of ``__module__`` and ``__qualname__``; with
    another name they would find nothing, silently.
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
    # A class made at run time cannot be found by its name; its original can, and is rewritten again on arrival.
    cls: Any = type(self)
    recipe = (
        cls._quantizer_original_class,
        cls._quantizer_reachable,
        getattr(cls, "_quantizer_stored", ()),
        getattr(cls, "_quantizer_is_sharer", False),
        getattr(cls, "_quantizer_lists", False),
    )
    return restore, recipe, self.__getstate__()  # type: ignore[no-untyped-call]
