"""``once_property``: a cached property whose function runs once, whatever threads ask for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    once_property = cached_property
else:

    class once_property(cached_property):
        """A ``cached_property`` for what must not be made twice: threads that ask while it is made wait for it."""

        def __init__(self, function: Callable[[Any], Any]) -> None:
            super().__init__(function)
            self._making = threading.RLock()

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            with self._making:
                return super().__get__(instance, owner)
