"""Imports and properties at their first use."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any

from quantizer.errors import EngineError, MissingDependencyError, install_command

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


def import_library(extra: str, *names: str) -> ModuleType:
    """Return the first of the modules ``names`` that is installed."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise MissingDependencyError(str(error.name), extra) from error
        except (ImportError, OSError) as error:
            raise EngineError(
                f"{name} is installed but does not load: {error}; "
                f"install it again with  {install_command(extra, '--force-reinstall')}"
            ) from error
    raise MissingDependencyError(names[0], extra)
