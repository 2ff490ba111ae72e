"""A hook that belongs to one proxy and does nothing in copies and pickles of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class LocalHook:
    """A callable hook around a function that observes one proxy.

    Copied or pickled with the proxy, the hook loses the function, so that the objects it refers to (calibrators,
    dispatch modes) are neither copied nor pickled.
    """

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return None if self._function is None else self._function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalHook:
        return LocalHook()

    def __reduce__(self) -> tuple[type[LocalHook], tuple[()]]:
        return LocalHook, ()
