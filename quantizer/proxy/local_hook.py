"""A hook that belongs to one proxy: copies and pickles of that proxy do without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["LocalHook"]


class LocalHook:
    """Calls a function of whoever watches a proxy.

    A copy of the proxy is watched by nobody: there the hook does nothing, and what the function holds (calibrators,
    dispatch modes) is neither copied nor pickled.
    """

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return None if self._function is None else self._function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalHook:
        return LocalHook()

    def __reduce__(self) -> tuple[type[LocalHook], tuple[()]]:
        return LocalHook, ()
