"""Change the code in one place at a time and see whether a test fails: python mutation/run.py [--help].

Each mutant is written into a copy of the tree under runs/mutation, never into the tree itself, and tested in a process
of its own. What was tested is kept there in one session of Cosmic Ray for each file, and a run that was stopped goes
on where it ended. See docs/design/testing.md.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from cosmic_ray.mutating import _make_diff
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkItem, WorkResult
from forked import TIMED_OUT, end_on_signals, preload, run_forked
from lines import TestsByLine, measure
from mutants import mutated, sample
from tally import all_ran, report, survivors

ROOT = Path(__file__).parents[1]
ENOUGH = 10.0
"""Seconds of tests for the first look at a mutant."""
SHORTEST = 60.0
"""Seconds that any mutant may take, beside four times what its tests take without a mutation."""


@dataclass(frozen=True)
class Package:
    """A line of table.toml, with files in the copy of the tree.

    Each file of tests comes with the sources of all packages that it holds: it is run once for all of them.
    """

    name: str
    sources: list[Path]
    tests: dict[Path, list[Path]]
    every: int
    sessions: Path

    def session(self, source: Path) -> Path:
        """The session of one of the files."""
        return (
            self.sessions / f"{source.relative_to(self.sessions.parent / 'tree').as_posix().replace('/', '.')}.sqlite"
        )


def main() -> int:
    """Test what is pending, and return 1 where fewer mutants are killed than table.toml asks for."""
    table = tomllib.loads((ROOT / "mutation" / "table.toml").read_text(encoding="utf-8"))
    wanted = _arguments(list(table["packages"]))
    end_on_signals()
    folder: Path = wanted.folder.resolve()
    tree = folder / "tree"
    seed = table["seed"] if wanted.seed is None else wanted.seed
    print(f"seed {seed}, sessions in {folder / 'sessions'}", flush=True)
    if not wanted.report:
        with _locked(folder):
            _copy(tree)
            preload(table["preload"])
            for name in wanted.package:
                _test(_package(name, table["packages"], tree, folder), tree, folder, seed, wanted)
    packages = [_package(name, table["packages"], tree, folder) for name in wanted.package]
    sessions = [(package.name, [package.session(source) for source in package.sources]) for package in packages]
    return report(sessions, tree, table["least"])


def _arguments(names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", action="append", choices=names, help="only this line of table.toml; repeatable")
    parser.add_argument("--quick", action="store_true", help=f"no more than {ENOUGH:.0f} s of tests for any mutant")
    parser.add_argument("--again", action="store_true", help="test once more what survived and is not explained")
    parser.add_argument("--report", action="store_true", help="test nothing, print what is known")
    parser.add_argument("--seed", type=int, help="another sample than that of table.toml")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "mutation", help="where sessions are kept")
    wanted = parser.parse_args()
    wanted.package = wanted.package or names
    return wanted


def _locked(folder: Path) -> TextIO:
    """A file that is held while this process runs: two would test each other's mutants."""
    folder.mkdir(parents=True, exist_ok=True)
    held = (folder / "lock").open("w")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(f"another run is at work in {folder}") from None
    return held


def _copy(tree: Path) -> None:
    """The files of the working tree, as they are: also those that a stopped run left mutated in the copy."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    files = {name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()}
    for old in [*tree.rglob("*.py")]:
        if str(old.relative_to(tree)) not in files:
            old.unlink()
    for name in files:
        new = tree / name
        if not new.exists() or new.read_bytes() != (ROOT / name).read_bytes():
            new.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, new)


def _package(name: str, lines: dict[str, dict[str, Any]], tree: Path, folder: Path) -> Package:
    def files(line: dict[str, Any], key: str) -> list[Path]:
        return [file for pattern in line[key] for file in sorted(tree.glob(pattern))]

    held = {
        test: [s for line in lines.values() if test in files(line, "tests") for s in files(line, "sources")]
        for test in files(lines[name], "tests")
    }
    return Package(name, files(lines[name], "sources"), held, lines[name]["every"], folder / "sessions")


def _test(package: Package, tree: Path, folder: Path, seed: int, wanted: argparse.Namespace) -> None:
    """Test what has no result yet by the quickest tests, then what survived them by all."""
    for source in package.sources:
        _begin(package, source, f"{seed} {source.relative_to(tree)}")
    print(f"{package.name}: {len(package.tests)} files of tests", flush=True)
    by_line = measure(tree, package.tests, folder / "lines")
    for source in package.sources:
        with use_db(str(package.session(source))) as session:
            pending = sorted(session.pending_work_items, key=_position)
            _test_all(session, pending, lambda tests: by_line.quickest(tests, ENOUGH), by_line, tree, folder)
    for source in () if wanted.quick else package.sources:
        with use_db(str(package.session(source))) as session:
            left = sorted(survivors(session, again=wanted.again), key=_position)
            _test_all(session, left, list, by_line, tree, folder)


def _begin(package: Package, source: Path, seed: str) -> None:
    """Draw the mutants of a file, unless there is a session of the same code and the same sample."""
    told = hashlib.sha256(f"{seed} {package.every} {source.read_text(encoding='utf-8')}".encode()).hexdigest()
    path = package.session(source)
    begun = path.with_suffix(".of")
    if begun.exists() and begun.read_text(encoding="utf-8") == told:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with use_db(str(path)) as session:
        session.add_work_items(sample(source, package.every, seed))
    begun.write_text(told, encoding="utf-8")


def _test_all(
    session: WorkDB,
    items: Sequence[WorkItem],
    chosen: Callable[[list[str]], list[str]],
    by_line: TestsByLine,
    tree: Path,
    folder: Path,
) -> None:
    for number, item in enumerate(items, 1):
        began = time.monotonic()
        result = _result(item, chosen, by_line, tree, folder)
        session.set_result(item.job_id, result)
        (mutation,) = item.mutations
        where = f"{mutation.module_path.relative_to(tree)}:{mutation.start_pos[0]}"
        outcome = result.test_outcome.value if result.test_outcome else "?"
        took = time.monotonic() - began
        print(f"  {number}/{len(items)} {outcome} {where} {mutation.operator_name} {took:.0f} s", flush=True)


def _position(item: WorkItem) -> tuple[str, tuple[int, int]]:
    (mutation,) = item.mutations
    return str(mutation.module_path), mutation.start_pos


def _result(
    item: WorkItem, chosen: Callable[[list[str]], list[str]], by_line: TestsByLine, tree: Path, folder: Path
) -> WorkResult:
    (mutation,) = item.mutations
    file = mutation.module_path
    source, code = file.read_text(encoding="utf-8"), mutated(mutation)
    if code is None:
        raise RuntimeError(f"{mutation} was drawn and cannot be made")
    diff = "\n".join(_make_diff(source, code, file.relative_to(tree)))
    every = by_line.of(str(file.relative_to(tree)), source, mutation.start_pos[0])
    tests = chosen(every)
    if not tests:
        return WorkResult(WorkerOutcome.NO_TEST, all_ran(0), TestOutcome.SURVIVED, diff)
    limit = SHORTEST + 4 * sum(map(by_line.seconds.__getitem__, tests))
    status, output = _tested(tree, file, code, tests, limit, folder / "log.txt")
    outcome = TestOutcome.SURVIVED if status == 0 else TestOutcome.KILLED
    worker = WorkerOutcome.ABNORMAL if status == TIMED_OUT else WorkerOutcome.NORMAL
    told = all_ran(len(every)) if len(tests) == len(every) else f"{len(tests)} of {len(every)} tests"
    return WorkResult(worker, f"{told}, exit status {status}\n{output[-4000:]}", outcome, diff)


def _tested(tree: Path, file: Path, code: str, tests: Sequence[str], limit: float, log: Path) -> tuple[int, str]:
    """The exit status of the tests with ``code`` in the place of a file of the copy, and what they printed."""
    original = file.read_bytes()
    compiled = Path(importlib.util.cache_from_source(str(file)))
    try:
        file.write_text(code, encoding="utf-8")
        # Two mutants of one second and size would share their bytecode.
        compiled.unlink(missing_ok=True)
        status = run_forked(tree, [*tests], limit, log, None)
    finally:
        file.write_bytes(original)
        compiled.unlink(missing_ok=True)
    return status, log.read_text(encoding="utf-8", errors="replace")


if __name__ == "__main__":
    sys.exit(main())
