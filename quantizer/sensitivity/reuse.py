"""Outputs of a first pass, reused in later passes up to the sites that change.

Every module call of the first pass is recorded. If a call ended before the first call of the changed sites, later
passes take its recorded output, and nothing inside it runs. A call is computed again if it has effects besides its
output: an argument or output that is neither a tensor nor a plain value (a cache), an argument that it changed in
place, an attribute that it set on its module, or an output that was changed in place later.
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
    """A module call of the first pass.

    Attributes:
        output: its output.
        versions: the version counters of the output's tensors when it ended.
        end: the number of calls of sites before its end.
        inside: the number of calls that it made, by module, its own included.
        usable: whether its output is its only effect.
    """

    output: Any
    versions: list[int]
    end: int
    inside: Counter[nn.Module]
    usable: bool


class Reuse:
    """A context that replaces ``forward`` of the modules of a proxy while its block is open; the first pass records."""

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
            # An attribute of the instance hides the method of its class; some libraries have set one.
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
        """Reuse, in a pass inside the block, recorded calls that ended before the first call of any of ``sites``."""
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
    """Return whether a tree holds only plain values and tensors; torch counts no changes of inference tensors."""
    leaves = pytree.tree_leaves(tree)
    return all(isinstance(leaf, _PLAIN) and not (isinstance(leaf, Tensor) and leaf.is_inference()) for leaf in leaves)


def _versions(tree: Any) -> list[int]:
    """Return how often each tensor was changed in place."""
    return [leaf._version for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and not leaf.is_inference()]


def _state(module: nn.Module) -> list[Any]:
    """Return the identities of what the module itself holds, and how often its tensors were changed in place."""
    held = {**module._buffers, **module.__dict__}
    return [{name: id(value) for name, value in held.items()}, _versions(list(held.values()))]
