"""The rows that were measured, a file for each kind of machine: they stay where pages are made of them again."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantizer.utils.files.folder import whole_file

__all__ = ["keep_rows", "kept_rows"]

_LEFT_OUT = ("(R)", "(TM)", "Processor")
"""Parts of a CPU's name that tell nothing."""


def keep_rows(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Add rows to the files of their machines; one of the same model and tool is replaced.

    Args:
        rows: each with ``model``, ``tool`` and ``machine``.
        folder: the folder of the files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for slug in dict.fromkeys(_machine_slug(row) for row in rows):
        path = folder / f"{slug}.json"
        before = _read(path) if path.exists() else []
        newer = [row for row in rows if _machine_slug(row) == slug]
        both = {(row["model"], row["tool"]): row for row in (*before, *newer)}
        # A line for a row, so that a change of one shows as one.
        lines = ",\n".join(json.dumps(both[key], sort_keys=True) for key in sorted(both))
        with whole_file(path) as fresh:
            fresh.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def kept_rows(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each machine, by its slug."""
    return {path.stem: _read(path) for path in sorted(folder.glob("*.json"))}


def _machine_slug(row: dict[str, Any]) -> str:
    """Return the machine of a row as a name for files: its CPU, and the last of the instructions that matter here."""
    name = str(row["machine"]["cpu"])
    for part in _LEFT_OUT:
        name = name.replace(part, "")
    last = str(row["machine"]["instructions"]).rpartition(", ")[2]
    return re.sub(r"[^a-z0-9]+", "-", f"{name} {last}".lower()).strip("-")


def _read(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found
