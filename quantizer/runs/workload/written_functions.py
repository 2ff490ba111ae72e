"""Functions of the user's own, imported by the names that he wrote into his file or command line.

Nothing else is imported by name: no folder of a checkpoint and no tag of YAML leads here.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

from torch import nn

from quantizer.common.out_of_memory import is_out_of_memory
from quantizer.config.describe import nearest
from quantizer.errors import QuantizerError, TaskError

_MACHINERY = (__file__, importlib.__file__, "<frozen ")
"""Files whose lines say nothing about a failed import."""


@contextmanager
def current_folder_first() -> Iterator[None]:
    """Put the current folder on the import path, first, as ``python -m`` has it; for the user's own code alone.

    A folder there that is named like a library that torch would import if it were installed is none for us.
    """
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        # The code may have put other folders before it.
        if here in sys.path:
            sys.path.remove(here)


def imported(name: str) -> Callable[..., Any]:
    """Return the function that ``MODULE:FUNCTION`` names."""
    module_name, _, path = name.partition(":")
    try:
        with current_folder_first():
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise TaskError(f"{name}: importing {module_name} failed, {_what(error)}") from error
        raise TaskError(
            f"{name}: there is no module {error.name!r}, neither in {os.getcwd()} nor installed; expected "
            "MODULE:FUNCTION as Python imports it from the current folder"
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
    """Return what a function returns."""
    try:
        with current_folder_first():
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
