"""Functions of the user's own, imported by the names that he wrote into his file or command line.

Nothing else is imported by name: no folder of a checkpoint and no tag of YAML leads here.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from functools import reduce
from typing import Any

from torch import nn

from quantizer.common.out_of_memory import is_out_of_memory
from quantizer.config.describe import nearest
from quantizer.errors import QuantizerError
from quantizer.errors import TaskError

__all__ = ["called", "imported"]

_MACHINERY = (__file__, importlib.__file__, "<frozen ")
"""Files whose lines say nothing about a failed import."""


def imported(name: str) -> Callable[..., Any]:
    """Return the function that ``MODULE:FUNCTION`` names.

    The current folder is on the import path, first, as ``python -m`` has it; it stays there, for what the function
    itself imports.

    Raises:
        TaskError: the module cannot be imported, or has no such function.
    """
    module_name, _, path = name.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise TaskError(f"{name}: importing {module_name} failed, {_what(error)}") from error
        raise TaskError(
            f"{name}: there is no module {error.name!r}, neither in {here} nor installed; expected MODULE:FUNCTION as "
            "Python imports it from the current folder"
        ) from error
    # A script without a guard around its main part may exit.
    except (Exception, SystemExit) as error:
        raise TaskError(f"{name}: importing {module_name} failed, {_what(error)}") from error
    try:
        found = reduce(getattr, path.split("."), module)
    except AttributeError as error:
        near = nearest(path, [key for key, value in vars(module).items() if callable(value)])
        hint = f"; did you mean {near!r}?" if near else ""
        raise TaskError(f"{name}: {module.__file__ or module_name} has no {path!r}{hint}") from error
    if not callable(found) or isinstance(found, nn.Module):
        raise TaskError(f"{name} is {_kind(found)}; expected a function, which is called")
    function: Callable[..., Any] = found
    return function


def called(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns.

    Args:
        name: its name, for messages.
        function: the function.
        args: its arguments.

    Raises:
        TaskError: it raises an error of its own; the message says where.
    """
    try:
        return function(*args)
    except QuantizerError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise TaskError(f"{name}() failed, {_what(error)}") from error


def _what(error: BaseException) -> str:
    """Return an error in words, with the line of the user's code that it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_MACHINERY)]
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"with {type(error).__name__}: {error}{place}"


def _kind(value: object) -> str:
    return f"a module itself, a {type(value).__name__}" if isinstance(value, nn.Module) else f"a {type(value).__name__}"
