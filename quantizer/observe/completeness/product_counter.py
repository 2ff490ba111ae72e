"""Proof of completeness: every product that a float run computes, and what became of it.

Beside the rewriter, and knowing nothing of what it found, a dispatch mode counts the matrix products and convolutions
that torch executes, with their multiply-adds. One that ran inside a site which the plan quantizes is *covered*. Every
other one *escaped*, and gets one reason of a closed list.

What a library computes in an operator of its own (a Triton kernel, say) is no product of torch and is not seen.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor
from torch import nn

from quantizer.common.plain_values import decoded
from quantizer.observe.completeness.call_site import Caller
from quantizer.observe.completeness.call_site import callers
from quantizer.observe.completeness.call_site import innermost_frame
from quantizer.observe.completeness.running_modules import follow
from quantizer.observe.completeness.running_modules import leave
from quantizer.operations.aten_products import FUSED_KERNELS
from quantizer.operations.aten_products import PRODUCTS
from quantizer.operations.aten_products import RECURRENT_KERNELS
from quantizer.proxy.build import UnrewrittenSource
from quantizer.proxy.site import Site

__all__ = ["CountedProduct", "Explanations", "ProductCounter", "Reason"]


class Reason(Enum):
    """The reasons why a product is not in low precision; there is no other."""

    EXCLUDED = "excluded by rule"
    """An ``include`` or ``exclude`` of the configuration leaves its site out."""
    SWITCHED_OFF = "this kind of site is switched off"
    """``sites:`` of the configuration says so."""
    FALLBACK = "put back by fallback"
    """Calibration quantized it; ``fallback`` found it too sensitive."""
    TARGET = "too small for the target, or the target gains nothing"
    """The target's profile leaves it in float: K or N is too small, or it is of a kind that runs no faster."""
    UNFIT = "an operand that cannot be held in low precision"
    """Its site was seen, but an operand is a weight that no module has registered, or not the same in all calls."""
    PARAMETERS = "computed from parameters alone"
    """An operand, or the product as a whole, comes from parameters and from no input of the model."""
    NOT_FLOAT = "not a product of floats"
    """Its operands are integers, booleans or complex numbers."""
    RECURRENCE = "compiled recurrence"
    """It runs inside torch's LSTM, GRU or RNN, whose steps are no Python."""
    FUSED = "fused kernel of torch"
    """A fast path computed it with others in one call, as ``nn.TransformerEncoderLayer`` does in eval mode."""
    UNREADABLE = "source that cannot be read"
    """The function that calls it has no source, or one that is not of the loaded code."""
    NOT_REWRITABLE = "source that cannot be rewritten"
    """The call stands where text cannot be wrapped (an f-string, ``out=``), or its function cannot be replaced."""
    OUTSIDE = "called outside of any module of the model"
    """A module that is no child of the model ran it: one kept in a plain list, or made during the pass."""
    NOT_IN_CATALOGUE = "the operation is not in the catalogue"
    """The source calls it by a function that is not known to be a product."""
    NOT_REACHED = "called in a function that could not be reached"
    """The call could be rewritten, but nothing that was followed from ``forward`` leads to its function."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedProduct:
    """Products of one operation in one place, as they were counted.

    Attributes:
        path: the innermost module of the model that was running; empty for the root.
        site: the site that was running; None where none was.
        operation: torch's name of the operation.
        multiply_adds: those of all calls.
        reason: why it cannot be covered, whatever becomes of its site; None where its site decides.
        detail: the evidence for the reason.
    """

    path: str
    site: str | None
    operation: str
    multiply_adds: int = 0
    reason: Reason | None = None
    detail: str = ""

    def plain(self) -> dict[str, Any]:
        """Plain values, to be saved."""
        return {**asdict(self), "reason": self.reason.value if self.reason else None}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any], place: str = "product") -> CountedProduct:
        """Return what ``plain`` gave.

        Raises:
            ValueError: it is damaged; ``place`` is where it stands.
        """
        product: CountedProduct = decoded(cls, values, place)
        if product.multiply_adds < 0:
            raise ValueError(f"{place}.multiply_adds: expected 0 or more, got {product.multiply_adds}")
        if product.site is None and product.reason is None:
            raise ValueError(f"{place}.reason: is null for a product of no site")
        return product


class Explanations:
    """Explanations of products outside of sites; that of one pass holds for all passes of a model.

    Attributes:
        paths: the modules of the model, by id.
    """

    def __init__(self, skipped: Iterable[UnrewrittenSource] = ()) -> None:
        """
        Args:
            skipped: calls and functions that the rewriter left alone.
        """
        self.paths: dict[int, str] = {}
        self._skipped = tuple(skipped)
        self._known: dict[Any, tuple[Reason, str]] = {}

    def look_at(self, model: nn.Module) -> None:
        """Take note of the model's modules; it is the same model each time."""
        if not self.paths:
            self.paths = {id(module): path for path, module in model.named_modules()}

    def of_call(self, innermost: nn.Module) -> tuple[Reason, str]:
        """Return why there is no site around the call that is being made, by a module of the model."""
        frame = innermost_frame(sys._getframe())
        assert frame is not None
        key = (frame.f_code, frame.f_lasti, id(innermost))
        if key not in self._known:
            self._known[key] = self._of_text(list(callers(frame)), self.paths[id(innermost)])
        return self._known[key]

    def _of_text(self, running: Sequence[Caller], path: str) -> tuple[Reason, str]:
        """Return why the source made no site of a call that ``running`` functions made, the innermost first."""
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
    """Counts products of one pass while a model runs; a dispatch mode tells it of every operation."""

    def __init__(self, explanations: Explanations) -> None:
        self._counted: dict[tuple[str, str | None, str, Reason | None, str], int] = {}
        self._explanations = explanations
        self._paths = explanations.paths
        self._running: list[nn.Module] = []
        self._calls: list[int] = []
        self._numbers = itertools.count()
        self._frames: tuple[tuple[str, int], ...] | None = None

    def start(self, model: nn.Module) -> None:
        """Follow which modules this thread runs, from a hook of ``model`` on."""
        self._explanations.look_at(model)
        self._paths = self._explanations.paths
        self._running, self._calls = [model], [next(self._numbers)]
        follow(self)

    def stop(self) -> None:
        """End what ``start`` began."""
        leave(self)
        self._running = []

    def frames(self) -> tuple[tuple[str, int], ...]:
        """Return the modules of the model that run, the outermost first: path and number of the call of each."""
        if self._frames is None:
            running = zip(self._running, self._calls, strict=True)
            self._frames = tuple(
                (self._paths[id(module)], number)
                for module, number in running
                if id(module) in self._paths and not isinstance(module, Site)
            )
        return self._frames

    @property
    def in_site(self) -> bool:
        """True if a site makes the call that runs."""
        return bool(self._running) and isinstance(self._running[-1], Site)

    def products(self) -> Counter[CountedProduct]:
        """Return what was counted so far: places, with their multiply-adds."""
        places = {
            CountedProduct(path=path, site=site, operation=operation, reason=reason, detail=detail): number
            for (path, site, operation, reason, detail), number in self._counted.items()
        }
        return Counter(places)

    def count(self, name: str, args: Sequence[Any], result: Any, of_parameters: bool) -> None:
        """Count one operation of ``PRODUCTS``; ``of_parameters``: all its operands come from parameters alone."""
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
        """Note that a module begins to run."""
        self._running.append(module)
        self._calls.append(next(self._numbers))
        self._frames = None

    def exit(self, module: nn.Module) -> None:
        """Note that a module ends, also by an exception."""
        if module in self._running:
            # After an exception, some that had no hook call are still there.
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
