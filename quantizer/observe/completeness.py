"""Count every matrix multiplication and convolution of a pass, and explain those outside of sites.

A dispatch mode counts the operations that torch executes, with their multiply-adds, independently of the rewriter.
Operations outside of sites get one reason of a closed list. Operations that a library computes in its own kernels
(Triton, for example) are not counted.

The compiled code of a running function records which characters of its source are executing, so the text of a call can
be read back. The lookup of the called object runs no code of the model: attributes are read from where objects store
them, never through properties. A follower is notified of every module that runs in its own thread.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import itertools
import linecache
import sys
import threading
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from quantizer.proxy.build import UnrewrittenSource
from quantizer.proxy.generated_classes import REWRITER
from quantizer.proxy.site import Place, Site, SourceCall
from quantizer.rewrite.names import LIVE
from quantizer.rewrite.operations import METHODS, OPERATORS, Operation, operation_of
from quantizer.rewrite.torch_products import FUSED_KERNELS, PRODUCTS, RECURRENT_KERNELS
from quantizer.utils.plain_values import decoded

# Modules between a function's source and the dispatch mode that only forward a call.
_HANDS_ON = (
    "torch._dynamo",
    "torch._ops",
    "torch._compile",
    "torch.functional",
    "torch.utils",
    "torch.overrides",
    "quantizer.proxy",
    "quantizer.observe",
)
_RUNS_A_MODULE = ("_call_impl", "torch.nn.modules.module")


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """A running function with its current call.

    Attributes:
        file: the path of its original file.
        line: the line of the call.
        function: the function's name.
        called: the text of the called function or operator: ``torch.ops.aten.mm``, ``@``; empty if there is no text.
        operation: the catalogue's entry for the call, if there is one.
        known: whether the called object could be determined.
        instead: the form of the call in the source if it does not use the operation's own name (None: it does), so that
            the finder cannot recognize it.
        readable: whether the function's source exists and matches the running code.
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
    """Return the first frame, outwards, without wrappers; all calls of a wrapper have the same text."""
    while frame is not None and _module(frame).startswith(_HANDS_ON):
        frame = frame.f_back
    return frame


def callers(frame: types.FrameType | None) -> Iterator[Caller]:
    """Yield the running functions, innermost first, up to the ``forward`` of the running module."""
    files = {file.rewritten_name: file for file in REWRITER.files()}
    originals = {file.path: file for file in files.values()}
    while (frame := innermost_frame(frame)) is not None:
        code = frame.f_code
        if _module(frame) == _RUNS_A_MODULE[1] and isinstance(frame.f_locals.get("self"), Place):
            # It represents a call in the source of the surrounding module.
            frame = frame.f_back
            continue
        if (code.co_name, _module(frame)) == _RUNS_A_MODULE:
            return
        rewritten = code.co_filename in files
        known = originals.get(code.co_filename)
        text, called_object = _called(frame)
        yield Caller(
            file=files[code.co_filename].path if rewritten else code.co_filename,
            line=frame.f_lineno,
            function=code.co_name,
            called=text,
            operation=called_object.operation,
            known=called_object.known,
            instead=called_object.instead,
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
    """Return the expression or statement that a function is executing; None if its source is missing or unusable."""
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
            node = ast.parse(attempt).body[0]
        except SyntaxError:
            continue
        return node.value if isinstance(node, ast.Expr) else node
    return None


_UNKNOWN = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class Called:
    """The object behind a call.

    Attributes:
        operation: the catalogue's entry for the object, if there is one.
        known: whether the object could be determined.
        instead: the form of the call in the source if it does not use the operation's own name (None: it does), so that
            the finder cannot recognize it.
    """

    operation: Operation | None
    known: bool = True
    instead: str | None = None


def called(node: ast.expr, frame: types.FrameType) -> Called:
    """Return the object that the function expression of a call refers to in a running frame."""
    if isinstance(node, ast.Attribute) and node.attr in METHODS:
        base = _resolve(node.value, frame)
        # Assume that an unnamed base, such as the result of a call, is a tensor.
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
    """Return whether a value is certainly not an operation; Python's builtins may call one."""
    return value is not _UNKNOWN and getattr(value, "__module__", None) != "builtins"


def _is_spelled_out(node: ast.expr, frame: types.FrameType) -> bool:
    """Return whether a dotted name consists of modules and tensor classes only, so that the finder can follow it."""
    while isinstance(node, ast.Attribute):
        node = node.value
        base = _resolve(node, frame)
        if not isinstance(base, types.ModuleType) and not (isinstance(base, type) and issubclass(base, Tensor)):
            return False
    return True


def _resolve(node: ast.expr, frame: types.FrameType) -> Any:
    """Return the object that an expression refers to in a frame; ``_UNKNOWN`` if the expression is not simple."""
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
        # Read the module's dictionary, because getattr on a lazy module would import half a library.
        return base.__dict__.get(name, _UNKNOWN)
    if isinstance(base, nn.Module) and name in base._modules:
        return base._modules[name]
    value = inspect.getattr_static(base, name, _UNKNOWN)
    return value.__func__ if isinstance(value, staticmethod) else value


def _item(base: Any, key: Any) -> Any:
    if type(base) is dict and isinstance(key, str | int):
        return base.get(key, _UNKNOWN)
    if type(base) in (list, tuple) and isinstance(key, int) and -len(base) <= key < len(base):
        return base[key]
    return _UNKNOWN


class Reason(Enum):
    """The closed list of reasons why an operation is not in low precision."""

    EXCLUDED = "excluded by rule"
    """``include`` or ``exclude`` of the configuration excludes its site."""
    SWITCHED_OFF = "this kind of site is switched off"
    """A switch in ``sites:`` of the configuration turns off its kind of site."""
    FALLBACK = "kept in float by fallback"
    """The plan quantized it, and its group fell back to float."""
    TARGET = "too small, or not faster in low precision on the target"
    """The target's profile keeps it in float: K or N is too small, or its kind is not faster in low precision."""
    UNFIT = "an operand cannot be quantized"
    """Its site ran, but for example an operand is a weight that no module registered, or differs between calls."""
    PARAMETERS = "computed from parameters only"
    """An operand, or the result, is computed from parameters and not from an input of the model."""
    NOT_FLOAT = "operands are not floating-point"
    """Its operands are integers, booleans or complex numbers."""
    RECURRENCE = "inside a compiled recurrent layer"
    """It runs inside torch's LSTM, GRU or RNN, whose steps are not Python code."""
    FUSED = "inside a fused kernel of torch"
    """A fast path fused it with other operations, as ``nn.TransformerEncoderLayer`` does in eval mode."""
    UNREADABLE = "the source cannot be read"
    """The function that calls it has no source, or the source does not match the loaded code."""
    NOT_REWRITABLE = "the source cannot be rewritten"
    """The call cannot be wrapped (an f-string, ``out=``), or its function cannot be replaced."""
    OUTSIDE = "called outside of any module of the model"
    """A module that is not a child of the model ran it, for example from a plain list or created in the pass."""
    NOT_IN_CATALOGUE = "the operation is not in the catalogue"
    """The source calls it through a function that is not in the catalogue of operations."""
    NOT_REACHED = "called in a function that could not be reached"
    """The call could be rewritten, but its function was not reached from ``forward``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedProduct:
    """The matrix multiplications or convolutions of one operation in one place.

    Attributes:
        path: the innermost module of the model that was running; empty for the root.
        site: the site that was running; None if none was.
        operation: torch's name of the operation.
        multiply_adds: the multiply-adds of all calls.
        reason: why they cannot be quantized, whatever the plan of their site; None if the plan decides.
        detail: the evidence for the reason.
    """

    path: str
    site: str | None
    operation: str
    multiply_adds: int = 0
    reason: Reason | None = None
    detail: str = ""

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "reason": self.reason.value if self.reason else None}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any], place: str = "product") -> CountedProduct:
        product: CountedProduct = decoded(cls, values, place)
        if product.multiply_adds < 0:
            raise ValueError(f"{place}.multiply_adds: expected 0 or more, got {product.multiply_adds}")
        if product.site is None and product.reason is None:
            raise ValueError(f"{place}.reason: is null for an operation outside of sites")
        return product


class Explanations:
    """The reasons why operations are outside of sites, equal in all passes of a model.

    Attributes:
        paths: the paths of the model's modules, by id.
    """

    def __init__(self, skipped: Iterable[UnrewrittenSource] = ()) -> None:
        """
        Args:
            skipped: calls and functions that the rewriter did not rewrite."""
        self.paths: dict[int, str] = {}
        self._skipped = tuple(skipped)
        self._known: dict[Any, tuple[Reason, str]] = {}

    def look_at(self, model: nn.Module) -> None:
        """Record the paths of the model's modules; pass the same model each time."""
        if not self.paths:
            self.paths = {id(module): path for path, module in model.named_modules()}

    def of_call(self, innermost: nn.Module) -> tuple[Reason, str]:
        """Return why there is no site around the call that a module of the model is making."""
        frame = innermost_frame(sys._getframe())
        assert frame is not None
        key = (frame.f_code, frame.f_lasti, id(innermost))
        if key not in self._known:
            self._known[key] = self._of_text(list(callers(frame)), self.paths[id(innermost)])
        return self._known[key]

    def _of_text(self, running: Sequence[Caller], path: str) -> tuple[Reason, str]:
        """Return why the call of the ``running`` functions, innermost first, did not become a site."""
        if any(caller.called.rpartition(".")[2] in _RECURRENT for caller in running):
            return Reason.RECURRENCE, str(running[0])
        for caller in running:
            if not caller.readable:
                return Reason.UNREADABLE, str(caller)
            if caller.operation is None:
                continue
            if caller.instead is not None:
                return Reason.NOT_REWRITABLE, f"{caller} is {caller.instead} {caller.operation.name}"
            matching = [skipped for skipped in self._skipped if _is_call_of(skipped, caller)]
            if matching:
                nearest = min(matching, key=lambda s: abs(s.source.line - caller.line))  # type: ignore[union-attr]
                return Reason.NOT_REWRITABLE, f"{caller}: {nearest.reason}"
            if caller.rewritten:
                return Reason.NOT_REWRITABLE, f"{caller}: not called by the name {caller.operation.name}"
            problem = next((s.reason for s in self._skipped if s.source is None and s.path == path), None)
            if problem is not None:
                return Reason.NOT_REWRITABLE, f"{caller}: {problem}"
            return Reason.NOT_REACHED, str(caller)
        if running and not running[0].known:
            return Reason.NOT_REWRITABLE, f"{running[0]}: the called function is known only at run time"
        return Reason.NOT_IN_CATALOGUE, str(running[0]) if running else ""


class ProductCounter:
    """Counts the matrix multiplications and convolutions of one pass; a dispatch mode reports each."""

    def __init__(self, explanations: Explanations) -> None:
        self._counted: dict[tuple[str, str | None, str, Reason | None, str], int] = {}
        self._explanations = explanations
        self._paths = explanations.paths
        self._running: list[nn.Module] = []
        self._calls: list[int] = []
        self._numbers = itertools.count()
        self._frames: tuple[tuple[str, int], ...] | None = None

    def start(self, model: nn.Module) -> None:
        """Start to follow the modules that this thread runs; call this from a hook of ``model``."""
        self._explanations.look_at(model)
        self._paths = self._explanations.paths
        self._running, self._calls = [model], [next(self._numbers)]
        follow(self)

    def stop(self) -> None:
        """Stop following modules."""
        leave(self)
        self._running = []

    def frames(self) -> tuple[tuple[str, int], ...]:
        """Return the running modules of the model, outermost first: the path and the index of the call of each."""
        if self._frames is None:
            running = zip(self._running, self._calls, strict=True)
            self._frames = tuple(
                (self._paths[id(module)], number)
                for module, number in running
                if id(module) in self._paths and not isinstance(module, SourceCall)
            )
        return self._frames

    @property
    def in_site(self) -> bool:
        """True if a site makes the running call."""
        return bool(self._running) and isinstance(self._running[-1], Site)

    def products(self) -> Counter[CountedProduct]:
        """Return the multiply-adds counted so far, by place."""
        places = {
            CountedProduct(path=path, site=site, operation=operation, reason=reason, detail=detail): number
            for (path, site, operation, reason, detail), number in self._counted.items()
        }
        return Counter(places)

    def count(self, name: str, args: Sequence[Any], result: Any, of_parameters: bool) -> None:
        """Count one operation of ``PRODUCTS``; ``of_parameters``: all its operands come from parameters only."""
        product = PRODUCTS[name]
        multiply_adds = product.count(args, result)
        if not multiply_adds or not self._running:
            return
        innermost = self._running[-1]
        if isinstance(innermost, Site):
            site, path = innermost.path, innermost.host_path
        else:
            site, path = None, next(self._paths[id(m)] for m in reversed(self._running) if id(m) in self._paths)
        reason, detail = self._reason(name, innermost, product.tensors(args), of_parameters)
        key = (path, site, name.removeprefix("aten::"), reason, detail)
        self._counted[key] = self._counted.get(key, 0) + multiply_adds

    def enter(self, module: nn.Module) -> None:
        """Record that a module begins to run."""
        self._running.append(module)
        self._calls.append(next(self._numbers))
        self._frames = None

    def exit(self, module: nn.Module) -> None:
        """Record that a module ends, also by an exception."""
        if module in self._running:
            # After an exception, modules whose end no hook reported are still in the list.
            while self._running.pop() is not module:
                self._calls.pop()
            self._calls.pop()
            self._frames = None

    # -- why -------------------------------------------------------------------------------------------------------

    def _reason(
        self, name: str, innermost: nn.Module, operands: Sequence[Tensor], of_parameters: bool
    ) -> tuple[Reason | None, str]:
        inexact = [tensor.dtype for tensor in operands if not tensor.is_floating_point()]
        if inexact:
            return Reason.NOT_FLOAT, str(inexact[0]).removeprefix("torch.")
        if isinstance(innermost, Site):
            return None, ""
        if name in RECURRENT_KERNELS:
            return Reason.RECURRENCE, type(innermost).__name__
        if name in FUSED_KERNELS:
            return Reason.FUSED, type(innermost).__name__
        if id(innermost) not in self._paths:
            return Reason.OUTSIDE, f"by a {type(innermost).__name__} that is not a child of the model"
        if isinstance(innermost, torch.jit.ScriptModule):
            return Reason.UNREADABLE, f"{innermost.original_name}, compiled by TorchScript"
        if of_parameters:
            return Reason.PARAMETERS, ""
        return self._explanations.of_call(innermost)


_RECURRENT = {f"{kind}{cell}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for cell in ("", "_cell")}


def _is_call_of(skipped: UnrewrittenSource, caller: Caller) -> bool:
    source = skipped.source
    return (
        source is not None
        and caller.operation is not None
        and source.file == caller.file
        and source.operation == caller.operation.name
        and source.name.partition(".")[0] == caller.function
    )


class Follower(Protocol):
    """A listener to every module call of a thread."""

    def enter(self, module: nn.Module) -> None:
        """Record that a module begins to run."""

    def exit(self, module: nn.Module) -> None:
        """Record that a module ends, also by an exception."""


class _Threads(threading.local):
    """The followers of each thread."""

    def __init__(self) -> None:
        self.followers: list[Follower] = []


_THREADS = _Threads()
_LOCK = threading.Lock()
_HANDLES: list[Any] = []
_FOLLOWING: list[Follower] = []


def follow(follower: Follower) -> None:
    """Notify a follower of every module that this thread runs, until ``leave``."""
    # Hooks on the modules would disable the fast paths of torch, so these are torch's global hooks. There are only two
    # per process: torch calls them in every thread and does not expect them to change meanwhile.
    with _LOCK:
        _FOLLOWING.append(follower)
        if not _HANDLES:
            _HANDLES.extend(
                (register_module_forward_pre_hook(_enter), register_module_forward_hook(_exit, always_call=True))
            )
    _THREADS.followers.append(follower)


def leave(follower: Follower) -> None:
    """Undo ``follow`` in the same thread; do nothing without it."""
    if follower in _THREADS.followers:
        _THREADS.followers.remove(follower)
    with _LOCK:
        if follower in _FOLLOWING:
            _FOLLOWING.remove(follower)
        if not _FOLLOWING:
            for handle in _HANDLES:
                handle.remove()
            _HANDLES.clear()


def _enter(module: nn.Module, args: Any) -> None:
    for follower in _THREADS.followers:
        follower.enter(module)


def _exit(module: nn.Module, args: Any, result: Any) -> None:
    for follower in reversed(_THREADS.followers):
        follower.exit(module)
