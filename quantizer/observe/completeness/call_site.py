"""The caller of an operation of torch: the evidence for why a product is not a site.

The compiled code of a running function records which characters of its text are being executed, so the text of a call
can be read back, in rewritten files and in others.

The object that a running call calls, and how the text of the call refers to it.

The lookup runs no code of the model: attributes are read from where objects store them, never through properties.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import linecache
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from torch import Tensor, nn

from quantizer.operations.catalogue import METHODS, OPERATORS, Operation, operation_of
from quantizer.proxy.generated_classes import REWRITER
from quantizer.proxy.site import Place
from quantizer.rewrite.names import LIVE

# Between a function's text and the dispatch mode, these only pass a call on.
_HANDS_ON = (
    "torch._dynamo",
    "torch._ops",
    "torch._compile",
    "torch.functional",
    "torch.utils",
    "torch.overrides",
    "quantizer.proxy",
    "quantizer.observe",
    "quantizer.float16",
)
_RUNS_A_MODULE = ("_call_impl", "torch.nn.modules.module")


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """A running function, and the call that it is making.

    Attributes:
        file: the path of its original file.
        line: the line of the call.
        function: the function's name.
        called: the text of the called function or operator: ``torch.ops.aten.mm``, ``@``; empty if there is no text.
        operation: the catalogue's entry for the call, if there is one.
        known: whether the called object could be determined.
        instead: the form of the call in the text if it is not the operation's own name, so that the finder cannot
            recognize it; None: it is the name.
        readable: whether the function's text exists and is that of the running code.
        rewritten: whether the function was rewritten.
    """

    file: str
    line: int
    function: str
    called: str
    operation: Operation | None
    known: bool
    instead: str | None
    readable: bool
    rewritten: bool

    def __str__(self) -> str:
        call = f": {self.called}" if self.called else ""
        return f"{PurePath(self.file).name}:{self.line}, {self.function}{call}"


def innermost_frame(frame: types.FrameType | None) -> types.FrameType | None:
    """Return the first frame, outwards, that is no wrapper: wrappers have the same text for all calls."""
    while frame is not None and _module(frame).startswith(_HANDS_ON):
        frame = frame.f_back
    return frame


def callers(frame: types.FrameType | None) -> Iterator[Caller]:
    """Yield the running functions, innermost first, up to the ``forward`` of the module that is running."""
    files = {file.rewritten_name: file for file in REWRITER.files()}
    originals = {file.path: file for file in files.values()}
    while (frame := innermost_frame(frame)) is not None:
        code = frame.f_code
        if _module(frame) == _RUNS_A_MODULE[1] and isinstance(frame.f_locals.get("self"), Place):
            # It stands for a call in the text of the module around it.
            frame = frame.f_back
            continue
        if (code.co_name, _module(frame)) == _RUNS_A_MODULE:
            return
        rewritten = code.co_filename in files
        known = originals.get(code.co_filename)
        text, what = _called(frame)
        yield Caller(
            file=files[code.co_filename].path if rewritten else code.co_filename,
            line=frame.f_lineno,
            function=code.co_name,
            called=text,
            operation=what.operation,
            known=what.known,
            instead=what.instead,
            readable=bool(linecache.getlines(code.co_filename, frame.f_globals))
            and (known is None or known.holds_code(code)),
            rewritten=rewritten,
        )
        frame = frame.f_back


def _module(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _called(frame: types.FrameType) -> tuple[str, Called]:
    """Return the text of the call that a function is making, and the called object."""
    node = _running(frame)
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).replace(f"{LIVE}.", ""), called(node.func, frame)
    if isinstance(node, ast.BinOp | ast.AugAssign):
        name = type(node.op).__name__
        return {"MatMult": "@", "Add": "+"}.get(name, name), Called(operation=OPERATORS.get(name))
    return "", Called(operation=None)


def _running(frame: types.FrameType) -> ast.AST | None:
    """Return the expression or statement that a function is executing; None if its text is missing or unusable."""
    positions = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    first, last, start, end = positions
    if first is None or last is None or start is None or end is None:
        return None
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)[first - 1 : last]
    if len(lines) != last - first + 1:
        return None
    raw = [line.encode() for line in lines]
    raw[-1] = raw[-1][:end]
    raw[0] = raw[0][start:]
    text = b"".join(raw).decode(errors="replace")
    for attempt in (f"({text}\n)", text):
        try:
            found = ast.parse(attempt).body[0]
        except SyntaxError:
            continue
        return found.value if isinstance(found, ast.Expr) else found
    return None


_UNKNOWN = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class Called:
    """The object behind a call.

    Attributes:
        operation: the catalogue's entry for the object, if there is one.
        known: whether the object could be determined.
        instead: the form of the call in the text if it is not the operation's own name, so that the finder cannot
            recognize it; None: it is the name.
    """

    operation: Operation | None
    known: bool = True
    instead: str | None = None


def called(node: ast.expr, frame: types.FrameType) -> Called:
    """Return the object that the function expression of a call means in a running frame."""
    if isinstance(node, ast.Attribute) and node.attr in METHODS:
        base = _resolve(node.value, frame)
        # Take a base without a name, such as the result of a call, for a tensor.
        if base is _UNKNOWN or isinstance(base, Tensor):
            return Called(operation=METHODS[node.attr])
    value, plain = _resolve(node, frame), isinstance(node, ast.Name | ast.Attribute)
    partial = False
    while isinstance(value, functools.partial):
        value, partial = value.func, True
    entry = operation_of(value)
    if entry is None:
        return Called(operation=None, known=_is_known(value))
    if partial:
        return Called(operation=entry, instead="a functools.partial of")
    if isinstance(node, ast.Name) and node.id in frame.f_locals:
        return Called(operation=entry, instead="a local name for")
    if plain and _is_spelled_out(node, frame):
        return Called(operation=entry)
    return Called(operation=entry, instead="an attribute that holds" if plain else "an expression that gives")


def _is_known(value: Any) -> bool:
    """Return whether a value certainly is no operation of the catalogue: Python's builtins may call one."""
    return value is not _UNKNOWN and getattr(value, "__module__", None) != "builtins"


def _is_spelled_out(node: ast.expr, frame: types.FrameType) -> bool:
    """Return whether a dotted name consists of modules and tensor classes only, as the finder can follow it."""
    while isinstance(node, ast.Attribute):
        node = node.value
        base = _resolve(node, frame)
        if not isinstance(base, types.ModuleType) and not (isinstance(base, type) and issubclass(base, Tensor)):
            return False
    return True


def _resolve(node: ast.expr, frame: types.FrameType) -> Any:
    """Return the object that an expression means in a frame; ``_UNKNOWN`` if the expression is not simple."""
    if isinstance(node, ast.Name):
        for names in (frame.f_locals, frame.f_globals, vars(builtins)):
            if node.id in names:
                return names[node.id]
        return _UNKNOWN
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Attribute):
        return _attribute(_resolve(node.value, frame), node.attr)
    if isinstance(node, ast.Subscript):
        return _item(_resolve(node.value, frame), _resolve(node.slice, frame))
    if isinstance(node, ast.Call) and node.args:
        function = _resolve(node.func, frame)
        if function is functools.partial:
            inner = _resolve(node.args[0], frame)
            return functools.partial(inner) if callable(inner) else _UNKNOWN
        if function is getattr and len(node.args) > 1:
            name = _resolve(node.args[1], frame)
            return _attribute(_resolve(node.args[0], frame), name) if isinstance(name, str) else _UNKNOWN
    return _UNKNOWN


def _attribute(base: Any, name: str) -> Any:
    if base is _UNKNOWN:
        return _UNKNOWN
    if isinstance(base, types.ModuleType):
        # Read the module's dictionary, since getattr on a lazy module would import half a library.
        return base.__dict__.get(name, _UNKNOWN)
    if isinstance(base, nn.Module) and name in base._modules:
        return base._modules[name]
    found = inspect.getattr_static(base, name, _UNKNOWN)
    return found.__func__ if isinstance(found, staticmethod) else found


def _item(base: Any, key: Any) -> Any:
    if type(base) is dict and isinstance(key, str | int):
        return base.get(key, _UNKNOWN)
    if type(base) in (list, tuple) and isinstance(key, int) and -len(base) <= key < len(base):
        return base[key]
    return _UNKNOWN
