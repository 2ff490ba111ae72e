"""Numbers of a site's calls within one forward pass of its proxy, from 0.

A pass is one call of the proxy's ``forward`` in one thread. Calls have no number outside of a pass: in a module that is
called alone, in threads of the model, and in layers that are recomputed for gradients.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


class _Pass(threading.local):
    """The pass that runs in this thread."""

    root: object = None
    counts: dict[str, int] | None = None


_PASS = _Pass()


def count_call(path: str) -> None:
    """Count a call of a site, which begins now."""
    counts = _PASS.counts
    if counts is not None:
        counts[path] = counts.get(path, 0) + 1


def current_call(path: str) -> int | None:
    """Return the number of the last counted call of a site; None outside of a pass."""
    counts = _PASS.counts
    return None if counts is None else counts.get(path, 0) - 1


def next_call(path: str) -> int | None:
    """Return the number of the next call of a site; None outside of a pass."""
    counts = _PASS.counts
    return None if counts is None else counts.get(path, 0)


def calls_so_far() -> Counter[str] | None:
    """Return the number of calls so far by the path of the site; None outside of a pass."""
    return None if _PASS.counts is None else Counter(_PASS.counts)


def add_calls(calls: Mapping[str, int]) -> None:
    """Count skipped calls of sites, whose results are known."""
    for path, number in calls.items():
        if _PASS.counts is not None:
            _PASS.counts[path] = _PASS.counts.get(path, 0) + number


@contextmanager
def numbered(root: object, so_far: Mapping[str, int] | None = None) -> Iterator[None]:
    """Run the block as one pass, with calls numbered from 0 or continued from ``so_far``."""
    before = _PASS.root, _PASS.counts
    _PASS.root, _PASS.counts = root, dict(so_far or {})
    try:
        yield
    finally:
        _PASS.root, _PASS.counts = before


def with_numbered_calls(cls: type[nn.Module]) -> dict[str, Any]:
    """Return the body of a subclass whose ``forward`` is a pass; a model that calls itself stays in its pass."""
    inner: Any = cls.forward

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **keywords: Any) -> Any:
        if _PASS.root is self:
            return inner(self, *args, **keywords)
        # Not ``numbered``, so that a compiler traces plain assignments.
        before = _PASS.root, _PASS.counts
        _PASS.root, _PASS.counts = self, {}
        try:
            return inner(self, *args, **keywords)
        finally:
            _PASS.root, _PASS.counts = before

    return {"forward": forward, "_quantizer_numbers": True}
