"""The caller of an operation of torch: the evidence for why a product is not a site.

The compiled code of a running function records which characters of its text are being executed, so the text of a call
can be read back, in rewritten files and in others.
"""

from __future__ import annotations

import ast
import linecache
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath

from quantizer.observe.completeness.called_object import Called, called
from quantizer.operations.catalogue import OPERATORS, Operation
from quantizer.proxy.generated_classes import REWRITER
from quantizer.proxy.place import Place
from quantizer.rewrite.live_names import LIVE

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
