"""Names in a syntax tree: which a function binds, and which an expression spells."""

from __future__ import annotations

import ast

__all__ = ["bound_names", "dotted", "is_own"]

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
    bound: set[str] = set()
    declared: set[str] = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            if not isinstance(inner.ctx, ast.Load):
                bound.add(inner.id)
        elif isinstance(inner, ast.arg):
            bound.add(inner.arg)
        elif isinstance(inner, _NAMED):
            if inner.name is not None and inner is not node:
                bound.add(inner.name)
        elif isinstance(inner, ast.MatchMapping):
            if inner.rest is not None:
                bound.add(inner.rest)
        elif isinstance(inner, ast.Import | ast.ImportFrom):
            bound |= {(alias.asname or alias.name).partition(".")[0] for alias in inner.names}
        elif isinstance(inner, ast.Global):
            declared |= set(inner.names)
    return bound - declared


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
