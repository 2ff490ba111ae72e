"""Live globals: rewritten functions read and write globals in the original module.

A rewritten function runs in a copy of the globals of its file. It must see names that are bound anew later, and others
must see what it declares ``global``: so ``SCALE`` becomes ``_quantizer_live.SCALE``, an attribute of the original
module, for reading, writing and deleting alike. Functions that may have a rewritten twin become
``_quantizer_now(_quantizer_live.f)``. Modules and classes keep their names: they are not bound anew, and the text stays
readable.
"""

from __future__ import annotations

import ast
import builtins
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from quantizer.reasons import ReasonCode
from quantizer.rewrite.names import FunctionNode
from quantizer.rewrite.text_edits import Edit, LineIndex

# Names in rewritten text that no user writes.
LIVE = "_quantizer_live"
NOW = "_quantizer_now"

_INNERMOST = 1 << 20
"""The depth of a name: whatever else begins or ends there stands around it."""

_SHARED = ("torch",)
"""Packages whose globals nobody binds anew."""


def live_edits(
    node: FunctionNode, index: LineIndex, namespace: Mapping[str, Any], bound: Collection[str]
) -> list[Edit]:
    """Return the edits by which a function, live by ``why_not_live``, reads and writes its globals in their module.

    Args:
        node: the function.
        index: byte offsets of its file's lines.
        namespace: the globals that it runs in.
        bound: names that are bound in it, and variables of functions around it.
    """
    if str(namespace.get("__name__", "")).partition(".")[0] in _SHARED:
        return []
    edits: list[Edit] = []
    inside = [*ast.walk(node)]
    hidden = {*bound, *(parameter.name for inner in inside for parameter in getattr(inner, "type_params", ()))}
    # Those of inner functions are none here, see ``why_not_live``.
    declared = _declared(inside)
    for name in _names(node.body):
        if name.id in hidden:
            continue
        value = namespace.get(name.id, namespace)
        if name.id not in declared and (
            isinstance(value, types.ModuleType | type) or (value is namespace and hasattr(builtins, name.id))
        ):
            continue
        twin = isinstance(name.ctx, ast.Load) and isinstance(value, types.FunctionType)
        edits.append(Edit.opening(index.start(name), f"{NOW}({LIVE}." if twin else f"{LIVE}.", _INNERMOST))
        if twin:
            edits.append(Edit.closing(index.end(name), ")", _INNERMOST))
    return edits


def why_not_live(node: FunctionNode) -> str | None:
    """Return the reason why the globals that a function declares cannot be written in place; None if they can."""
    inner = [found for statement in node.body for found in ast.walk(statement)]
    declared = _declared(inner)
    if not declared:
        return None
    own = {id(statement) for statement in _own_statements(node.body)}
    if any(isinstance(found, ast.Global) and id(found) not in own for found in inner):
        return ReasonCode.INNER_GLOBAL.text()
    for found in inner:
        names = _bound_otherwise(found) & declared
        if names:
            return ReasonCode.BOUND_GLOBAL.text(name=min(names))
    return None


def _bound_otherwise(node: ast.AST) -> set[str]:
    """Return the names that a node binds in a form that an attribute cannot replace."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    if isinstance(node, ast.NamedExpr):
        return {node.target.id}
    if isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
        return {node.name} if node.name else set()
    return {node.rest} if isinstance(node, ast.MatchMapping) and node.rest else set()


def _declared(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names that nodes declare global."""
    return {name for found in nodes if isinstance(found, ast.Global) for name in found.names}


def _own_statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of a function, without those of functions and classes in it."""
    found: list[ast.stmt] = []
    waiting: list[ast.AST] = list(body)
    while waiting:
        current = waiting.pop()
        if isinstance(current, ast.stmt):
            found.append(current)
        if not isinstance(current, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            waiting += ast.iter_child_nodes(current)
    return found


def _names(nodes: list[ast.stmt]) -> Iterator[ast.Name]:
    """Yield the names in statements, except in classes and f-strings, where text is not rewritten."""
    waiting: list[ast.AST] = list(nodes)
    while waiting:
        current = waiting.pop()
        if isinstance(current, ast.Name):
            yield current
        elif not isinstance(current, ast.ClassDef | ast.JoinedStr):
            waiting += ast.iter_child_nodes(current)
