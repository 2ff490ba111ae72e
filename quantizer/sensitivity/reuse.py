"""Outputs of a first pass, reused in later passes up to the sites that change.

Every module call of the first pass is recorded. If a call ended before the first call of the changed sites, later
passes take its recorded output, and nothing inside it runs; see ``proxy/recorded_calls.py`` for those that cannot be.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from torch import nn

from quantizer.proxy.build import sites_of
from quantizer.proxy.recorded_calls import RecordedCall, RecordedCalls
from quantizer.proxy.site import Site


class Reuse(RecordedCalls):
    """The calls of a first pass of a proxy, which is the first one inside the block."""

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
