"""Module calls of a proxy, recorded in one pass and reused in later ones.

A call can be reused only if its output is its only effect. It is computed again in these cases: an argument or output
is neither a tensor nor a plain value (such as a cache), it changed an argument in place, it set an attribute of its
module, or its output was changed in place later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn

from quantizer.proxy.call_numbers import add_calls, calls_so_far
from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.proxy.site import SourceCall
from quantizer.utils.structure import leaves

_PLAIN = (Tensor, bool, int, float, str, type(None))


@dataclass(kw_only=True, slots=True, eq=False)
class RecordedCall:
    """A completed module call whose output is its only effect.

    Attributes:
        output: its output.
        versions: the version counters of the output's tensors when it ended.
        inside: the number of calls that it made, by module, including itself.
        sites: the number of calls of sites that it made, by path, if these are counted.
        time: the time of its end.
    """

    output: Any
    versions: list[int]
    inside: Counter[nn.Module]
    sites: Counter[str]
    time: int

    @property
    def holds(self) -> bool:
        """True if the output was not changed since."""
        return _versions(self.output) == self.versions


class RecordedCalls:
    """A context that records and reuses calls of a proxy's modules; it may be entered again.

    It replaces ``forward`` of the modules, but not of the sites.

    Attributes:
        records: whether calls that end now are recorded.
        time: the time of calls that end now; the caller counts it up from 0.
        until: calls that ended by this time are reused.
    """

    def __init__(self, proxy: nn.Module, *, outermost: bool = False) -> None:
        """Record calls of ``proxy``; with ``outermost``, drop calls inside of a recorded one."""
        self.records, self.time, self.until = True, 0, 0
        self._proxy, self._outermost = proxy, outermost
        self._calls: dict[tuple[nn.Module, int], RecordedCall] = {}
        self._number: Counter[nn.Module] = Counter()
        self._open: list[tuple[Counter[nn.Module], list[bool]]] = []
        self._own: dict[nn.Module, Callable[..., Any]] = {}

    def __enter__(self) -> Self:
        self.begin()
        for module in self._modules():
            # An attribute of the instance hides the method of its class; some libraries have set one.
            if "forward" in module.__dict__:
                self._own[module] = module.__dict__["forward"]
            module.__dict__["forward"] = self._instead(module, module.forward)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for module in self._modules():
            del module.__dict__["forward"]
        for module, forward in self._own.items():
            module.__dict__["forward"] = forward

    def begin(self, *, records: bool = True) -> None:
        self.records = records
        self._number.clear()

    def _modules(self) -> list[nn.Module]:
        return [
            module
            for module in self._proxy.modules()
            if module is not self._proxy and not isinstance(module, SourceCall | OperandQuantizer)
        ]

    def _instead(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **keywords: Any) -> Any:
            number = self._number[module]
            call = self._calls.get((module, number))
            if call is not None and call.time <= self.until and call.holds:
                self._number.update(call.inside)
                add_calls(call.sites)
                if self._open:
                    self._open[-1][0].update(call.inside)
                return call.output
            self._number[module] += 1
            return self._record(module, number, forward, args, keywords) if self.records else forward(*args, **keywords)

        return run

    def _record(
        self, module: nn.Module, number: int, forward: Callable[..., Any], args: tuple[Any, ...], keywords: Any
    ) -> Any:
        inside: Counter[nn.Module] = Counter([module])
        usable = [_plain((args, keywords))]
        before = _state(module), _versions((args, keywords))
        counted = calls_so_far() or Counter()
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
        sites = (calls_so_far() or Counter()) - counted
        if self.records and all(usable):
            for inner, count in inside.items() if self._outermost else ():
                after = self._number[inner]
                for place in range(after - count, after):
                    self._calls.pop((inner, place), None)
            self._calls[module, number] = RecordedCall(
                output=output, versions=_versions(output), inside=inside, sites=sites, time=self.time
            )
        return output


def _plain(tree: Any) -> bool:
    """Return whether a tree has only plain values and tensors; inference tensors have no change counter."""
    return all(
        isinstance(leaf, _PLAIN) and not (isinstance(leaf, Tensor) and leaf.is_inference()) for leaf in leaves(tree)
    )


def _versions(tree: Any) -> list[int]:
    return [leaf._version for leaf in leaves(tree) if isinstance(leaf, Tensor) and not leaf.is_inference()]


def _state(module: nn.Module) -> list[Any]:
    """Return the identities of a module's own attributes, and how often its tensors were changed in place."""
    attributes = {**module._buffers, **module.__dict__}
    return [{name: id(value) for name, value in attributes.items()}, _versions(list(attributes.values()))]
