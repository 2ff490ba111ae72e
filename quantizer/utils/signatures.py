"""Signatures of functions whose annotations may not be evaluated."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

if sys.version_info >= (3, 14):
    import annotationlib


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function.

    Since Python 3.14 annotations are evaluated when they are read, and may use names that only a type checker has.
    """
    if sys.version_info >= (3, 14):
        return inspect.signature(function, annotation_format=annotationlib.Format.FORWARDREF)
    return inspect.signature(function)
