"""A cache of what torch's exporter finds out anew at each export, though it stays the same: half a second a time."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from threading import RLock
from typing import Any
from unittest.mock import patch

_read: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
"""What was read of each of the exporter's 500 translations, which live as long as the process, by what was asked."""

# Of two threads one would put back what the other has put in.
_one_at_a_time = RLock()


@contextmanager
def exporter_cache() -> Iterator[None]:
    """Let the exporter find out once what it would again and again.

    The signature of a translation is read from its source once in a process. The operators of torch that are made of
    others are looked up once in this context, instead of once for each library that has operators: more may be
    registered later. Where types are promoted, what stands for a result since the graph was captured is not computed
    again, as a promotion leaves its type. A release of torch that works in another way is left as it is.
    """
    with _one_at_a_time, ExitStack() as replaced:
        try:
            remembering = _remembering()
        except (ImportError, AttributeError):
            remembering = []
        for owner, name, value in remembering:
            replaced.enter_context(patch.object(owner, name, value))
        yield


def _remembering() -> list[tuple[Any, str, Any]]:
    """Return what stands for parts of the exporter: where each is, its name, and what does the same and remembers."""
    from onnxscript.values import TracedOnnxFunction
    from torch._export import utils
    from torch.onnx._internal.exporter import _schemas
    from torch.onnx._internal.fx.passes import type_promotion

    read_source = inspect.getattr_static(TracedOnnxFunction, "function_ir").fget
    read_annotations = _schemas.op_signature_from_function

    def annotations(function: Any, *args: Any, **keywords: Any) -> Any:
        asked = (args, *sorted(keywords.items()))
        return _once(function, asked, lambda: read_annotations(function, *args, **keywords))

    promoting, rule_of = type_promotion._TypePromotionInterpreter, type_promotion.get_type_promotion_rule
    run_node = promoting.run_node

    def promoted(interpreter: Any, node: Any) -> Any:
        if node.op != "call_function" or node.meta.get("val") is None:
            return run_node(interpreter, node)
        with interpreter._set_current_node(node):
            rule = rule_of(node, interpreter.type_promotion_table)
            if rule is not None:
                interpreter._maybe_promote_node(node, rule)
        return node.meta["val"]

    source = property(lambda function: _once(function, "source", lambda: read_source(function)))
    return [
        (TracedOnnxFunction, "function_ir", source),
        (_schemas, "op_signature_from_function", annotations),
        (utils, "_materialize_cpp_cia_ops", cache(utils._materialize_cpp_cia_ops)),
        (promoting, "run_node", promoted),
    ]


def _once(function: Any, asked: Any, read: Callable[[], Any]) -> Any:
    of_function = _read.setdefault(function, {})
    if asked not in of_function:
        of_function[asked] = read()
    return of_function[asked]
