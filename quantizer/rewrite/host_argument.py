"""Host argument: functions without a module argument get the module that holds their sites.

``def attend(q, k)`` becomes ``def attend(q, k, *, _quantizer_host)``, and in a rewritten caller ``attend(q, k)``
becomes ``_quantizer_lend(attend, self)(q, k)``. The original function keeps its name and its place: code that passes it
on as a value, or patches the name later, gets the original; only calls in rewritten text pass the host.
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

# Names in rewritten text that no user writes.
HOST = "_quantizer_host"
PASS_HOST = "_quantizer_lend"
VISIBLE = "_quantizer_visible"
TAKES_APART = "_quantizer_takes_apart"
PADDED = "_quantizer_padded"
WRITTEN_CLASS = "_quantizer_written_class"
RECURRENT = "_quantizer_recurrent"

WRITTEN = "_quantizer_original_class"
"""The attribute of a generated class that says which class its author wrote."""

RECURRENCE = "recurrence"
"""The name of the child of a recurrent module that runs its layers in Python."""

EAGER = "_quantizer_eager"
"""The attribute of a module whose fused paths run as separate products, so that their sites are met."""

RECORDED = "_quantizer_recorded"
"""The attribute of a module that says whether it computes as with gradients; absent: if they are recorded."""

HOSTS = "_quantizer_hosts"
"""The attribute of a generated class that says which sites its instances hold: a frozenset of marks."""


@dataclass(frozen=True, slots=True, eq=False)
class Wrapped:
    """A rewritten function that needs a host, inside of wrappers that may not hand a keyword on to it.

    Attributes:
        wrapper: the outermost wrapper, as it was written.
        inner: the function in it, as it was written.
        rewritten: the rewritten function, which takes the host as ``HOST``.
    """

    wrapper: types.FunctionType
    inner: types.FunctionType
    rewritten: types.FunctionType

    def to(self, host: Any) -> Callable[..., Any]:
        """Return the wrappers around the rewritten function with its host bound; they see no other arguments."""
        known = vars(host).get(_BOUND)
        if known is None or known.host is None or known.host() is not host:
            known = vars(host)[_BOUND] = _BoundTo(weakref.ref(host))
        if self not in known.functions:
            known.functions[self] = self._made(known.host)
        found: Callable[..., Any] = known.functions[self]
        return found

    def _made(self, host: weakref.ref[Any]) -> Callable[..., Any]:
        rewritten = self.rewritten

        @functools.wraps(self.inner)
        def bound(*args: Any, **keywords: Any) -> Any:
            return rewritten(*args, **keywords, **{HOST: host()})

        made: Callable[..., Any] = rebound(
            self.wrapper, lambda value: bound if value is self.inner else None, shared=True
        )
        return made


_BOUND = "_quantizer_bound"
"""The attribute of a module with the wrapped functions that it has called."""


class _BoundTo:
    """Wrapped functions that are bound to one module; none in copies and pickles of the module."""

    def __init__(self, host: weakref.ref[Any] | None = None) -> None:
        self.host = host
        self.functions: dict[Wrapped, Callable[..., Any]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> _BoundTo:
        return _BoundTo()

    def __reduce__(self) -> tuple[type[_BoundTo], tuple[()]]:
        return _BoundTo, ()


Receivers = dict[types.FunctionType, tuple[tuple[Callable[..., Any] | Wrapped, str | None, bool], ...]]
"""By original function, each variant of it: the rewritten function, the mark of a site that its host holds (None: any
host will do), and whether it takes the host as ``HOST`` (else as an argument of its own, as it always did)."""


def pass_host(receivers: Receivers) -> Callable[[Any, Any], Any]:
    """Return the function that rewritten text calls ``_quantizer_lend``."""

    def variant(function: types.FunctionType, host: Any) -> tuple[Callable[..., Any] | Wrapped, bool] | None:
        held = getattr(type(host), HOSTS, ())
        for rewritten, mark, takes_host in receivers.get(function, ()):
            if mark is None or mark in held:
                return rewritten, takes_host
        return None

    def pass_host(function: Any, host: Any) -> Any:
        """Return ``function`` with ``host`` bound to it if it needs one and the host has its sites."""
        # isinstance and not getattr: with getattr(function, "__func__") Dynamo took another branch than Python.
        if isinstance(function, types.MethodType) and isinstance(function.__func__, types.FunctionType):
            found = variant(function.__func__, host)
            return _bound(found[0], host, function.__self__) if found and found[1] else function
        found = variant(function, host) if isinstance(function, types.FunctionType) else None
        if found is None:
            return function
        return _bound(found[0], host) if found[1] else found[0]

    return pass_host


def _bound(function: Callable[..., Any] | Wrapped, host: Any, *first: Any) -> Callable[..., Any]:
    """Return ``function`` with its host and first arguments bound; it keeps its name, which torch.export reads."""
    if isinstance(function, Wrapped):
        return functools.partial(function.to(host), *first) if first else function.to(host)
    made = functools.partial(function, *first, **{HOST: host})
    if not torch.compiler.is_dynamo_compiling():
        vars(made)["__name__"] = function.__name__
    return made


def guarded(rewritten: types.FunctionType, original: types.FunctionType, host: str, mark: str) -> types.FunctionType:
    """Return a helper with a module argument that runs rewritten for modules with its sites, and as written for others.

    The name of an argument shows that it is a module, and not whose code calls: ``run(self.child, x)``.
    """

    @functools.wraps(rewritten)
    def run(*args: Any, **keywords: Any) -> Any:
        module = args[0] if args else keywords.get(host)
        return (rewritten if mark in getattr(type(module), HOSTS, ()) else original)(*args, **keywords)

    assert isinstance(run, types.FunctionType)
    return run


def viewer(hidden: tuple[type, ...]) -> Callable[[Any], Any]:
    """Return the function that rewritten text calls ``_quantizer_visible``: it leaves ``hidden`` children out."""

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
    """Return the class that an author wrote, of a generated one; ``_quantizer_written_class`` in rewritten text."""
    original = getattr(cls, WRITTEN, None)
    return cls if original is None else original


def takes_apart(host: Any) -> bool:
    """Return whether fused attention runs as separate products; ``_quantizer_takes_apart`` in rewritten text."""
    return bool(getattr(host, EAGER, False))


def recurrent(host: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs the recurrence of ``host``; ``_quantizer_recurrent`` in rewritten text."""
    layers = host._modules.get(RECURRENCE)
    return functools.partial(layers, kernel) if layers is not None and takes_apart(host) else kernel


def hands_on(function: Any) -> bool:
    """Return whether a function is known to only call the functions that it is given."""
    if function is functools.partial:
        return True
    name = (getattr(function, "__module__", None), getattr(function, "__name__", None))
    # Under a torch function mode, such as that of torch.export, functions of torch call themselves through the second.
    return name in {("torch.utils.checkpoint", "checkpoint"), ("torch.overrides", "handle_torch_function")}


def function_source(node: FunctionNode, qualname: str, owner: str | None, index: LineIndex) -> FunctionSource:
    """Return the facts about a function before its body is searched; ``owner`` is the class around it."""
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
    """Return the argument that holds the module, ``HOST`` if callers must pass it, or the reason why there is none."""
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
    """Return the edit that adds the keyword-only argument ``HOST`` to a ``def``, whatever its signature."""
    arguments = node.args
    if arguments.kwonlyargs:
        return Edit.opening(index.start(arguments.kwonlyargs[0]), f"{HOST}, ", 0)
    if arguments.vararg is not None:
        return Edit.closing(index.end(arguments.vararg), f", {HOST}", 0)
    base = index.start(node)
    last, last_end = "(", base
    for text, start, end in _signature(index.data[base : index.start(node.body[0])].decode()):
        # The tree does not give the place of the two stars, nor of the closing parenthesis.
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
