"""The host argument, which passes the module with the sites to functions without a module argument.

``def attend(q, k)`` becomes ``def attend(q, k, *, _quantizer_host)``. In a rewritten caller, ``attend(q, k)`` becomes
``_quantizer_lend(attend, self)(q, k)``. The original function keeps its name and place: code that passes it on as a
value, or patches the name later, uses the original. Only calls in rewritten source pass the host.
"""

from __future__ import annotations

import ast
import functools
import io
import tokenize
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from quantizer.plan.reasons import ReasonCode
from quantizer.rewrite.closures import rebound
from quantizer.rewrite.names import FunctionNode
from quantizer.rewrite.source_sites import FunctionSource
from quantizer.rewrite.text_edits import Edit, LineIndex, first_line

# Names in rewritten source, which must not collide with names of users.
HOST = "_quantizer_host"
PASS_HOST = "_quantizer_lend"
VISIBLE = "_quantizer_visible"
TAKES_APART = "_quantizer_takes_apart"
PADDED = "_quantizer_padded"
WRITTEN_CLASS = "_quantizer_written_class"
RECURRENT = "_quantizer_recurrent"

WRITTEN = "_quantizer_original_class"
"""Attribute of a generated class with the class that its author wrote."""

RECURRENCE = "recurrence"
"""Name of the child of a recurrent module that runs its layers in Python."""

EAGER = "_quantizer_eager"
"""Attribute of a module whose fused paths run as separate matrix multiplications, so that their sites are called."""

RECORDED = "_quantizer_recorded"
"""Attribute of a module that sets whether it computes as with recorded gradients; absent: the gradient mode decides."""

HOSTS = "_quantizer_hosts"
"""Attribute of a generated class with the marks of the sites of its instances, a frozenset."""


@dataclass(frozen=True, slots=True, eq=False)
class Wrapped:
    """A rewritten function that needs a host, inside of wrappers that may not pass keywords on.

    Attributes:
        wrapper: the original outermost wrapper.
        inner: the original function in it.
        rewritten: the rewritten function, which takes the host as ``HOST``.
    """

    wrapper: types.FunctionType
    inner: types.FunctionType
    rewritten: types.FunctionType

    def to(self, host: Any) -> Callable[..., Any]:
        """Return the wrappers around the rewritten function with its host bound; they get no other arguments."""
        bound = vars(host).get(_BOUND)
        if bound is None or bound.host is None or bound.host() is not host:
            bound = vars(host)[_BOUND] = _BoundTo(weakref.ref(host))
        if self not in bound.functions:
            bound.functions[self] = self._rebound_to(bound.host)
        function: Callable[..., Any] = bound.functions[self]
        return function

    def _rebound_to(self, host: weakref.ref[Any]) -> Callable[..., Any]:
        rewritten = self.rewritten

        @functools.wraps(self.inner)
        def bound(*args: Any, **keywords: Any) -> Any:
            return rewritten(*args, **keywords, **{HOST: host()})

        wrapped: Callable[..., Any] = rebound(
            self.wrapper, lambda value: bound if value is self.inner else None, shared=True
        )
        return wrapped


_BOUND = "_quantizer_bound"
"""Attribute of a module with the wrapped functions that it has called."""


class _BoundTo:
    """Wrapped functions, bound to one module; copies and pickles of the module have none."""

    def __init__(self, host: weakref.ref[Any] | None = None) -> None:
        self.host = host
        self.functions: dict[Wrapped, Callable[..., Any]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> _BoundTo:
        return _BoundTo()

    def __reduce__(self) -> tuple[type[_BoundTo], tuple[()]]:
        return _BoundTo, ()


Receivers = dict[types.FunctionType, tuple[tuple[Callable[..., Any] | Wrapped, str | None, bool], ...]]
"""Variants by original function: the rewritten function, the mark of a site that its host must have (None: any host),
and whether it takes the host as ``HOST``, or as one of its own arguments."""


def pass_host(receivers: Receivers) -> Callable[[Any, Any], Any]:
    """Return the function that rewritten source calls as ``_quantizer_lend``."""

    def variant(function: types.FunctionType, host: Any) -> tuple[Callable[..., Any] | Wrapped, bool] | None:
        marks = getattr(type(host), HOSTS, ())
        for rewritten, mark, takes_host in receivers.get(function, ()):
            if mark is None or mark in marks:
                return rewritten, takes_host
        return None

    def pass_host(function: Any, host: Any) -> Any:
        """Return ``function`` with ``host`` bound to it if it needs one and the host has its sites."""
        # isinstance instead of getattr, with which Dynamo took another branch than Python.
        if isinstance(function, types.MethodType) and isinstance(function.__func__, types.FunctionType):
            match = variant(function.__func__, host)
            return _bound(match[0], host, function.__self__) if match and match[1] else function
        match = variant(function, host) if isinstance(function, types.FunctionType) else None
        if match is None:
            return function
        return _bound(match[0], host) if match[1] else match[0]

    return pass_host


def _bound(function: Callable[..., Any] | Wrapped, host: Any, *first: Any) -> Callable[..., Any]:
    """Return ``function`` with its host and first arguments bound; it keeps its name for torch.export."""
    if isinstance(function, Wrapped):
        return functools.partial(function.to(host), *first) if first else function.to(host)
    bound = functools.partial(function, *first, **{HOST: host})
    if not torch.compiler.is_dynamo_compiling():
        vars(bound)["__name__"] = function.__name__
    return bound


def guarded(rewritten: types.FunctionType, original: types.FunctionType, host: str, mark: str) -> types.FunctionType:
    """Return a helper that runs rewritten for modules with its sites, and unchanged for other modules.

    The name of an argument shows that it is a module, but not that the caller is that module: ``run(self.child, x)``.
    """

    @functools.wraps(rewritten)
    def run(*args: Any, **keywords: Any) -> Any:
        module = args[0] if args else keywords.get(host)
        return (rewritten if mark in getattr(type(module), HOSTS, ()) else original)(*args, **keywords)

    assert isinstance(run, types.FunctionType)
    return run


def viewer(hidden: tuple[type, ...]) -> Callable[[Any], Any]:
    """Return the function that rewritten source calls as ``_quantizer_visible``, which skips ``hidden`` children."""

    def is_hidden(item: Any) -> bool:
        return isinstance(item[1] if isinstance(item, tuple) and len(item) == 2 else item, hidden)

    def visible(children: Any) -> Any:
        """Return the result of ``children()``, ``named_modules()``, ``_modules`` and so on without ``hidden`` ones."""
        if isinstance(children, dict):
            if not any(isinstance(child, hidden) for child in children.values()):
                return children
            return {name: child for name, child in children.items() if not isinstance(child, hidden)}
        if isinstance(children, types.GeneratorType):
            return (item for item in children if not is_hidden(item))
        return children

    return visible


def as_written(cls: Any) -> Any:
    """Return the class that an author wrote for a generated class; ``_quantizer_written_class`` in rewritten source."""
    original = getattr(cls, WRITTEN, None)
    return cls if original is None else original


def takes_apart(host: Any) -> bool:
    """Return whether fused attention runs as separate operations; ``_quantizer_takes_apart`` in rewritten source."""
    return bool(getattr(host, EAGER, False))


def recurrent(host: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that runs the recurrence of ``host``; ``_quantizer_recurrent`` in rewritten source."""
    layers = host._modules.get(RECURRENCE)
    return functools.partial(layers, kernel) if layers is not None and takes_apart(host) else kernel


def hands_on(function: Any) -> bool:
    """Return whether a function only calls the functions that it gets as arguments."""
    if function is functools.partial:
        return True
    name = (getattr(function, "__module__", None), getattr(function, "__name__", None))
    # In a torch function mode, such as that of torch.export, torch's functions call themselves through the second.
    return name in {("torch.utils.checkpoint", "checkpoint"), ("torch.overrides", "handle_torch_function")}


def function_source(node: FunctionNode, qualname: str, owner: str | None, index: LineIndex) -> FunctionSource:
    """Return the facts about a function before the search of its body; ``owner`` is the class around it."""
    host, why = _host_and_reason(node, owner is not None)
    host_is_argument = host == HOST
    parameter = _host_parameter(node, index) if host_is_argument else None
    return FunctionSource(
        key=(qualname, first_line(node)),
        host=host,
        host_is_argument=host_is_argument,
        why_no_host=why,
        parameter=parameter,
        is_method=owner is not None and not host_is_argument,
    )


def _host_and_reason(node: FunctionNode, in_class: bool) -> tuple[str | None, str | None]:
    """Return the name of the module argument, ``HOST`` if callers must pass it, or the reason for a missing one."""
    host = _own_host(node, in_class)
    names = [inner for inner in ast.walk(node) if isinstance(inner, ast.Name)]
    if host is None:
        if any(name.id == "locals" for name in names):
            return None, ReasonCode.READS_LOCALS.text()
        return HOST, None
    if any(name.id == host and not isinstance(name.ctx, ast.Load) for name in names):
        return None, ReasonCode.ASSIGNS_MODULE.text(name=repr(host))
    return host, None


def _own_host(node: FunctionNode, in_class: bool) -> str | None:
    arguments = [*node.args.posonlyargs, *node.args.args]
    if not arguments:
        return None
    first = arguments[0]
    if in_class:
        decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
        return None if decorators & {"staticmethod", "classmethod"} else first.arg
    annotation = ast.unparse(first.annotation) if first.annotation is not None else ""
    is_module = first.arg in ("module", "self") or annotation.rpartition(".")[2].strip("\"'") == "Module"
    return first.arg if is_module else None


def _host_parameter(node: FunctionNode, index: LineIndex) -> Edit:
    """Return the edit that adds the keyword-only argument ``HOST`` to a ``def`` with any signature."""
    arguments = node.args
    if arguments.kwonlyargs:
        return Edit.opening(index.start(arguments.kwonlyargs[0]), f"{HOST}, ", 0)
    if arguments.vararg is not None:
        return Edit.closing(index.end(arguments.vararg), f", {HOST}", 0)
    base = index.start(node)
    last, last_end = "(", base
    for text, start, end in _signature(index.data[base : index.start(node.body[0])].decode()):
        # The syntax tree has no positions of the two stars and of the closing parenthesis.
        if text == "**" and arguments.kwarg is not None:
            last, last_end = text, base + start
        elif arguments.kwarg is not None and last == "**" and base + start == index.start(arguments.kwarg):
            return Edit.opening(last_end, f"*, {HOST}, ", 0)
        else:
            last, last_end = text, base + end
    return Edit.closing(last_end, {"(": f"*, {HOST}", ",": f" *, {HOST}"}.get(last, f", *, {HOST}"), 0)


def _signature(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield tokens from the opening parenthesis of a ``def`` to before the closing one, with byte offsets."""
    rows = text.split("\n")
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + len(row.encode()) + 1)

    def offset(place: tuple[int, int]) -> int:
        return starts[place[0] - 1] + len(rows[place[0] - 1][: place[1]].encode())

    depth = 0
    inside = False
    for token in tokenize.generate_tokens(io.StringIO(text, newline="\n").readline):
        if token.type in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE):
            continue
        if token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")
        # Type parameters, in square brackets, come before the parenthesis.
        inside = inside or (token.string == "(" and depth == 1)
        if inside and depth == 0:
            return
        if inside:
            yield token.string, offset(token.start), offset(token.end)
