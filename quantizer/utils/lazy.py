"""Imports and properties at their first use."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any

from quantizer.errors import EngineError, MissingDependencyError, install_command

if TYPE_CHECKING:
    once_property = cached_property
else:

    class once_property(cached_property):
        """A thread-safe ``cached_property``: other threads wait while the value is computed."""

        def __init__(self, function: Callable[[Any], Any]) -> None:
            super().__init__(function)
            self._lock = threading.RLock()

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            with self._lock:
                return super().__get__(instance, owner)


def import_library(extra: str, *names: str) -> ModuleType:
    """Return the first installed module of ``names``.

    Args:
        extra: the extra of this distribution that installs them, for the message.
        names: alternative names of the module.

    Raises:
        MissingDependencyError: no module is installed, or a dependency of it is missing.
        EngineError: a module is installed but cannot be loaded.
    """
    for name in names:
        try:
            # A report of the import from a process of ``multiprocessing`` would run the script of the user once more
            # in Python 3.14 and later: such a process imports it.
            with _without(f"{name}_telemetry"):
                return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise MissingDependencyError(str(error.name), extra) from error
        except (ImportError, OSError) as error:
            raise EngineError(
                f"{name} is installed but cannot be loaded: {error}; "
                f"install it again with  {install_command(extra, '--force-reinstall')}"
            ) from error
    raise MissingDependencyError(names[0], extra)


@contextmanager
def _without(module: str) -> Iterator[None]:
    """Make the import of a module raise ``ModuleNotFoundError``, unless it was imported before."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.modules.pop(module, None)
