"""The times of an earlier run of the same command, from its own report: the best estimate of what this one takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from quantizer.common.paths import regular_file
from quantizer.common.plain_values import json_values
from quantizer.report import Stage

_MOST = 10
"""So many folders are looked into: a report may have megabytes."""


def earlier_stages(folder: Path, report: str, same: Callable[[Mapping[str, Any]], bool]) -> list[Stage]:
    """Return the stages of the run that stands in a folder, or else of the last one beside it; none if there is none.

    Parts of stages are left out.

    Args:
        folder: the folder that is to be written.
        report: the name of the file in it that tells the stages of a run.
        same: whether the content of such a file is that of a run that does the same.
    """
    for path in [folder / report, *_beside(folder, report)]:
        # What cannot be read, or was written by something else, tells no times.
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            content = json_values(regular_file(path).read_bytes())
            if same(content):
                stages = [stage for stage in content["stages"] if stage.get("inside") is None]
                return [Stage(name=str(stage["name"]), seconds=float(stage["seconds"])) for stage in stages]
    return []


def _beside(folder: Path, report: str) -> list[Path]:
    """Return the files of that name in the folders beside, the newest first."""
    dated = []
    with suppress(OSError):
        for other in folder.parent.iterdir():
            with suppress(OSError):
                dated.append(((other / report).stat().st_mtime, other / report))
    return [path for _, path in sorted(dated, reverse=True)][:_MOST]
