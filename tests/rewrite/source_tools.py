"""Rewriting small texts, and undoing a rewrite in the syntax tree, independently of the code under test."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from quantizer.rewrite.host_argument import HOST, PASS_HOST, TAKES_APART, VISIBLE, WRITTEN_CLASS
from quantizer.rewrite.names import LIVE, NOW
from quantizer.rewrite.source_file import SourceFile
from quantizer.rewrite.source_sites import FunctionSource, SiteSource

NAMESPACE = {"__name__": "sample", "torch": torch, "nn": torch.nn, "F": functional}

_OPERATORS = {"matmul": ast.MatMult, "add": ast.Add, "mul": ast.Mult}


def source_file(folder: Path, text: str, namespace: dict[str, Any] | None = None) -> SourceFile:
    """A file with this text, searched."""
    path = folder / f"sample_{abs(hash(text))}.py"
    path.write_bytes(textwrap.dedent(text).encode())
    return SourceFile(str(path), {**NAMESPACE, **(namespace or {})})


def rewritten_body(folder: Path, body: str, arguments: str = "self, a, b, c", **namespace: Any) -> str:
    """The body of ``forward(arguments)`` as it is rewritten.

    Names of sites are shortened to ``s.matmul_0``, and globals have their own.
    """
    text = f"def forward({arguments}):\n{textwrap.indent(body, '    ')}\n"
    file = source_file(folder, text, namespace)
    result = file.rewritten_text()
    assert result.count("\n") == text.count("\n")
    compile(result, "result", "exec")
    assert stripped(file) == ast.dump(ast.parse(text))
    shortened = without_live(textwrap.dedent(result.partition("\n")[2].rstrip("\n")))
    return shortened.replace("self.site_forward_", "s.")


def without_live(text: str) -> str:
    """The text with globals by their own names."""
    return re.sub(rf"{LIVE}\.(\w+)", r"\1", re.sub(rf"{NOW}\({LIVE}\.(\w+)\)", r"\1", text))


def sites_of(file: SourceFile) -> list[SiteSource]:
    """All sites of a file, in the order of its functions."""
    return [site for function in file.functions.values() for site in function.sites]


def stripped(file: SourceFile) -> str:
    """The tree of the rewritten text with every inserted call undone, as a dump without positions."""
    tree = _Strip(file.functions).visit(ast.parse(file.rewritten_text()))
    assert not any(isinstance(node, ast.Name) and node.id.startswith("_quantizer") for node in ast.walk(tree))
    return ast.dump(tree)


class _Strip(ast.NodeTransformer):
    """Undoes inserted calls.

    Attributes:
        functions: what was found.
        scope: segments of the qualified name so far, and whether each is a function.
        current: the registered function around the current node.
        undone: names of the sites seen.
    """

    def __init__(self, functions: dict[tuple[str, int], FunctionSource]) -> None:
        self.functions = functions
        self.scope: list[str] = []
        self.current: FunctionSource | None = None

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._inside(node, [node.name], self.current)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        found = self.functions.get((".".join([*self.scope, node.name]), first))
        return self._inside(node, [node.name, "<locals>"], found or self.current)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == LIVE:
            return ast.Name(id=node.attr, ctx=node.ctx)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        last = node.values[-1]
        apart = last.operand if isinstance(last, ast.UnaryOp) else None
        if isinstance(apart, ast.Call) and isinstance(apart.func, ast.Name) and apart.func.id == TAKES_APART:
            return node.values[0]
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def _inside(self, node: Any, names: list[str], current: FunctionSource | None) -> ast.AST:
        scope, before = self.scope, self.current
        self.scope, self.current = [*scope, *names], current
        result = self.generic_visit(node)
        self.scope, self.current = scope, before
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [argument.arg for argument in node.args.kwonlyargs]
            if HOST in names:
                del node.args.kwonlyargs[names.index(HOST)]
                del node.args.kw_defaults[names.index(HOST)]
        return result

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        site = self._site(node.value)
        self.generic_visit(node)
        if site is None or site.form != "inplace":
            return node
        assert isinstance(node.value, ast.Tuple)
        target, value = node.value.elts
        assert isinstance(target, ast.Name)
        assert ast.unparse(target) == ast.unparse(node.targets[0])
        operator = _OPERATORS[site.operation]()
        return ast.AugAssign(target=node.targets[0], op=operator, value=value)  # type: ignore[arg-type]

    def visit_Call(self, node: ast.Call) -> ast.AST:
        site = self._site(node)
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in (PASS_HOST, NOW, VISIBLE, WRITTEN_CLASS):
            return node.args[0]
        if site is None:
            return node
        first, *rest = node.args
        if site.form == "call":
            if site.operation == "einsum" and isinstance(rest[-1], ast.Starred):
                rest[-1] = rest[-1].value
            return ast.Call(func=first, args=rest, keywords=node.keywords)
        if site.form == "method":
            called = ast.Attribute(value=first, attr=site.called, ctx=ast.Load())
            return ast.Call(func=called, args=rest, keywords=node.keywords)
        assert len(node.args) == 2
        assert not node.keywords
        if site.form == "operator":
            return ast.BinOp(left=first, op=_OPERATORS[site.operation](), right=rest[0])
        return ast.Tuple(elts=node.args)

    def _site(self, node: ast.AST) -> SiteSource | None:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or self.current is None:
            return None
        if not isinstance(node.func.value, ast.Name) or node.func.value.id != self.current.host:
            return None
        return next((site for site in self.current.sites if site.attribute == node.func.attr and site.edits), None)
