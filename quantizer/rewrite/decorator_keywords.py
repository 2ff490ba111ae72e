"""Check of a decorator's source: does it pass on a keyword argument that it does not know.

A function that needs a host gets it as a keyword, through the wrappers around it. A wrapper that filters or reads its
keywords, or sometimes calls the function without them, would drop the host or fail on it.
"""

from __future__ import annotations

import ast
import types

from quantizer.errors import SourceError
from quantizer.rewrite.decorators import between
from quantizer.rewrite.decorators import variables_that_lead_to
from quantizer.rewrite.source_file import definition_of

__all__ = ["hand_on_keywords"]


def hand_on_keywords(wrapper: types.FunctionType, inner: types.FunctionType) -> bool:
    """Return whether all wrappers around ``inner`` only pass all of their further keywords on to it."""
    return all(_hands_on(function, inner) for function in between(wrapper, inner))


def _hands_on(wrapper: types.FunctionType, inner: types.FunctionType) -> bool:
    """Return whether a wrapper's text passes ``**keywords`` in each call of the wrapped function, and nowhere else."""
    try:
        node = definition_of(wrapper)
    except SourceError:
        return False
    if node is None or node.args.kwarg is None:
        return False
    keywords, wrapped = node.args.kwarg.arg, variables_that_lead_to(inner, wrapper)
    body = [found for statement in node.body for found in ast.walk(statement)]
    if any(isinstance(found, ast.arg) and found.arg in {keywords, *wrapped} for found in body):
        return False
    handed = [found for found in body if isinstance(found, ast.Call) and _hands(found, wrapped, keywords)]
    names = [found.id for found in body if isinstance(found, ast.Name)]
    if {"locals", "vars"} & {*names}:
        return False
    uses = sum(names.count(name) for name in wrapped)
    return len(handed) == names.count(keywords) == uses > 0


def _hands(call: ast.Call, wrapped: set[str], keywords: str) -> bool:
    """Return whether a call is ``wrapped(..., **keywords)``."""
    starred = [word.value for word in call.keywords if word.arg is None]
    return (
        isinstance(call.func, ast.Name)
        and call.func.id in wrapped
        and any(isinstance(value, ast.Name) and value.id == keywords for value in starred)
    )
