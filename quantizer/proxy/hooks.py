"""Hooks that belong to one module and not to its copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["OwnHook"]


class OwnHook:
    """A hook of one module alone: copied or pickled with its module, it does nothing."""

    def __init__(self, hook: Callable[..., Any] | None = None) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> Any:
        return None if self._hook is None else self._hook(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnHook:
        return OwnHook()

    def __reduce__(self) -> tuple[type[OwnHook], tuple[()]]:
        return OwnHook, ()
