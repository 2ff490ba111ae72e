"""Passes of a proxy over inputs of an earlier pass: from the sites that change on, or backward by repeating calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint, set_checkpoint_early_stop

from quantizer.proxy.build import sites_of
from quantizer.proxy.call_numbers import calls_so_far, numbered
from quantizer.proxy.recorded_calls import RecordedCall, RecordedCalls
from quantizer.proxy.site import Site
from quantizer.utils.batches import copied
from quantizer.utils.structure import leaves

_PLAIN = (Tensor, bool, int, float, complex, str, type(None), torch.dtype, torch.device)


def pass_of(proxy: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """Return the proxy's output for a copy of the inputs; hooks of the whole proxy do not run."""
    args, keywords = copied(args, keywords)
    return proxy.forward(*args, **keywords)


def overwritten(error: BaseException) -> bool:
    """Return whether autograd says that the model changed in place what the backward pass needs."""
    return isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error)


class RepeatedCalls:
    """Calls of modules of which autograd keeps the inputs only: the backward pass repeats each call once.

    A call whose arguments are more than tensors and plain values, such as a cache that it fills, is not repeated. An
    error of a repeated call ends the block without an error: the call depends on what it changed, or others did.

    Attributes:
        held: whether every repeated call gave what it gave first, bit for bit.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._kept: list[tuple[nn.Module, dict[str, Any]]] = []
        self._repeating = False
        self.held = True

    def __enter__(self) -> Self:
        for module in self._modules:
            self._kept.append((module, {name: value for name, value in vars(module).items() if name == "forward"}))
            vars(module)["forward"] = partial(self._call, module.forward)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        for module, own in self._kept:
            del vars(module)["forward"]
            vars(module).update(own)
        self._kept.clear()
        if not isinstance(error, Exception):
            return False
        ended = self._repeating or isinstance(error, CheckpointError) or overwritten(error)
        self.held = self.held and not ended
        return ended

    def _call(self, forward: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        if not all(isinstance(value, _PLAIN) for value in leaves((args, keywords))):
            return forward(*args, **keywords)
        first: list[Any] = []
        before = calls_so_far()

        def run(*args: Any, **keywords: Any) -> Any:
            self._repeating = bool(first)
            with numbered(self, before) if first and before is not None else nullcontext():
                result = forward(*args, **keywords)
            found = [value.detach() if isinstance(value, Tensor) else value for value in leaves(result)]
            if first:
                self.held = self.held and all(map(_same, first, found)) and len(first) == len(found)
                self._repeating = False
            first[:] = found
            return result

        # Otherwise a repeated call would end before its result is there.
        with set_checkpoint_early_stop(False):
            return checkpoint(run, *args, use_reentrant=False, **keywords)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and (one is other or not isinstance(one, _PLAIN) or bool(one == other))


class Reuse(RecordedCalls):
    """The calls of a first pass of a proxy, which is the first one inside the block, reused in later passes.

    Every module call of the first pass is recorded. If a call ended before the first call of the changed sites, later
    passes take its recorded output, and nothing inside it runs; see ``proxy/recorded_calls.py`` for those that cannot
    be.
    """

    def __init__(self, proxy: nn.Module) -> None:
        super().__init__(proxy)
        # With the number of calls of sites before the end of the call.
        self._calls: dict[tuple[nn.Module, int], tuple[int, RecordedCall]] = {}
        self._first: dict[Site, int] = {}
        self._site_calls = 0
        self._limit: int | None = None

    def __enter__(self) -> Self:
        super().__enter__()
        for site in sites_of(self._proxy):
            site.judge = self._count
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        for site in sites_of(self._proxy):
            site.judge = None

    @contextmanager
    def until(self, sites: Collection[Site]) -> Iterator[None]:
        """Reuse, in a pass inside the block, recorded calls that ended before the first call of any of ``sites``."""
        for site in sites_of(self._proxy):
            site.judge = None
        self._number.clear()
        self._limit = min((self._first[site] for site in sites if site in self._first), default=0)
        try:
            yield
        finally:
            self._limit = None

    @property
    def _records(self) -> bool:
        return self._limit is None

    def _recorded(self, module: nn.Module, number: int) -> RecordedCall | None:
        end, call = self._calls.get((module, number), (0, None))
        if self._limit is None or call is None or end > self._limit or not call.holds:
            return None
        return call

    def _keep(self, module: nn.Module, number: int, call: RecordedCall) -> None:
        self._calls[module, number] = self._site_calls, call

    def _count(self, site: Site, function: Callable[..., Any], args: list[Any], keywords: dict[str, Any]) -> Any:
        self._first.setdefault(site, self._site_calls)
        self._site_calls += 1
        return function(*args, **keywords)
