"""Names in a syntax tree: which a function binds, and which an expression spells."""

from __future__ import annotations

import ast
from collections import Counter

__all__ = ["bound_names", "constant_texts", "dotted", "is_own"]

# Nodes that bind a name without a Name node.
_NAMED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar


def dotted(node: ast.expr) -> tuple[str, ...] | None:
    """The names of ``a.b.c``; None where the expression is anything else."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return (*base, node.attr) if base else None
    return None


def bound_names(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Names bound anywhere in a function, its arguments included."""
    inside = [inner for inner in ast.walk(node) if inner is not node]
    declared = {name for inner in inside if isinstance(inner, ast.Global) for name in inner.names}
    return {name for inner in inside for name in _bound_by(inner)} - declared


def _bound_by(node: ast.AST) -> list[str]:
    """The names that one node binds, those of the nodes in it apart."""
    if isinstance(node, ast.Name):
        return [] if isinstance(node.ctx, ast.Load) else [node.id]
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, _NAMED):
        return [] if node.name is None else [node.name]
    if isinstance(node, ast.MatchMapping):
        return [] if node.rest is None else [node.rest]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
    return []


def constant_texts(node: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, str]:
    """Local names that are bound once, to a text that stands there."""
    bindings: Counter[str] = Counter()
    texts: dict[str, str] = {}
    for inner in ast.walk(node):
        bindings.update(_bound_by(inner))
        if isinstance(inner, ast.Assign | ast.AnnAssign) and isinstance(inner.value, ast.Constant):
            targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
            if isinstance(inner.value.value, str):
                texts.update({target.id: inner.value.value for target in targets if isinstance(target, ast.Name)})
    return {name: text for name, text in texts.items() if bindings[name] == 1}


def is_own(node: ast.expr, first: str | None) -> bool:
    """Whether an expression is the module or class named ``first``, or the class of one.

    ``super()`` is not: Dynamo cannot tell what ``super().f`` is without calling it, and would compile another function
    than Python runs.
    """
    if isinstance(node, ast.Name):
        return node.id == first
    if isinstance(node, ast.Attribute):
        return node.attr == "__class__" and is_own(node.value, first)
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "type"
