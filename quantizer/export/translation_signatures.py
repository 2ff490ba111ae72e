"""Signatures of the exporter's own translations to ONNX, which it would read from their source at each export.

It has 500 of them, and reading them takes as long as all the rest of the export of a small model.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

__all__ = ["signatures_are_read_once"]

_read: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
"""What was read, by translation, which the exporter keeps as long as the process lives, and by how it was asked for."""


@contextmanager
def signatures_are_read_once() -> Iterator[None]:
    """Keep what the exporter reads in this context; a release of it that reads in another way does so each time."""
    try:
        from onnxscript.values import TracedOnnxFunction
        from torch.onnx._internal.exporter import _schemas

        read_source = inspect.getattr_static(TracedOnnxFunction, "function_ir").fget
        read_annotations = _schemas.op_signature_from_function
    except (ImportError, AttributeError):
        yield
        return

    def annotations(function: Any, *args: Any, **keywords: Any) -> Any:
        asked = (args, *sorted(keywords.items()))
        return _once(function, asked, lambda: read_annotations(function, *args, **keywords))

    source = property(lambda function: _once(function, "source", lambda: read_source(function)))
    with (
        patch.object(TracedOnnxFunction, "function_ir", source),
        patch.object(_schemas, "op_signature_from_function", annotations),
    ):
        yield


def _once(function: Any, asked: Any, read: Callable[[], Any]) -> Any:
    of_function = _read.setdefault(function, {})
    if asked not in of_function:
        of_function[asked] = read()
    return of_function[asked]
