"""Everybody's INT8 on real models: accuracy, latency, size, memory and time, a row for each tool and model.

    python benchmarks/field                          every row, and the pages in docs/benchmarks
    python benchmarks/field --model M --tool T       one row: measured again, and printed
    python benchmarks/field --model growth --tool T  how one tool grows with a model: measured again, and printed

Each row is measured in a process of its own, which takes its turns with ONNX Runtime in float32, so that rows can be
compared. A run that was stopped goes on with those that its folder lacks. All rows are kept in ``rows``, a file for
each kind of machine; ``--page`` adds those of the folder to them, and writes the pages alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import traceback
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from field_growth import GROWN, grown
from field_page import write_pages
from field_row import about, measured_row
from headline import MACHINE, write_headline
from kept_rows import keep_rows, kept_rows
from subjects import SUBJECTS
from tools import TOOLS

_HERE = Path(__file__).resolve()
_ROOT = _HERE.parents[2]
_KEPT, _PAGES = _HERE.parent / "rows", _ROOT / "docs" / "benchmarks"
_CURE = (
    "`pip install -c constraints.txt -e '.[bench]'` and `pip install --no-deps -r benchmarks/requirements-no-deps.txt`"
)
_GROWTH = "growth"
"""In the place of a model: how a tool grows."""
_LIMIT_S = 2400
"""The most seconds for one row."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=(*SUBJECTS, _GROWTH), help="this model alone")
    parser.add_argument("--tool", choices=TOOLS, help="this tool alone")
    parser.add_argument("--work", type=Path, default=_ROOT / "runs" / "field", help="folder of rows (%(default)s)")
    parser.add_argument("--page", action="store_true", help="write the pages of what was measured, and measure nothing")
    asked = parser.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    if asked.model and asked.tool:
        if asked.tool not in _tools(asked.model):
            parser.error(f"of {asked.tool} it is not measured how it grows; choose from {', '.join(GROWN)}")
        _print_row(asked.model, asked.tool, asked.work)
        return
    if not asked.page:
        for model in (*SUBJECTS, _GROWTH) if asked.model is None else (asked.model,):
            for tool in _tools(model):
                if asked.tool in (None, tool):
                    _in_process(model, tool, asked.work)
    keep_rows([json.loads(path.read_text(encoding="utf-8")) for path in sorted(asked.work.glob("*.json"))], _KEPT)
    machines = kept_rows(_KEPT)
    told = [{slug: _in_order(models, rows) for slug, rows in machines.items()} for models in (SUBJECTS, (_GROWTH,))]
    write_pages(*told, _PAGES)
    write_headline(machines[MACHINE], _ROOT)


def _tools(model: str) -> Sequence[str]:
    return GROWN if model == _GROWTH else list(TOOLS)


def _print_row(model: str, tool: str, work: Path) -> None:
    needs = TOOLS[tool].needs
    if not TOOLS[tool].is_installed:
        found: dict[str, Any] = {"failed": f"{needs} is not installed; {_CURE}"}
    else:
        try:
            found = grown(tool) if model == _GROWTH else measured_row(model, tool, work)
        except Exception as error:  # noqa: BLE001 - whatever a tool raises is what its row has to say
            traceback.print_exc()
            found = {"failed": f"{type(error).__name__}: {error}"}
    print(json.dumps(_written(model, tool, work, found), indent=1))


def _written(model: str, tool: str, work: Path, found: dict[str, Any]) -> dict[str, Any]:
    """Write a row, with where and when it was measured."""
    row = {"model": model, "tool": tool, "day": date.today().isoformat(), **about(), **found}
    (work / f"{model}.{tool}.json").write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
    return row


def _in_process(model: str, tool: str, work: Path) -> None:
    """Measure a row that is not there yet; one that fails says why."""
    row = work / f"{model}.{tool}.json"
    if row.exists():
        return
    command = [sys.executable, str(_HERE.parent), "--model", model, "--tool", tool, "--work", str(work)]
    log = work / f"{model}.{tool}.log"
    failed = None
    with log.open("w", encoding="utf-8") as file:
        try:
            done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            failed = f"stopped after {_LIMIT_S} s"
        else:
            if not done.returncode:
                failed = json.loads(row.read_text(encoding="utf-8")).get("failed")
            else:
                lines = [
                    line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()
                ]
                failed = lines[-1] if lines else f"ended with {done.returncode}"
    if not row.exists():
        _written(model, tool, work, {"failed": failed})
    print(f"{model}, {tool}: {failed or 'measured'}", flush=True)


def _in_order(models: Iterable[str], kept: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """All rows in the order of the tables, each with what the page says of its tool; of some it says that they lack."""
    found = {(row["model"], row["tool"]): row for row in kept}
    lacks = {"failed": "not measured yet"}
    return [
        {"model": model, "tool": tool, "name": TOOLS[tool].title, "ours": TOOLS[tool].ours}
        | found.get((model, tool), lacks)
        for model in models
        for tool in _tools(model)
    ]


if __name__ == "__main__":
    main()
