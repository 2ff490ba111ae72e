"""Which tests run which lines, measured once for each test file and kept while it and the code stay the same."""

from __future__ import annotations

import ast
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import coverage
import pytest
from forked import run_forked

__all__ = ["TestsByLine", "measure"]

_LIMIT = 1200.0
_IMPORT = ""


@dataclass(frozen=True)
class TestsByLine:
    """``seconds`` of each test, and the tests that run each line of each file."""

    seconds: dict[str, float]
    tests: dict[tuple[str, int], set[str]]

    def of(self, file: str, source: str, row: int) -> list[str]:
        """Return the tests that run the statement at a row, the quickest first.

        A statement that runs when its module is imported, and no later, may be held by any test.
        """
        rows = statement_rows(source, row)
        found: set[str] = set().union(*(self.tests.get((file, line), set()) for line in rows))
        return sorted(found or self.seconds, key=lambda test: (self.seconds[test], test))

    def quickest(self, tests: Sequence[str], seconds: float) -> list[str]:
        """Return of tests that come in order, the quickest first, those that fit into ``seconds``."""
        ends = accumulate(self.seconds[test] for test in tests)
        return [test for test, end in zip(tests, ends, strict=True) if end <= seconds] or [*tests[:1]]


def measure(tree: Path, tests: Mapping[Path, Sequence[Path]], folder: Path) -> TestsByLine:
    """Run every test file once without a mutation, and return which tests run what of the sources given with it."""
    seconds: dict[str, float] = {}
    by_line: dict[tuple[str, int], set[str]] = defaultdict(set)
    folder.mkdir(parents=True, exist_ok=True)
    for test, sources in tests.items():
        kept = folder / f"{test.relative_to(tree).as_posix().replace('/', '.')}-{_fingerprint([*sources, test])}.json"
        if not kept.exists():
            print(f"  which lines {test.relative_to(tree)} runs", flush=True)
            log = folder / "log.txt"
            arguments = [str(test), "-m", "not nightly and not gpu", "--maxfail=1000"]
            status = run_forked(tree, arguments, _LIMIT, log, partial(_Recorder, tree, sources, kept))
            if not kept.exists():
                raise SystemExit(f"{test} does not run without any mutation (exit status {status}): {log}")
        measured = json.loads(kept.read_text(encoding="utf-8"))
        for name in measured.get("failed", []):
            print(f"  left out, because it fails without any mutation: {name}", flush=True)
        seconds.update(measured["seconds"])
        for file, lines in measured["lines"].items():
            for line, found in lines.items():
                by_line[file, int(line)].update(found)
    return TestsByLine(seconds, by_line)


def statement_rows(source: str, row: int) -> range:
    """Return the rows of the innermost statement at a row; of a compound one those before its body."""
    best = range(row, row + 1)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.stmt) or not node.lineno <= row <= (node.end_lineno or node.lineno):
            continue
        body = getattr(node, "body", None)
        end = body[0].lineno if body and body[0].lineno > node.lineno else (node.end_lineno or node.lineno) + 1
        if row < end:
            best = range(node.lineno, end)
    return best


def _fingerprint(files: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


class _Recorder:
    """A pytest plugin that has coverage.py keep the lines of each test apart.

    What a fixture of a module runs counts for all tests that ask for it.
    """

    def __init__(self, tree: Path, sources: Sequence[Path], out: Path) -> None:
        self._tree, self._out = tree, out
        self._seconds: dict[str, float] = defaultdict(float)
        self._users: dict[str, set[str]] = defaultdict(set)
        self._failed: set[str] = set()
        self._now = _IMPORT
        self._coverage: Any = coverage.Coverage(data_file=None, include=[str(source) for source in sources])
        self._coverage.start()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            for fixture in getattr(item, "fixturenames", ()):
                self._users[fixture].add(item.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._switch(item.nodeid)
        result = yield
        self._switch(_IMPORT)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        before = self._now
        if fixturedef.scope != "function":
            self._switch(f"fixture {fixturedef.argname}")
        result = yield
        self._switch(before)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.failed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._coverage.stop()
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return
        data = self._coverage.get_data()
        lines: dict[str, dict[int, list[str]]] = {}
        for file in data.measured_files():
            contexts = data.contexts_by_lineno(file)
            lines[str(Path(file).relative_to(self._tree))] = {
                line: sorted(set().union(*map(self._tests, names))) for line, names in contexts.items()
            }
        seconds = {test: took for test, took in self._seconds.items() if test not in self._failed}
        told = {"seconds": seconds, "failed": sorted(self._failed), "lines": lines}
        self._out.write_text(json.dumps(told), encoding="utf-8")

    def _switch(self, context: str) -> None:
        self._now = context
        self._coverage.switch_context(context)

    def _tests(self, context: str) -> set[str]:
        if context.startswith("fixture "):
            return self._users[context.removeprefix("fixture ")] - self._failed
        return {context} - {_IMPORT} - self._failed
