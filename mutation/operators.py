"""Mutations beside those of Cosmic Ray: a statement, a keyword or a filter left out, a function for its opposite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import parso
from cosmic_ray.operators.operator import Example, Operator

__all__ = ["PROVIDER"]

_PAIRS = (
    ("all", "any"),
    ("amax", "amin"),
    ("ceil", "floor"),
    ("inf", "nan"),
    ("max", "min"),
    ("maximum", "minimum"),
    ("ones", "zeros"),
    ("ones_like", "zeros_like"),
)
_OPPOSITE = {name: other for pair in _PAIRS for name, other in (pair, pair[::-1])}
_KEYWORD = 3
"""name=value: so many children has a keyword argument."""


def _place(node: Any) -> Iterator[tuple[Any, Any]]:
    yield node.start_pos, node.end_pos


def _like(node: Any, code: str) -> Any:
    """Parsed code with the white space that stood before ``node``."""
    return parso.parse(node.get_first_leaf().prefix + code)


class DropStatement(Operator):
    """A call that stands as a statement does not happen."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if node.type in ("atom_expr", "power") and node.parent.type == "simple_stmt":
            yield from _place(node)

    def mutate(self, node: Any, index: int) -> Any:
        return _like(node, "pass")

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("x.append(1)\n", "pass\n"),)


class DropKeyword(Operator):
    """A keyword argument is not passed."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if node.type == "argument" and len(node.children) == _KEYWORD and node.children[1].value == "=":
            yield from _place(node)

    def mutate(self, node: Any, index: int) -> Any:
        return _like(node, "**{}")

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("f(1, a=2)", "f(1, **{})"),)


class SwapFunction(Operator):
    """A function becomes its opposite: max for min, any for all."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if node.type == "name" and node.value in _OPPOSITE and node.parent.type not in ("param", "argument"):
            yield from _place(node)

    def mutate(self, node: Any, index: int) -> Any:
        node.value = _OPPOSITE[node.value]
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("max(a, b)", "min(a, b)"),)


class NegateFilter(Operator):
    """The filter of a comprehension keeps what it left out."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if node.type == "comp_if":
            yield from _place(node.children[1])

    def mutate(self, node: Any, index: int) -> Any:
        node.children[1] = parso.parse(f" not ({node.children[1].get_code().strip()})")
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("[a for a in b if a]", "[a for a in b if not (a)]"),)


PROVIDER: dict[str, type[Operator]] = {
    operator.__name__: operator for operator in (DropStatement, DropKeyword, SwapFunction, NegateFilter)
}
