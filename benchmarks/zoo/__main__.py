"""The zoo: every architecture of transformers as a tiny random model, through everything.

``make zoo`` writes ``docs/zoo.md`` and ``docs/zoo.json``, and says what changed since the file that was there. Rows are
kept in ``runs/zoo``: a second call goes on from there.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
from pathlib import Path
from typing import Any

from page import changes
from page import page
from stages import through
from workers import Limits
from workers import rows_of
from zoo_models import subjects

_DOCS = Path(__file__).resolve().parents[2] / "docs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", metavar="PATTERN", help="these alone, such as 'qwen*', and no page")
    parser.add_argument("--work", type=Path, default=Path("runs/zoo"), help="folder of the rows")
    parser.add_argument("--again", action="store_true", help="measure rows that are there too")
    parser.add_argument("--page", action="store_true", help="write the page of the rows that are there")
    parser.add_argument("--seconds", type=float, default=180, help="limit of each (%(default)s)")
    parser.add_argument("--gib", type=float, default=12, help="limit of each one's memory (%(default)s)")
    parser.add_argument("--at-once", type=int, default=2, help="how many processes (%(default)s)")
    asked = parser.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    known = {subject.key: subject for subject in subjects()}
    keys = [key for key in known if not asked.only or any(fnmatch.fnmatch(key, one) for one in asked.only)]
    files = {key: asked.work / f"{key}.json" for key in keys}
    missing = [] if asked.page else [key for key in keys if asked.again or not files[key].exists()]
    limits = Limits(seconds=asked.seconds, gib=asked.gib, at_once=asked.at_once)
    for count, (key, row) in enumerate(rows_of(missing, through, limits), start=1):
        _write(files[key], {"name": known[key].name, "library": known[key].library, **row})
        print(f"[{count}/{len(missing)}] {key}: {_summary(row)}", flush=True)
    if asked.only:
        return
    rows = [json.loads(files[key].read_text(encoding="utf-8")) for key in keys if files[key].exists()]
    before = _DOCS / "zoo.json"
    if before.exists():
        print("\n".join(changes(json.loads(before.read_text(encoding="utf-8"))["rows"], rows)) or "nothing changed")
    text, record = page(rows)
    (_DOCS / "zoo.md").write_text(text, encoding="utf-8")
    _write(before, record)
    print(f"wrote {_DOCS / 'zoo.md'}")


def _write(path: Path, value: object) -> None:
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


def _summary(row: dict[str, Any]) -> str:
    if "ended" in row:
        return f"{row.get('stage', 'start')}: {row['ended']}"
    if row.get(row["stage"]) != "ok":
        return f"{row['stage']}: {row[row['stage']]}"
    share, decibels = row["share"], row["sqnr_db"]
    return f"{share:.1%} of multiply-adds, {'-' if decibels is None else f'{decibels:.1f} dB'}, {row['seconds']:.0f} s"


if __name__ == "__main__":
    main()
