"""The zoo: every architecture of transformers as a tiny random model, through everything.

``make zoo`` writes ``docs/zoo.md`` and ``docs/zoo.json``, and says what changed since the file that was there. Rows are
kept in ``runs/zoo``: a second call goes on from there. With ``--exports`` or ``--peers`` it goes on with some of those
that run: their files and engines, and what other tools make of them.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import exports
import peers
from choose import MANY, Row, chosen
from page import changes, page
from stages import STAGES, through
from workers import Limits, Work, rows_of
from zoo_models import subjects

_DOCS = Path(__file__).resolve().parents[2] / "docs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", metavar="PATTERN", help="these alone, such as 'qwen*', and no page")
    parser.add_argument("--exports", action="store_true", help=f"files and engines of {MANY} of them instead")
    parser.add_argument("--peers", action="store_true", help="what other tools do with the same ones instead")
    parser.add_argument("--work", type=Path, default=Path("runs/zoo"), help="folder of the rows")
    parser.add_argument("--again", action="store_true", help="measure rows that are there too")
    parser.add_argument("--page", action="store_true", help="write the page of the rows that are there")
    parser.add_argument("--seconds", type=float, default=180, help="limit of each (%(default)s)")
    parser.add_argument("--gib", type=float, default=12, help="limit of each one's memory (%(default)s)")
    parser.add_argument("--at-once", type=int, default=2, help="how many processes (%(default)s)")
    asked = parser.parse_args()
    known = {subject.key: {"name": subject.name, "library": subject.library} for subject in subjects()}
    base = _Rows(asked.work, known)
    some = known if asked.only else {key: known[key] for key in chosen(base.read())}
    tools = {f"{tool}.{key}": {**facts, "tool": tool} for key, facts in some.items() for tool in peers.TOOLS}
    exported, taken = _Rows(asked.work / "exports", some), _Rows(asked.work / "peers", tools)
    measured, work = base, through
    if asked.exports or asked.peers:
        measured, work = (exported, exports.exported) if asked.exports else (taken, peers.taken)
        if not some:
            parser.error(f"{asked.work} has no rows to choose from: run this without --exports and --peers before")
    if not asked.page:
        limits = Limits(seconds=asked.seconds, gib=asked.gib, at_once=asked.at_once)
        measured.measure(work, limits, asked.only, again=asked.again)
    if not asked.only:
        _write_page(base.read(), exported.read(), taken.read())


class _Rows:
    """A folder of rows, a file each, and what is known of each before it is measured."""

    def __init__(self, folder: Path, about: Mapping[str, Mapping[str, Any]]) -> None:
        self._folder, self._about = folder, about

    def read(self) -> list[dict[str, Any]]:
        """Those that are there."""
        files = [self._file(key) for key in self._about]
        return [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]

    def measure(self, work: Work, limits: Limits, only: Sequence[str], *, again: bool) -> None:
        """Measure those that are missing, of the patterns in ``only`` if there are any."""
        self._folder.mkdir(parents=True, exist_ok=True)
        keys = [key for key in self._about if not only or any(fnmatch.fnmatch(key, one) for one in only)]
        missing = [key for key in keys if again or not self._file(key).exists()]
        for count, (key, row) in enumerate(rows_of(missing, work, limits), start=1):
            _write(self._file(key), {**self._about[key], **row})
            print(f"[{count}/{len(missing)}] {key}: {_summary(row)}", flush=True)

    def _file(self, key: str) -> Path:
        return self._folder / f"{key}.json"


def _write_page(rows: Sequence[Row], exported: Sequence[Row], taken: Sequence[Row]) -> None:
    before = _DOCS / "zoo.json"
    if before.exists():
        print("\n".join(changes(json.loads(before.read_text(encoding="utf-8"))["rows"], rows)) or "nothing changed")
    text, record = page(rows, exported, taken)
    (_DOCS / "zoo.md").write_text(text, encoding="utf-8")
    _write(before, record)
    print(f"wrote {_DOCS / 'zoo.md'}")


def _write(path: Path, value: object) -> None:
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


def _summary(row: Row) -> str:
    if "ended" in row:
        return f"{row.get('stage', 'start')}: {row['ended']}"
    stages = {*STAGES, *exports.STAGES, *peers.STAGES}
    failed = [f"{stage}: {row[stage]}" for stage in row if stage in stages and row[stage] != "ok"]
    share = f", {row['share']:.1%} of multiply-adds" if row.get("share") is not None else ""
    return f"{'; '.join(failed) or 'ok'}{share}, {row['seconds']:.0f} s"


if __name__ == "__main__":
    main()
