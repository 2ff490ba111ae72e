"""Names in a syntax tree: of functions, names that a function binds, and objects that it reads.

A rewritten function runs in a copy of the globals of its file, but must read and write the globals of the original
module. So ``SCALE`` becomes ``_quantizer_live.SCALE``, an attribute of the original module. Functions that may have a
rewritten twin become ``_quantizer_now(_quantizer_live.f)``. Modules and classes keep their names, because they are not
rebound and the source stays readable.
"""

from __future__ import annotations

import ast
import builtins
import sys
import types
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

from torch import Tensor
from torch._ops import OpOverloadPacket

from quantizer.plan.reasons import ReasonCode
from quantizer.rewrite.text_edits import Edit, LineIndex

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

FORMATTED: tuple[type[ast.expr], ...] = (ast.JoinedStr,)
"""f-strings, and t-strings in Python 3.14 and later."""
if sys.version_info >= (3, 14):
    FORMATTED = (ast.JoinedStr, ast.TemplateStr)

# Nodes that bind a name without a Name node.
_NAMED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar


def functions_in(tree: ast.Module) -> Iterator[tuple[str, FunctionNode, str | None]]:
    """Yield qualified name, node and surrounding class of all functions at module level and all methods.

    A function defined inside another is part of it, except for the methods of a class that may be a module: one with a
    base, or that is the base of another one there.
    """

    def walk(
        body: list[ast.stmt], prefix: str, inside: Literal["module", "class", "function"]
    ) -> Iterator[tuple[str, FunctionNode, str | None]]:
        bases = {
            base.id
            for node in body
            if isinstance(node, ast.ClassDef)
            for base in node.bases
            if isinstance(base, ast.Name)
        }
        for node in body:
            if isinstance(node, FunctionNode):
                if inside != "function":
                    owner = prefix.rstrip(".").rpartition(".")[2] if inside == "class" else None
                    yield prefix + node.name, node, owner
                yield from walk(node.body, f"{prefix}{node.name}.<locals>.", "function")
            elif isinstance(node, ast.ClassDef):
                if inside != "function" or node.bases or node.name in bases:
                    yield from walk(node.body, f"{prefix}{node.name}.", "class")
            else:
                for name in ("body", "orelse", "finalbody"):
                    yield from walk(getattr(node, name, []), prefix, inside)
                for handler in getattr(node, "handlers", []):
                    yield from walk(handler.body, prefix, inside)

    return walk(tree.body, "", "module")


def dotted(node: ast.expr) -> tuple[str, ...] | None:
    """Return the names of ``a.b.c``; None for any other expression."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return (*base, node.attr) if base else None
    return None


def bound_names(node: FunctionNode) -> set[str]:
    """Return the names bound anywhere in a function, including its arguments."""
    inside = [inner for inner in ast.walk(node) if inner is not node]
    declared = {name for inner in inside if isinstance(inner, ast.Global) for name in inner.names}
    return {name for inner in inside for name in _bound_by(inner)} - declared


def _bound_by(node: ast.AST) -> list[str]:
    """Return the names that a node itself binds, without its children."""
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


def _constant_texts(node: FunctionNode) -> dict[str, str]:
    """Return the local names with a single binding to a string literal, and the string."""
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
    """Return whether an expression is the module or class named ``first``, or the class of ``first``.

    ``super()`` is not: Dynamo cannot resolve ``super().f`` without calling it, and would compile another function than
    Python runs.
    """
    if isinstance(node, ast.Name):
        return node.id == first
    if isinstance(node, ast.Attribute):
        return node.attr == "__class__" and is_own(node.value, first)
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "type"


def is_literal(node: ast.expr) -> bool:
    """Return whether an operand cannot be a tensor, so that ``+`` adds numbers or joins texts, tuples or lists."""
    literals = (ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.ListComp, ast.Compare)
    return isinstance(node, (literals, FORMATTED)) or (isinstance(node, ast.UnaryOp) and is_literal(node.operand))


class Scope:
    """Names that the source of one function can use.

    Attributes:
        locals: names bound in the function, which hide globals of the same name.
    """

    def __init__(self, node: FunctionNode, namespace: Mapping[str, Any]) -> None:
        self.locals = bound_names(node)
        self._node = node
        self._namespace = namespace

    def resolve(self, node: ast.expr) -> object:
        """Return the object of a dotted name; None if the source does not determine it."""
        if isinstance(node, ast.Name):
            return None if node.id in self.locals else self._namespace.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self.resolve(node.value)
            if isinstance(base, type) and issubclass(base, Tensor):
                return getattr(base, node.attr, None)
            if isinstance(base, OpOverloadPacket):
                # An overload of an operator, as in torch.ops.aten.mm.default.
                return getattr(base, node.attr, None)
            # The module's own dictionary, because getattr on a lazy module imports much of a library.
            return base.__dict__.get(node.attr) if isinstance(base, types.ModuleType) else None
        return None

    def global_name(self, node: ast.expr) -> tuple[str, ...] | None:
        """Return the names of ``a.b.c`` if ``a`` is not local; None for any other expression."""
        names = dotted(node)
        return None if names is None or names[0] in self.locals else names

    def asks_for_type(self, node: ast.Call) -> bool:
        if not isinstance(node.func, ast.Name) or node.func.id != "type" or node.func.id in self.locals:
            return False
        return self._namespace.get("type", type) is type and len(node.args) == 1 and not node.keywords

    def text_of_first(self, node: ast.AST) -> str:
        """Return the string that a call's first argument is, as a literal or a constant; otherwise empty."""
        first = node.args[0] if isinstance(node, ast.Call) and node.args else None
        if isinstance(first, ast.Name):
            texts: Mapping[str, Any] = _constant_texts(self._node) if first.id in self.locals else self._namespace
            value = texts.get(first.id)
        else:
            value = first.value if isinstance(first, ast.Constant) else None
        return value if isinstance(value, str) else ""


# Names in rewritten source, which must not collide with names of users.
LIVE = "_quantizer_live"
NOW = "_quantizer_now"

_INNERMOST = 1 << 20
"""Depth of a name: all other edits at its position are around it."""

_SHARED = ("torch",)
"""Packages whose globals nobody rebinds."""


def live_edits(
    node: FunctionNode, index: LineIndex, namespace: Mapping[str, Any], bound: Collection[str]
) -> list[Edit]:
    """Return the edits that make a function read and write its globals in their original module."""
    if str(namespace.get("__name__", "")).partition(".")[0] in _SHARED:
        return []
    edits: list[Edit] = []
    inside = [*ast.walk(node)]
    hidden = {*bound, *(parameter.name for inner in inside for parameter in getattr(inner, "type_params", ()))}
    # Without declarations of inner functions, see ``why_not_live``.
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
    """Return why the globals that a function declares cannot be written in place; None if they can."""
    inner = [child for statement in node.body for child in ast.walk(statement)]
    declared = _declared(inner)
    if not declared:
        return None
    own = {id(statement) for statement in _own_statements(node.body)}
    if any(isinstance(child, ast.Global) and id(child) not in own for child in inner):
        return ReasonCode.INNER_GLOBAL.text()
    for child in inner:
        names = _bound_otherwise(child) & declared
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
    return {name for node in nodes if isinstance(node, ast.Global) for name in node.names}


def _own_statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of a function, without nested functions and classes."""
    statements: list[ast.stmt] = []
    waiting: list[ast.AST] = list(body)
    while waiting:
        current = waiting.pop()
        if isinstance(current, ast.stmt):
            statements.append(current)
        if not isinstance(current, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            waiting += ast.iter_child_nodes(current)
    return statements


def _names(nodes: list[ast.stmt]) -> Iterator[ast.Name]:
    """Yield the names in statements, except in classes, f-strings and t-strings, whose source is not rewritten."""
    waiting: list[ast.AST] = list(nodes)
    while waiting:
        current = waiting.pop()
        if isinstance(current, ast.Name):
            yield current
        elif not isinstance(current, (ast.ClassDef, *FORMATTED)):
            waiting += ast.iter_child_nodes(current)
