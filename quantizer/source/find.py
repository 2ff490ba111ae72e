"""Finding quantizable calls in a parsed file."""

from __future__ import annotations

import ast
import types
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from typing import Any
from typing import Literal

from quantizer.source import einsum
from quantizer.source.catalogue import CATALOGUE
from quantizer.source.catalogue import Operation
from quantizer.source.catalogue import operation_of
from quantizer.source.splice import Edit
from quantizer.source.splice import LineIndex
from quantizer.source.splice import find_symbol

__all__ = ["Form", "FunctionSource", "SiteSource", "find_functions"]

Form = Literal["call", "method", "operator", "inplace"]

_METHODS = {method: entry for entry in CATALOGUE for method in entry.methods}
_OPERATORS = {operator: entry for entry in CATALOGUE for operator in entry.operators}
_SYMBOLS = {"MatMult": b"@", "Add": b"+"}
_FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
# Nodes that bind a name without a Name node.
_NAMED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteSource:
    """One quantizable call in the text of a function.

    ``name`` is ``FUNCTION.OPERATION_N``, counted in the order of the text, so that saved ranges survive an update of
    the library that moves lines. ``reason`` says why the text cannot be rewritten here (None: it can); ``equation``
    is that of an einsum.
    """

    name: str
    operation: str
    form: Form
    file: str
    line: int
    reason: str | None = None
    edits: tuple[Edit, ...] = ()
    equation: str = ""

    @property
    def attribute(self) -> str:
        """The attribute of the host module that holds the site; rewritten text calls it."""
        return "site_" + self.name.replace(".", "_")


@dataclass(kw_only=True, slots=True)
class FunctionSource:
    """A module-level function or a method, with what was found in it.

    ``key`` is (qualified name, first line), as in its code object; ``host`` the name of the argument that is the
    module (None: no such argument); ``globals_read`` and ``attributes_read`` the names that its text mentions.
    """

    key: tuple[str, int]
    host: str | None
    why_no_host: str | None
    sites: list[SiteSource] = field(default_factory=list)
    globals_read: set[str] = field(default_factory=set)
    attributes_read: set[str] = field(default_factory=set)


def find_functions(
    tree: ast.Module, index: LineIndex, namespace: Mapping[str, Any], file: str
) -> dict[tuple[str, int], FunctionSource]:
    """All module-level functions and all methods of a file, by key.

    Args:
        tree: the parsed file.
        index: byte offsets of its lines.
        namespace: the globals its functions run in; names are resolved through it.
        file: the file's name, for reports.
    """
    found: dict[tuple[str, int], FunctionSource] = {}

    def walk(body: list[ast.stmt], prefix: str, inside: Literal["module", "class", "function"]) -> None:
        for node in body:
            if isinstance(node, _FunctionNode):
                # What a function makes is part of it, except for the methods of a class.
                if inside != "function":
                    source = _scan_function(node, prefix + node.name, inside == "class", index, namespace, file)
                    found[source.key] = source
                walk(node.body, f"{prefix}{node.name}.<locals>.", "function")
            elif isinstance(node, ast.ClassDef):
                walk(node.body, f"{prefix}{node.name}.", "class")
            else:
                for name in ("body", "orelse", "finalbody"):
                    walk(getattr(node, name, []), prefix, inside)
                for handler in getattr(node, "handlers", []):
                    walk(handler.body, prefix, inside)

    walk(tree.body, "", "module")
    return found


def _scan_function(
    node: _FunctionNode, qualname: str, in_class: bool, index: LineIndex, namespace: Mapping[str, Any], file: str
) -> FunctionSource:
    first_line = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    host, why = _host(node, in_class)
    source = FunctionSource(key=(qualname, first_line), host=host, why_no_host=why)
    _Finder(source, node, index, namespace, file).run()
    return source


def _host(node: _FunctionNode, in_class: bool) -> tuple[str | None, str | None]:
    """The argument that holds the module, or why there is none."""
    arguments = [*node.args.posonlyargs, *node.args.args]
    if not arguments:
        return None, "the function has no module argument"
    first = arguments[0]
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    if in_class:
        if decorators & {"staticmethod", "classmethod"}:
            return None, "a static or class method has no module argument"
    else:
        annotation = ast.unparse(first.annotation) if first.annotation is not None else ""
        if first.arg not in ("module", "self") and annotation.rpartition(".")[2].strip("\"'") != "Module":
            return None, "the function has no module argument"
    if any(isinstance(n, ast.Name) and n.id == first.arg and not isinstance(n.ctx, ast.Load) for n in ast.walk(node)):
        return None, f"the function assigns to its argument {first.arg!r}"
    return first.arg, None


class _Finder(ast.NodeVisitor):
    """Walks one function and records its sites.

    Attributes:
        source: where sites and global names are recorded.
        locals: names bound in the function; they hide globals of the same name.
        counts: how many sites of each operation were seen so far; gives the ordinal in a site's name.
        depth: nesting of the current expression; orders edits that fall on one place.
        blocked: why text at the current node cannot be rewritten (None: it can); set inside f-strings and where an
            inner function hides the host.
    """

    def __init__(
        self,
        source: FunctionSource,
        node: _FunctionNode,
        index: LineIndex,
        namespace: Mapping[str, Any],
        file: str,
    ) -> None:
        self.source = source
        self.node = node
        self.index = index
        self.namespace = namespace
        self.file = file
        self.locals = _bound_names(node)
        self.counts: dict[str, int] = {}
        self.depth = 0
        self.blocked: str | None = None

    def run(self) -> None:
        """Visit the body (not the decorators or defaults, which run at definition)."""
        for statement in self.node.body:
            self.visit(statement)

    # -- what changes the state ------------------------------------------------------------------------------------

    def generic_visit(self, node: ast.AST) -> None:
        self.depth += 1
        super().generic_visit(node)
        self.depth -= 1

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._visit_blocked(node, "inside an f-string: positions are not reliable there")

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_blocked(node, "inside a class defined in a function")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_inner(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_inner(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit_inner(node)

    def _visit_inner(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        if any(argument.arg == self.source.host for argument in arguments):
            self._visit_blocked(node, "an inner function hides the module argument")
        else:
            self.generic_visit(node)

    def _visit_blocked(self, node: ast.AST, why: str) -> None:
        before, self.blocked = self.blocked, self.blocked or why
        self.generic_visit(node)
        self.blocked = before

    # -- what is recorded ------------------------------------------------------------------------------------------

    def visit_Name(self, node: ast.Name) -> None:
        if node.id not in self.locals:
            self.source.globals_read.add(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.source.attributes_read.add(node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        entry = operation_of(self._resolve(node.func))
        if entry is not None:
            self._record_call(node, entry)
        elif isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
            base = self._resolve(node.func.value)
            if not isinstance(base, types.ModuleType):
                self._record_method(node, node.func, _METHODS[node.func.attr])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        operator = type(node.op).__name__
        if operator in _OPERATORS and not (_is_literal(node.left) or _is_literal(node.right)):
            start, end = self.index.end(node.left), self.index.start(node.right)
            symbol = _SYMBOLS[operator]
            gap = find_symbol(self.index.data, symbol, start, end)
            if gap is not None:
                spaced = self.index.data[max(gap - 1, start) : min(gap + 2, end)] == b" " + symbol + b" "
                comma = Edit.replacing(gap - 1, 3, ", ") if spaced else Edit.replacing(gap, len(symbol), ",")
                self._record(_OPERATORS[operator], "operator", node, (comma,))
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        operator = type(node.op).__name__
        if operator in _OPERATORS and not _is_literal(node.value):
            self._record_inplace(node, operator)
        self.generic_visit(node)

    def _record_call(self, node: ast.Call, entry: Operation) -> None:
        """``f(a, b)`` becomes ``host.site(f, a, b)``."""
        reason = None
        if any(keyword.arg == "out" for keyword in node.keywords):
            reason = "out= writes into a tensor of the caller"
        elif entry.equation:
            reason = einsum.problem(node)
        opening = find_symbol(self.index.data, b"(", self.index.end(node.func), self.index.end(node))
        if opening is None or not (node.args or node.keywords):
            return
        self._record(entry, "call", node, (Edit.replacing(opening, 1, ", "),), reason, closed=True)

    def _record_method(self, node: ast.Call, func: ast.Attribute, entry: Operation) -> None:
        """``a.matmul(b)`` becomes ``host.site(a, b)``."""
        data = self.index.data
        dot = find_symbol(data, b".", self.index.end(func.value), self.index.end(func))
        opening = find_symbol(data, b"(", self.index.end(func), self.index.end(node))
        if dot is None or opening is None or not (node.args or node.keywords):
            return
        between = data[dot : opening + 1]
        if b"\n" in between or b"#" in between:
            self._record(entry, "method", node, (), "the method's name stands on a line of its own", closed=True)
            return
        self._record(entry, "method", node, (Edit.replacing(dot, len(between), ", "),), closed=True)

    def _record_inplace(self, node: ast.AugAssign, operator: str) -> None:
        """``x += y`` becomes ``x = host.site(x, y)``; the site applies the in-place operator, so aliases stay true."""
        entry = _OPERATORS[operator]
        if not isinstance(node.target, ast.Name):
            self._record(entry, "inplace", node, (), "in-place on an attribute or an item")
            return
        symbol = _SYMBOLS[operator] + b"="
        place = find_symbol(self.index.data, symbol, self.index.end(node.target), self.index.start(node.value))
        if place is None:
            self._record(entry, "inplace", node, (), "the operator's place was not found")
            return
        name = self._next_name(entry)
        site = self._site(name, entry, "inplace", node)
        text = f"= {self.source.host}.{site.attribute}({node.target.id},"
        edits = (
            Edit.replacing(place, len(symbol), text),
            Edit.closing(self.index.end(node), ")", self.depth),
        )
        self._append(site, edits, None)

    def _record(
        self,
        entry: Operation,
        form: Form,
        node: ast.expr | ast.stmt,
        inner: tuple[Edit, ...],
        reason: str | None = None,
        closed: bool = False,
    ) -> None:
        """Record a site whose text is wrapped. ``closed``: the expression ends with its own parenthesis already."""
        site = self._site(self._next_name(entry), entry, form, node)
        edits = (Edit.opening(self.index.start(node), f"{self.source.host}.{site.attribute}(", self.depth), *inner)
        if not closed:
            edits = (*edits, Edit.closing(self.index.end(node), ")", self.depth))
        self._append(site, edits, reason)

    def _next_name(self, entry: Operation) -> str:
        ordinal = self.counts.get(entry.name, 0)
        self.counts[entry.name] = ordinal + 1
        return f"{self.source.key[0].rpartition('.')[2]}.{entry.name}_{ordinal}"

    def _site(self, name: str, entry: Operation, form: Form, node: ast.expr | ast.stmt) -> SiteSource:
        made = SiteSource(name=name, operation=entry.name, form=form, file=self.file, line=node.lineno)
        return replace(made, equation=einsum.equation_of(node)) if entry.equation else made

    def _append(self, site: SiteSource, edits: tuple[Edit, ...], reason: str | None) -> None:
        reason = reason or self.blocked or self.source.why_no_host
        self.source.sites.append(replace(site, reason=reason, edits=() if reason else edits))

    def _resolve(self, node: ast.expr) -> object:
        """The object that a dotted name stands for; None where that cannot be told from the text."""
        if isinstance(node, ast.Name):
            return None if node.id in self.locals else self.namespace.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self._resolve(node.value)
            # The module's own dictionary: getattr on a lazy module would import half a library.
            return base.__dict__.get(node.attr) if isinstance(base, types.ModuleType) else None
        return None


def _bound_names(node: _FunctionNode) -> set[str]:
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


def _is_literal(node: ast.expr) -> bool:
    """An operand that cannot be a tensor: then the ``+`` joins numbers, texts, tuples or lists."""
    literals = (ast.Constant, ast.JoinedStr, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.ListComp, ast.Compare)
    return isinstance(node, literals) or (isinstance(node, ast.UnaryOp) and _is_literal(node.operand))
