"""Proof of completeness: every product that a float run computes, and whether it is quantized.

Independently of the rewriter, a dispatch mode counts the matrix products and convolutions that torch executes, with
their multiply-adds. A product is *covered* if it runs inside a site that the plan quantizes. Every other product gets
one reason of a closed list.

Products that a library computes in its own operators (a Triton kernel, for example) are not counted.

Followers of a pass, which are called for every module that runs in their own thread.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from quantizer.common.plain_values import decoded
from quantizer.observe.completeness.call_site import Caller, callers, innermost_frame
from quantizer.operations.aten_products import FUSED_KERNELS, PRODUCTS, RECURRENT_KERNELS
from quantizer.proxy.build import UnrewrittenSource
from quantizer.proxy.site import Site, SourceCall


class Reason(Enum):
    """The reasons why a product is not in low precision; there is no other."""

    EXCLUDED = "excluded by rule"
    """An ``include`` or ``exclude`` of the configuration excludes its site."""
    SWITCHED_OFF = "this kind of site is switched off"
    """A switch in ``sites:`` of the configuration turns off its kind of site."""
    FALLBACK = "put back by fallback"
    """The plan quantized it, and its group fell back to float."""
    TARGET = "too small for the target, or the target gains nothing"
    """The target's profile keeps it in float: K or N is too small, or its kind runs no faster in low precision."""
    UNFIT = "an operand that cannot be held in low precision"
    """Its site ran, but for example an operand is a weight that no module registered, or differs between calls."""
    PARAMETERS = "computed from parameters alone"
    """An operand, or the whole product, is computed from parameters and from no input of the model."""
    NOT_FLOAT = "not a product of floats"
    """Its operands are integers, booleans or complex numbers."""
    RECURRENCE = "compiled recurrence"
    """It runs inside torch's LSTM, GRU or RNN, whose steps are not Python code."""
    FUSED = "fused kernel of torch"
    """A fast path computed it with others in one call, as ``nn.TransformerEncoderLayer`` does in eval mode."""
    UNREADABLE = "source that cannot be read"
    """The function that calls it has no source, or its source is not that of the loaded code."""
    NOT_REWRITABLE = "source that cannot be rewritten"
    """The call cannot be wrapped (an f-string, ``out=``), or its function cannot be replaced."""
    OUTSIDE = "called outside of any module of the model"
    """A module that is no child of the model ran it: one kept in a plain list, or made during the pass."""
    NOT_IN_CATALOGUE = "the operation is not in the catalogue"
    """The source calls it through a function that is not in the catalogue of products."""
    NOT_REACHED = "called in a function that could not be reached"
    """The call could be rewritten, but its function was not reached from ``forward``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedProduct:
    """The products of one operation in one place.

    Attributes:
        path: the innermost module of the model that was running; empty for the root.
        site: the site that was running; None if none was.
        operation: torch's name of the operation.
        multiply_adds: the multiply-adds of all calls.
        reason: why they cannot be covered, whatever the plan of their site; None if the plan decides.
        detail: the evidence for the reason.
    """

    path: str
    site: str | None
    operation: str
    multiply_adds: int = 0
    reason: Reason | None = None
    detail: str = ""

    def plain(self) -> dict[str, Any]:
        """Return the product as plain values, to be saved."""
        return {**asdict(self), "reason": self.reason.value if self.reason else None}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any], place: str = "product") -> CountedProduct:
        """Return the product from the values of ``plain()``."""
        product: CountedProduct = decoded(cls, values, place)
        if product.multiply_adds < 0:
            raise ValueError(f"{place}.multiply_adds: expected 0 or more, got {product.multiply_adds}")
        if product.site is None and product.reason is None:
            raise ValueError(f"{place}.reason: is null for a product of no site")
        return product


class Explanations:
    """The reasons why products are outside of sites, the same in all passes of a model.

    Attributes:
        paths: the paths of the model's modules, by id.
    """

    def __init__(self, skipped: Iterable[UnrewrittenSource] = ()) -> None:
        """
        Args:
            skipped: calls and functions that the rewriter left as they are.
        """
        self.paths: dict[int, str] = {}
        self._skipped = tuple(skipped)
        self._known: dict[Any, tuple[Reason, str]] = {}

    def look_at(self, model: nn.Module) -> None:
        """Record the paths of the model's modules; it must be the same model each time."""
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
            left = [skipped for skipped in self._skipped if _is_call_of(skipped, caller)]
            if left:
                nearest = min(left, key=lambda s: abs(s.source.line - caller.line))  # type: ignore[union-attr]
                return Reason.NOT_REWRITABLE, f"{caller}: {nearest.reason}"
            if caller.rewritten:
                return Reason.NOT_REWRITABLE, f"{caller}: not spelled as {caller.operation.name} is"
            problem = next((s.reason for s in self._skipped if s.source is None and s.path == path), None)
            if problem is not None:
                return Reason.NOT_REWRITABLE, f"{caller}: {problem}"
            return Reason.NOT_REACHED, str(caller)
        if running and not running[0].known:
            return Reason.NOT_REWRITABLE, f"{running[0]}: what that calls is known only when it runs"
        return Reason.NOT_IN_CATALOGUE, str(running[0]) if running else ""


class ProductCounter:
    """The counter of the products of one pass, called by a dispatch mode for every product."""

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
        """Return the running modules of the model, outermost first: the path and the number of the call of each."""
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
            return Reason.OUTSIDE, f"by a {type(innermost).__name__} that is no child of the model"
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
    """Call a follower for every module that this thread runs from now on, until ``leave``."""
    # Hooks on the modules would turn off the fast paths of torch, so they are torch's global hooks. There are only two
    # in the process: torch calls them in every thread, and does not expect them to change meanwhile.
    with _LOCK:
        _FOLLOWING.append(follower)
        if not _HANDLES:
            _HANDLES.extend(
                (register_module_forward_pre_hook(_enter), register_module_forward_hook(_exit, always_call=True))
            )
    _THREADS.followers.append(follower)


def leave(follower: Follower) -> None:
    """Undo ``follow``, in the same thread; do nothing if it was not called."""
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
