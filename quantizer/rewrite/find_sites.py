"""Search for quantizable calls in the syntax tree of a file."""

from __future__ import annotations

import ast
import types
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantizer.plan.reasons import ReasonCode
from quantizer.rewrite import product_sizes as einsum
from quantizer.rewrite.host_argument import PASS_HOST, TAKES_APART, VISIBLE, WRITTEN_CLASS, function_source, hands_on
from quantizer.rewrite.names import FunctionNode, Scope, functions_in, is_literal, is_own, live_edits, why_not_live
from quantizer.rewrite.operations import METHODS, OPERATORS, Operation, is_fast_path_switch, operation_of
from quantizer.rewrite.source_sites import Form, FunctionSource, HelperCall, SiteSource
from quantizer.rewrite.text_edits import Edit, LineIndex, find_symbol

_SYMBOLS = {"MatMult": b"@", "Add": b"+", "Mult": b"*"}
_CHILDREN = frozenset({"children", "named_children", "modules", "named_modules"})  # methods that yield children


def find_functions(
    tree: ast.Module,
    index: LineIndex,
    namespace: Mapping[str, Any],
    file: str,
    qualified: bool = False,
    codes: Mapping[tuple[str, int], types.CodeType] = types.MappingProxyType({}),
) -> dict[tuple[str, int], FunctionSource]:
    """Return all module-level functions and all methods of a file, by key."""
    functions: dict[tuple[str, int], FunctionSource] = {}
    for qualname, node, owner in functions_in(tree):
        source = function_source(node, qualname, owner, index)
        unlive = why_not_live(node)
        source.why_no_host = source.why_no_host or unlive
        outer = owner or str(namespace.get("__name__", "")).rpartition(".")[2]
        name = f"{outer}.{node.name}" if qualified else node.name
        finder = _Finder(source, node, index, namespace, file, owner, name)
        if unlive is None and source.key in codes:
            source.live = live_edits(node, index, namespace, {*finder.scope.locals, *codes[source.key].co_freevars})
        finder.run()
        functions[source.key] = source
    return functions


class _Finder(ast.NodeVisitor):
    """Visitor of one function that records its sites."""

    def __init__(
        self,
        source: FunctionSource,
        node: FunctionNode,
        index: LineIndex,
        namespace: Mapping[str, Any],
        file: str,
        owner: str | None,
        name: str,
    ) -> None:
        self.source = source
        self.owner = owner
        self.name = name
        self.node = node
        self.index = index
        self.scope = Scope(node, namespace)
        self.file = file
        self.counts: dict[str, int] = {}
        self.depth = 0
        self.blocked: str | None = None
        self.known: set[int] = set()
        self.looked_into: set[int] = set()
        arguments = [*node.args.posonlyargs, *node.args.args]
        self._first = arguments[0].arg if owner is not None and arguments else source.host

    def run(self) -> None:
        """Visit the body, but not decorators and defaults, which run at definition."""
        for statement in self.node.body:
            self.visit(statement)

    # -- nodes that change the state -------------------------------------------------------------------------------

    def generic_visit(self, node: ast.AST) -> None:
        self.depth += 1
        super().generic_visit(node)
        self.depth -= 1

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._visit_blocked(node, ReasonCode.IN_F_STRING.text())

    # A t-string of Python 3.14 has the source of its expressions as attributes.
    visit_TemplateStr = visit_JoinedStr

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_blocked(node, ReasonCode.IN_INNER_CLASS.text())

    def _visit_inner(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        if any(argument.arg == self.source.host for argument in arguments):
            self._visit_blocked(node, ReasonCode.HIDDEN_MODULE.text(name=repr(self.source.host)))
        else:
            self.generic_visit(node)

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _visit_inner

    def _visit_blocked(self, node: ast.AST, why: str) -> None:
        before, self.blocked = self.blocked, self.blocked or why
        self.generic_visit(node)
        self.blocked = before

    # -- nodes that are recorded -----------------------------------------------------------------------------------

    def visit_Name(self, node: ast.Name) -> None:
        if node.id not in self.scope.locals:
            self.source.globals_read.add(node.id)
            if id(node) not in self.known:
                self.source.values_read.add((node.id,))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.source.attributes_read.add(node.attr)
        if id(node) not in self.known:
            if (names := self.scope.global_name(node)) is not None:
                self.source.values_read.add(names)
            if node.attr == "_modules" and isinstance(node.ctx, ast.Load):
                self._hide_sites(node)
        if isinstance(node.ctx, ast.Load):
            if node.attr == "__class__":
                self._name_written_class(node)
            if not node.attr.startswith("__"):
                self.looked_into.add(id(node.value))
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.ctx, ast.Load):
            self._record_item(node, node.value)
        else:
            # A write must reach the module's own dictionary.
            self.known.add(id(node.value))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = self.scope.resolve(node.func)
        entry = operation_of(called)
        if self.scope.asks_for_type(node):
            self._name_written_class(node)
        if entry is not None:
            self._record_call(node, entry)
        elif isinstance(node.func, ast.Attribute) and self._may_be_of_tensor(node, node.func):
            self._record_method(node, node.func, METHODS[node.func.attr])
        else:
            if isinstance(node.func, ast.Attribute) and node.func.attr == "get":
                self._record_item(node, node.func.value)
            self._record_helper(node.func)
            if hands_on(called) or (isinstance(node.func, ast.Name) and node.func.id == "map"):
                for argument in node.args:
                    self._record_helper(argument)
            if isinstance(node.func, ast.Attribute) and node.func.attr in _CHILDREN:
                self._hide_sites(node)
            elif self.source.is_method and is_fast_path_switch(called):
                self._stay_in_python(node)
        self.generic_visit(node)

    def _may_be_of_tensor(self, node: ast.Call, func: ast.Attribute) -> bool:
        """Return whether a call may be a ``Tensor`` method of the catalogue, not a function of a module or set."""
        if func.attr not in METHODS or id(node) in self.known or is_own(func.value, self._first):
            return False
        return not isinstance(self.scope.resolve(func.value), types.ModuleType)

    def visit_Expr(self, node: ast.Expr) -> None:
        called = node.value.func if isinstance(node.value, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr == "add" and not operation_of(self.scope.resolve(called)):
            # ``add`` with an unused result adds to a set.
            self.known.add(id(node.value))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        operator = type(node.op).__name__
        if operator in OPERATORS and not (is_literal(node.left) or is_literal(node.right)):
            comma = self.index.operator_as_comma(node, _SYMBOLS[operator])
            if comma is not None:
                self._record(OPERATORS[operator], "operator", node, (comma,))
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        operator = type(node.op).__name__
        if operator in OPERATORS and not is_literal(node.value):
            self._record_inplace(node, operator)
        self.generic_visit(node)

    def _record_helper(self, func: ast.expr) -> None:
        """Record ``f(a)``, which may become ``_quantizer_lend(f, host)(a)``."""
        if isinstance(func, ast.Attribute) and is_own(func.value, self._first):
            # Python mangles the private names of a class.
            private = self.owner is not None and func.attr.startswith("__") and not func.attr.endswith("__")
            target: tuple[str, ...] | None = (f"_{str(self.owner).lstrip('_')}{func.attr}" if private else func.attr,)
            of_class = True
        else:
            target, of_class = self.scope.global_name(func), False
        if target is not None:
            self._record_host_call(func, func, self.depth + 1, target=target, of_class=of_class)

    def _record_item(self, node: ast.expr, registry: ast.expr) -> None:
        """Record ``FUNCTIONS[name]``, which may become ``_quantizer_lend(FUNCTIONS[name], host)``."""
        if (target := self.scope.global_name(registry)) is not None:
            self._record_host_call(node, registry, self.depth, target=target, item=True)

    def _record_host_call(self, node: ast.expr, named: ast.expr, depth: int, **fields: Any) -> None:
        if self.blocked is not None or self.source.host is None:
            return
        self.known.add(id(named))
        edits = self.index.around(node, f"{PASS_HOST}(", f", {self.source.host})", depth)
        self.source.calls.append(HelperCall(edits=edits, **fields))

    def _wrap_view(self, node: ast.expr, before: str, behind: str = ")") -> None:
        if self.blocked is None:
            self.source.views += self.index.around(node, before, behind, self.depth)

    def _hide_sites(self, node: ast.expr) -> None:
        """Rewrite ``self.children()`` as ``_quantizer_visible(self.children())``."""
        self._wrap_view(node, f"{VISIBLE}(")

    def _name_written_class(self, node: ast.expr) -> None:
        """Rewrite ``type(x)`` as ``_quantizer_written_class(type(x))``, and likewise ``x.__class__``."""
        if id(node) not in self.looked_into:
            self._wrap_view(node, f"{WRITTEN_CLASS}(")

    def _stay_in_python(self, node: ast.Call) -> None:
        """Rewrite ``get_fastpath_enabled()`` as ``(get_fastpath_enabled() and not _quantizer_takes_apart(self))``."""
        self._wrap_view(node, "(", f" and not {TAKES_APART}({self.source.host}))")

    def _record_call(self, node: ast.Call, entry: Operation) -> None:
        """Record ``f(a, b)``, which becomes ``host.site(f, a, b)``."""
        reason = None
        if any(keyword.arg == "out" for keyword in node.keywords):
            reason = ReasonCode.OUT_ARGUMENT.text()
        elif entry.equation:
            reason = einsum.problem(node, self.scope.text_of_first(node))
        opening = find_symbol(self.index.data, b"(", self.index.end(node.func), self.index.end(node))
        if opening is None or not (node.args or node.keywords):
            return
        inner: tuple[Edit, ...] = (Edit.replacing(opening, 1, ", "),)
        if entry.equation and reason is None and len(node.args) == 2:
            # Both operands are in one list: ``f(e, (a, b))`` becomes ``host.site(f, e, *(a, b))``.
            comma = find_symbol(self.index.data, b",", self.index.end(node.args[0]), self.index.start(node.args[1]))
            assert comma is not None
            spaced = self.index.data[comma + 1 : comma + 2] == b" "
            inner = (*inner, Edit.opening(comma + 1 + spaced, "*", self.depth))
        self._record(entry, "call", node, inner, reason, closed=True)

    def _record_method(self, node: ast.Call, func: ast.Attribute, entry: Operation) -> None:
        """Record ``a.matmul(b)``, which becomes ``host.site(a, b)``."""
        data = self.index.data
        dot = find_symbol(data, b".", self.index.end(func.value), self.index.end(func))
        opening = find_symbol(data, b"(", self.index.end(func), self.index.end(node))
        if dot is None or opening is None or not (node.args or node.keywords or entry.is_place):
            return
        between = data[dot : opening + 1]
        if b"\n" in between or b"#" in between:
            self._record(entry, "method", node, (), ReasonCode.METHOD_APART.text(), closed=True)
            return
        self._record(entry, "method", node, (Edit.replacing(dot, len(between), ", "),), closed=True)

    def _record_inplace(self, node: ast.AugAssign, operator: str) -> None:
        """Record ``x += y``, which becomes ``x = host.site(x, y)``; the site works in place, so aliases stay valid."""
        entry = OPERATORS[operator]
        if not isinstance(node.target, ast.Name) or node.target.id not in self.scope.locals:
            owner = "a global" if isinstance(node.target, ast.Name) else "an attribute or an item"
            self._record(entry, "inplace", node, (), ReasonCode.IN_PLACE.text(where=owner))
            return
        symbol = _SYMBOLS[operator] + b"="
        place = find_symbol(self.index.data, symbol, self.index.end(node.target), self.index.start(node.value))
        if place is None:
            self._record(entry, "inplace", node, (), ReasonCode.NO_OPERATOR.text())
            return
        site = self._site(self._next_name(entry), entry, "inplace", node)
        text = f"= {self.source.host}.{site.attribute}({node.target.id},"
        edits = (Edit.replacing(place, len(symbol), text), Edit.closing(self.index.end(node), ")", self.depth))
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
        """Record a site whose text is wrapped; ``closed``: the expression already ends with its own parenthesis."""
        site = self._site(self._next_name(entry), entry, form, node)
        edits = (Edit.opening(self.index.start(node), f"{self.source.host}.{site.attribute}(", self.depth), *inner)
        if not closed:
            edits = (*edits, Edit.closing(self.index.end(node), ")", self.depth))
        self._append(site, edits, reason)

    def _next_name(self, entry: Operation) -> str:
        ordinal = self.counts.get(entry.name, 0)
        self.counts[entry.name] = ordinal + 1
        return f"{self.name}.{entry.name}_{ordinal}"

    def _site(self, name: str, entry: Operation, form: Form, node: ast.expr | ast.stmt) -> SiteSource:
        called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
        counts = isinstance(node, ast.Call) and entry.kind == "residual_add" and any(map(is_literal, node.args))
        site = SiteSource(name=name, operation=entry.name, form=form, file=self.file, line=node.lineno, called=called)
        return replace(site, counts=counts, equation=self.scope.text_of_first(node) if entry.equation else "")

    def _append(self, site: SiteSource, edits: tuple[Edit, ...], reason: str | None) -> None:
        reason = reason or self.blocked or self.source.why_no_host
        self.source.sites.append(replace(site, reason=reason, edits=() if reason else edits))
