"""Versions of Python, torch and transformers, and what a model of each family comes to with them.

``make compat`` writes ``docs/compatibility.md``. What was found is kept in ``docs/compatibility.json``: rows that it
has are not run again without ``--again``, and a call for some versions replaces the rows of those alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from environment import Environment, environment
from table import page

_ROOT = Path(__file__).resolve().parents[2]
_DOCS = _ROOT / "docs"
_RECORD = _DOCS / "compatibility.json"
TORCH = ("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1")
TRANSFORMERS = ("5.1.0", "5.24.0")
PYTHON = "3.11"
LATER_PYTHON = ("3.12", "3.13")
"""These are run with one pair of torch and transformers."""

Pairs = dict[str, dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", nargs="+", default=[sys.executable], metavar="INTERPRETER", help="(this one)")
    parser.add_argument("--torch", nargs="+", default=TORCH, metavar="VERSION", help="(%(default)s)")
    parser.add_argument("--transformers", nargs="+", default=TRANSFORMERS, metavar="VERSION", help="(%(default)s)")
    parser.add_argument("--work", type=Path, default=_ROOT / "runs" / "compat", help="folder of environments and logs")
    parser.add_argument("--again", action="store_true", help="run pairs that were run before, too")
    parser.add_argument("--page", action="store_true", help="write the page of what was found, and run nothing")
    asked = parser.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    pairs: Pairs = json.loads(_RECORD.read_text(encoding="utf-8")) if _RECORD.exists() else {}
    for interpreter in () if asked.page else asked.python:
        python = _version(interpreter)
        for torch in asked.torch:
            missing = [one for one in asked.transformers if asked.again or _key(python, torch, one) not in pairs]
            if missing:
                _with_torch(interpreter, python, torch, missing, asked.work, pairs)
    wanted = [_key(PYTHON, torch, transformers) for torch in TORCH for transformers in TRANSFORMERS]
    wanted += [_key(python, "2.13.0", TRANSFORMERS[-1]) for python in LATER_PYTHON]
    (_DOCS / "compatibility.md").write_text(page(pairs, wanted), encoding="utf-8")
    print(f"wrote {_DOCS / 'compatibility.md'}")


def _version(interpreter: str) -> str:
    """The version of an interpreter, such as 3.13."""
    code = "import sys; print('{}.{}'.format(*sys.version_info))"
    return subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def _key(python: str, torch: str, transformers: str) -> str:
    return f"Python {python}, torch {torch}, transformers {transformers}"


def _with_torch(
    interpreter: str, python: str, torch: str, transformers: Sequence[str], work: Path, pairs: Pairs
) -> None:
    log = work / f"python-{python}-torch-{torch}.log"
    log.unlink(missing_ok=True)
    with environment(interpreter, work, log) as made:
        failed = made.install(f"torch=={torch}", f"{_ROOT}[onnx,openvino]", "pytest")
        for version in transformers:
            pair = {"python": python, **_pair(made, torch, version, work, failed)}
            pairs[_key(python, torch, version)] = pair
            _RECORD.write_text(json.dumps(pairs, indent=1, sort_keys=True) + "\n", encoding="utf-8")
            ends = {name: row[row["stage"]] for name, row in pair["rows"].items() if row.get("stage") in row}
            print(f"{_key(python, torch, version)}: {pair['failed'] or ends}", flush=True)


def _pair(made: Environment, torch: str, transformers: str, work: Path, failed: str | None) -> dict[str, Any]:
    """The rows of ``check.py``, and why there are no more of them."""
    rows = work / "rows.json"
    rows.unlink(missing_ok=True)
    failed = failed or made.install(f"torch=={torch}", f"transformers=={transformers}")
    failed = failed or made.run(Path(__file__).parent / "check.py", str(rows))
    return {
        "torch": torch,
        "transformers": transformers,
        "day": date.today().isoformat(),
        "failed": failed,
        "rows": json.loads(rows.read_text(encoding="utf-8")) if rows.exists() else {},
    }


if __name__ == "__main__":
    main()
