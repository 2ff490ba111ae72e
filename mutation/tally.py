"""What came of the mutants: counts of each package, and every survivor that equivalent.toml does not explain."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkItem, WorkResult

__all__ = ["all_ran", "report", "survivors"]

_EXPLAINED = Path(__file__).with_name("equivalent.toml")
_ALL = "all "


def all_ran(tests: int) -> str:
    """Return how a result begins for which every test of a line was run."""
    return f"{_ALL}{tests} tests"


def survivors(session: WorkDB, *, again: bool) -> list[WorkItem]:
    """Return what survived the quickest tests alone and is not explained; with ``again`` what survived all, too."""
    explained = _explained()
    return [
        item
        for item, result in session.completed_work_items
        if result.test_outcome == TestOutcome.SURVIVED
        and _change(result) not in explained
        and (again or not (result.output or "").startswith(_ALL))
    ]


def report(sessions: Sequence[tuple[str, Sequence[Path]]], tree: Path, least: float) -> int:
    """Print the counts and the survivors; return 1 where less than ``least`` per cent was killed."""
    explained = _explained()
    print(f"{'package':14}{'mutants':>9}{'killed':>9}{'timeout':>9}{'equivalent':>12}{'survived':>10}{'killed of':>11}")
    total = [0, 0, 0, 0, 0]
    left: list[str] = []
    for name, paths in sessions:
        done, waiting = _done(paths)
        lived = [(m, result) for m, result in done if result.test_outcome == TestOutcome.SURVIVED]
        alive = [(m, result) for m, result in lived if _change(result) not in explained]
        late = sum(result.worker_outcome == WorkerOutcome.ABNORMAL for _, result in done)
        row = [len(done), len(done) - len(lived), late, len(lived) - len(alive), len(alive)]
        _print_row(name, row, waiting)
        total = [a + b for a, b in zip(total, row, strict=True)]
        for mutation, result in sorted(alive, key=lambda pair: (str(pair[0].module_path), pair[0].start_pos)):
            tests = (result.output or "").partition(",")[0]
            where = f"{mutation.module_path.relative_to(tree)}:{mutation.start_pos[0]}"
            _, before, after = _change(result)
            left.append(f"{where} {mutation.operator_name} ({tests})\n  - {before}\n  + {after}")
    _print_row("all", total, 0)
    print("\n".join(left))
    for file, before, _ in _stale(tree):
        print(f"equivalent.toml explains what is no longer in {file}: {before}")
    return int(_score(total) < least)


def _done(sessions: Sequence[Path]) -> tuple[list[tuple[MutationSpec, WorkResult]], int]:
    """The results of a package, and how many are not known yet."""
    done: list[tuple[MutationSpec, WorkResult]] = []
    waiting = 0
    for path in sessions:
        if path.exists():
            with use_db(str(path)) as session:
                found = session.completed_work_items
                done += [(item.mutations[0], result) for item, result in found]
                waiting += session.num_work_items - len(found)
    return done, waiting


def _explained() -> set[tuple[str, str, str]]:
    entries = tomllib.loads(_EXPLAINED.read_text(encoding="utf-8")).get("equivalent", [])
    return {(entry["file"], entry["line"], entry["mutant"]) for entry in entries}


def _stale(tree: Path) -> list[tuple[str, str, str]]:
    """The explanations of lines that a file of the copy does not have; lines are joined as ``_change`` joins them."""
    stale = []
    for file, before, after in sorted(_explained()):
        lines = (tree / file).read_text(encoding="utf-8").splitlines() if (tree / file).exists() else []
        if before.strip() not in " ".join(line.strip() for line in lines):
            stale.append((file, before, after))
    return stale


def _change(result: WorkResult) -> tuple[str, str, str]:
    """The file and the text that was taken from it and put into it, whatever lines stand above."""
    lines = (result.diff or "").splitlines()
    file = next(line.removeprefix("--- a/").strip() for line in lines if line.startswith("--- a/"))
    body = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    before, after = (" ".join(line[1:].strip() for line in body if line.startswith(sign)) for sign in "-+")
    return file, before, after


def _score(row: Sequence[int]) -> float:
    mutants, killed, _, equivalent, _ = row
    return 100 * killed / max(1, mutants - equivalent)


def _print_row(name: str, row: Sequence[int], waiting: int) -> None:
    mutants, killed, late, equivalent, survived = row
    more = f"  ({waiting} not tested yet)" if waiting else ""
    print(f"{name:14}{mutants:9}{killed:9}{late:9}{equivalent:12}{survived:10}{_score(row):10.1f}%{more}")
