"""Not computing again what comes before the sites that change.

Every module call of a first pass is recorded. In a later pass a call that ended before the first call of the changed
sites gives what it gave, and what is inside it is not run at all. A call is never given again if it has effects that
its output does not hold: an argument or output that is no tensor (a cache), an argument that it changed in place, an
attribute of the module that it set, or an output that was changed in place later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch import Tensor
from torch import nn
from torch.utils import _pytree as pytree

from quantizer.proxy.build import sites_of
from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.proxy.site import Site

__all__ = ["Reuse"]

_PLAIN = (Tensor, bool, int, float, str, type(None))


@dataclass(kw_only=True, slots=True, eq=False)
class _Call:
    """One module call of the first pass.

    Attributes:
        output: what it gave.
        versions: of the output's tensors when it ended.
        end: how many calls of sites had been made when it ended.
        inside: the calls that it made, by module, its own included.
        usable: its output is all that came of it.
    """

    output: Any
    versions: list[int]
    end: int
    inside: Counter[nn.Module]
    usable: bool


class Reuse:
    """Stands before the modules of a proxy while its block is open. The first pass records."""

    def __init__(self, proxy: nn.Module) -> None:
        self._proxy = proxy
        self._calls: dict[tuple[nn.Module, int], _Call] = {}
        self._number: Counter[nn.Module] = Counter()
        self._open: list[tuple[Counter[nn.Module], list[bool]]] = []
        self._first: dict[Site, int] = {}
        self._site_calls = 0
        self._limit: int | None = None
        self._own: dict[nn.Module, Callable[..., Any]] = {}

    def __enter__(self) -> Reuse:
        for module in self._modules():
            # An instance's attribute stands before its class's method; some libraries have put one there.
            if "forward" in module.__dict__:
                self._own[module] = module.__dict__["forward"]
            module.__dict__["forward"] = self._instead(module, module.forward)
        for site in sites_of(self._proxy):
            site.judge = self._count
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for module in self._modules():
            del module.__dict__["forward"]
        for module, forward in self._own.items():
            module.__dict__["forward"] = forward
        for site in sites_of(self._proxy):
            site.judge = None

    @contextmanager
    def until(self, sites: Collection[Site]) -> Iterator[None]:
        """In the pass inside, take from the first pass what ended before the first call of any of ``sites``."""
        for site in sites_of(self._proxy):
            site.judge = None
        self._number.clear()
        self._limit = min((self._first[site] for site in sites if site in self._first), default=0)
        try:
            yield
        finally:
            self._limit = None

    def _modules(self) -> list[nn.Module]:
        return [
            module
            for module in self._proxy.modules()
            if module is not self._proxy and not isinstance(module, Site | OperandQuantizer)
        ]

    def _count(self, site: Site, function: Callable[..., Any], args: list[Any], keywords: dict[str, Any]) -> Any:
        self._first.setdefault(site, self._site_calls)
        self._site_calls += 1
        return function(*args, **keywords)

    def _instead(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **keywords: Any) -> Any:
            number = self._number[module]
            if self._limit is None:
                return self._record(module, number, forward, args, keywords)
            call = self._calls.get((module, number))
            if call is not None and call.usable and call.end <= self._limit and _versions(call.output) == call.versions:
                self._number.update(call.inside)
                return call.output
            self._number[module] += 1
            return forward(*args, **keywords)

        return run

    def _record(
        self, module: nn.Module, number: int, forward: Callable[..., Any], args: tuple[Any, ...], keywords: Any
    ) -> Any:
        self._number[module] += 1
        inside: Counter[nn.Module] = Counter([module])
        usable = [_plain((args, keywords))]
        before = _state(module), _versions((args, keywords))
        self._open.append((inside, usable))
        try:
            output = forward(*args, **keywords)
        finally:
            self._open.pop()
        usable.append(_plain(output) and (_state(module), _versions((args, keywords))) == before)
        if self._open:
            outer, outer_usable = self._open[-1]
            outer.update(inside)
            outer_usable.append(all(usable))
        self._calls[module, number] = _Call(
            output=output,
            versions=_versions(output),
            end=self._site_calls,
            inside=inside,
            usable=all(usable),
        )
        return output


def _plain(tree: Any) -> bool:
    """Return whether there are only tensors and numbers; torch counts no changes of tensors of inference mode."""
    leaves = pytree.tree_leaves(tree)
    return all(isinstance(leaf, _PLAIN) and not (isinstance(leaf, Tensor) and leaf.is_inference()) for leaf in leaves)


def _versions(tree: Any) -> list[int]:
    """Return how often each tensor was changed in place."""
    return [leaf._version for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and not leaf.is_inference()]


def _state(module: nn.Module) -> list[Any]:
    """Return what the module itself holds, by identity, and how often its tensors were changed."""
    held = {**module._buffers, **module.__dict__}
    return [{name: id(value) for name, value in held.items()}, _versions(list(held.values()))]
