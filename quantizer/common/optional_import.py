"""Import of a library that an extra installs, when it is first needed."""

from __future__ import annotations

import importlib
from types import ModuleType

from quantizer.errors import EngineError, MissingDependencyError, install_command


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
