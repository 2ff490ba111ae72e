"""Edits of source at the positions of a syntax tree, without moving a line.

Legend: an ``Edit`` replaces ``length`` bytes at byte offset ``start`` of the file. Offsets are bytes, because ``ast``
counts columns in UTF-8 bytes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass

_CLOSE = 0
_REPLACE = 1
_OPEN = 2


@dataclass(frozen=True, slots=True)
class Edit:
    """A replacement. ``order`` sorts edits at one position: closing text, then replacements, then opening text.

    ``depth`` is the nesting of the expression: at one position, an outer expression opens before and closes after an
    inner one.
    """

    start: int
    length: int
    text: str
    order: int
    depth: int

    @classmethod
    def opening(cls, start: int, text: str, depth: int) -> Edit:
        return cls(start, 0, text, _OPEN, depth)

    @classmethod
    def closing(cls, start: int, text: str, depth: int) -> Edit:
        return cls(start, 0, text, _CLOSE, -depth)

    @classmethod
    def replacing(cls, start: int, length: int, text: str) -> Edit:
        return cls(start, length, text, _REPLACE, 0)


class LineIndex:
    """Byte offsets of the lines of a source.

    Lines end only at ``\\n``: ``str.splitlines`` also splits at form feeds, which the Python grammar does not.
    """

    def __init__(self, text: str) -> None:
        self.data = text.encode()
        self._starts = [0]
        for line in self.data.split(b"\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)

    def start(self, node: ast.expr | ast.stmt | ast.arg) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt | ast.arg) -> int:
        """Return the byte offset after a node's last byte."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def around(self, node: ast.expr, before: str, behind: str, depth: int) -> tuple[Edit, Edit]:
        """Return the edits that insert text before and after an expression."""
        return Edit.opening(self.start(node), before, depth), Edit.closing(self.end(node), behind, depth)

    def operator_as_comma(self, node: ast.BinOp, symbol: bytes) -> Edit | None:
        """Return the edit that replaces an operator by a comma; None if the operator is not found."""
        start, end = self.end(node.left), self.start(node.right)
        gap = find_symbol(self.data, symbol, start, end)
        if gap is None:
            return None
        spaced = self.data[max(gap - 1, start) : min(gap + 2, end)] == b" " + symbol + b" "
        return Edit.replacing(gap - 1, 3, ", ") if spaced else Edit.replacing(gap, len(symbol), ",")


def first_line(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the first line of a function as in its code object, which includes decorators."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def find_symbol(data: bytes, symbol: bytes, start: int, end: int) -> int | None:
    """Return the offset of ``symbol`` in ``data[start:end]``, skipping comments; None if not found.

    The range is between two operands, so it contains only white space, parentheses, comments and the symbol.
    """
    position = start
    while position < end:
        if data[position : position + 1] == b"#":
            newline = data.find(b"\n", position, end)
            position = end if newline < 0 else newline
        elif data.startswith(symbol, position):
            return position
        else:
            position += 1
    return None


def apply_edits(data: bytes, edits: Iterable[Edit]) -> str:
    """Return the source with all edits applied. No edit may contain a newline, so that line numbers stay correct."""
    parts: list[bytes] = []
    position = 0
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.order, edit.depth)):
        parts.append(data[position : edit.start])
        parts.append(edit.text.encode())
        position = edit.start + edit.length
    parts.append(data[position:])
    return b"".join(parts).decode()
