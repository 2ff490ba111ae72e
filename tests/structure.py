"""Figures of the package's structure, read from its source: ``make structure`` prints them.

A room is a package or a loose module directly below ``quantizer/``, and what lies in ``plan/`` that the floor needs; an
arrow is an import from one room into another, lazy ones included.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

BOXES = {
    "FLOOR": ("errors", "utils", "numerics", "plan.targets", "plan.reasons"),
    "PROXY": ("functional", "rewrite", "proxy"),
    "OBSERVE": ("observe",),
    "PLAN": ("plan",),
    "ALGORITHMS": ("algorithms",),
    "EXPORT": ("export",),
    "CHECK": ("check",),
    "CONFIG": ("config",),
    "QUANTIZER": ("settings", "model_session", "diagnose", "quantizer"),
    "ENGINES": ("engines",),
    "TASKS": ("tasks",),
    "REPORT": ("report",),
    "PIPELINE": ("pipeline",),
    "INTEGRATIONS": ("integrations",),
    "COMMANDS": ("cli", "__main__"),
}
"""The boxes of the picture in docs/architecture.md, and the rooms in each."""

_CORE = ("FLOOR", "PROXY", "OBSERVE", "PLAN", "ALGORITHMS", "EXPORT", "CONFIG", "QUANTIZER")
ARROWS = {
    "FLOOR": (),
    "PROXY": ("FLOOR",),
    "OBSERVE": ("FLOOR", "PROXY"),
    "PLAN": ("FLOOR", "PROXY", "OBSERVE"),
    "ALGORITHMS": ("FLOOR", "PROXY", "OBSERVE", "PLAN"),
    "EXPORT": ("FLOOR", "PROXY", "OBSERVE"),
    "CHECK": ("FLOOR", "EXPORT"),
    "CONFIG": ("FLOOR",),
    "QUANTIZER": ("FLOOR", "PROXY", "OBSERVE", "PLAN", "ALGORITHMS", "EXPORT", "CONFIG", "ENGINES"),
    "ENGINES": ("FLOOR", "EXPORT"),
    "TASKS": ("FLOOR", "EXPORT"),
    "REPORT": ("FLOOR",),
    "PIPELINE": (*_CORE, "ENGINES", "TASKS", "REPORT"),
    "INTEGRATIONS": _CORE,
    "COMMANDS": (*_CORE, "CHECK", "ENGINES", "TASKS", "REPORT", "PIPELINE", "INTEGRATIONS"),
}
"""The boxes that each box may import."""

AT_THE_CALL = {("QUANTIZER", "ENGINES")}
"""Arrows of imports inside functions alone: who quantizes needs no engine until one is asked for."""

PACKAGE = Path(__file__).parents[1] / "quantizer"
FILES = sorted(PACKAGE.rglob("*.py"))


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of the package; those of several places are in descending order.

    Attributes:
        packages: folders at the top.
        rooms: packages and loose modules at the top.
        arrows: imports from one room into another, each pair counted once.
        rooms_in_a_cycle: rooms that import each other, directly or through others.
        files: how many there are.
        statements: in all files, without imports and docstrings.
        longest_function: its lines and name.
        lines: of all files together.
    """

    packages: int
    rooms: int
    arrows: int
    rooms_in_a_cycle: tuple[str, ...]
    files: int
    statements: int
    longest_function: tuple[int, str]
    lines: int


def room_of(file: Path) -> str:
    """The room of a file; empty for ``quantizer/__init__.py``."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return "" if parts == ("__init__",) else room_named(parts)


def room_named(parts: Sequence[str]) -> str:
    """The room of a dotted name below ``quantizer``."""
    two = ".".join(parts[:2])
    return two if any(two in rooms for rooms in BOXES.values()) else parts[0]


@cache
def imports(file: Path) -> tuple[tuple[int, str], ...]:
    """Line and dotted name of everything a file imports, type-checking blocks left out."""
    return tuple(_imports(file))


def _imports(file: Path) -> Iterator[tuple[int, str]]:
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            skipped |= {id(inner) for inner in ast.walk(node)}
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative imports are not used"
            module = node.module or ""
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def _arrows() -> dict[str, set[str]]:
    """The rooms that each room imports."""
    found: dict[str, set[str]] = {room_of(file): set() for file in FILES if room_of(file)}
    for file in FILES:
        for _, name in imports(file):
            parts = [*name.split("."), ""]
            if room_of(file) and parts[0] == "quantizer" and (room := room_named(parts[1:])) in found:
                found[room_of(file)] |= {room} - {room_of(file)}
    return found


def _cycles(graph: dict[str, set[str]]) -> list[str]:
    """What remains when rooms without arrows inwards, or without arrows outwards, are taken away again and again."""
    rooms = dict(graph)
    while True:
        inward = {target for room, targets in rooms.items() for target in targets & rooms.keys()}
        ends = {room for room, targets in rooms.items() if room not in inward or not targets & rooms.keys()}
        if not ends:
            return sorted(rooms)
        rooms = {room: targets for room, targets in rooms.items() if room not in ends}


def _lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def _statements(file: Path) -> int:
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return sum(isinstance(node, ast.stmt) and not _says_nothing(node) for node in nodes)


def _says_nothing(node: ast.stmt) -> bool:
    """Whether a statement is an import or a text."""
    return isinstance(node, ast.Import | ast.ImportFrom) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )


def _longest_function() -> tuple[int, str]:
    return max(
        ((node.end_lineno or 0) - node.lineno + 1, f"{file.relative_to(PACKAGE)}: {node.name}")
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def figures() -> Figures:
    """Return the figures of the package, read from its source."""
    graph = _arrows()
    return Figures(
        packages=len({file.relative_to(PACKAGE).parts[0] for file in FILES if file.parent != PACKAGE}),
        rooms=len(graph),
        arrows=sum(map(len, graph.values())),
        rooms_in_a_cycle=tuple(_cycles(graph)),
        files=len(FILES),
        statements=sum(map(_statements, FILES)),
        longest_function=_longest_function(),
        lines=sum(map(_lines, FILES)),
    )


def box_of(room: str) -> str:
    """The box of a room."""
    return next(box for box, rooms in BOXES.items() if room in rooms)


def arrows_of_boxes() -> dict[tuple[str, str], list[str]]:
    """The imports from one box into another, each as file and line."""
    found: dict[tuple[str, str], list[str]] = {}
    rooms = {room for some in BOXES.values() for room in some}
    for file in FILES:
        for line, name in imports(file) if room_of(file) else ():
            parts = [*name.split("."), ""]
            if parts[0] == "quantizer" and (room := room_named(parts[1:])) in rooms:
                pair = box_of(room_of(file)), box_of(room)
                if pair[0] != pair[1]:
                    found.setdefault(pair, []).append(f"{file.relative_to(PACKAGE)}:{line}")
    return found


def main() -> None:
    """Print the figures."""
    house = figures()
    print(f"packages            {house.packages}")
    print(f"rooms               {house.rooms}")
    print(f"arrows              {house.arrows}")
    print(f"rooms in a cycle    {', '.join(house.rooms_in_a_cycle) or 'none'}")
    print(f"files               {house.files}")
    print(f"statements          {house.statements}")
    print("longest function    {} lines, {}".format(*house.longest_function))
    print(f"lines in all        {house.lines}")
    arrows = arrows_of_boxes()
    print(f"boxes               {len(BOXES)}, with {len(arrows)} arrows between them")
    for box in BOXES:
        to = [f"{other} {len(places)}" for (one, other), places in arrows.items() if one == box]
        print(f"  {box:<13} {', '.join(to) or '-'}")


if __name__ == "__main__":
    main()
