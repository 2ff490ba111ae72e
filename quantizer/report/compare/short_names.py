"""Names of runs for a narrow terminal: shortened so that no two become alike."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from quantizer.report.tables import text

_BOUNDS = ",/"
"""What separates the parts of a name: values in that of a sweep's run, folders in a path."""


def short_names(names: Sequence[str], length: int) -> dict[str, str]:
    """Return names of at most ``length`` characters by the whole ones, which are all different.

    A long name loses its middle; names that would be alike then keep the parts in which they differ. Where these are
    alike in both ends too, the names stay whole.
    """
    short = {name: text.shorten(name, length) for name in names}
    for alike in _alike(short):
        short |= {name: text.shorten(part, length) for name, part in _differing(alike).items()}
    for alike in _alike(short):
        short |= {name: name for name in alike}
    return short


def _alike(short: dict[str, str]) -> list[list[str]]:
    """Return the names that are shortened to the same, in groups."""
    groups: dict[str, list[str]] = {}
    for name, shown in short.items():
        groups.setdefault(shown, []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def _differing(names: Sequence[str]) -> dict[str, str]:
    """Return each name without the parts at its ends that all have in common."""
    start = _common(names)
    end = _common([name[start:][::-1] for name in names])
    left, right = "…" if start else "", "…" if end else ""
    return {name: f"{left}{name[start : len(name) - end]}{right}" for name in names}


def _common(names: Sequence[str]) -> int:
    """Return how many letters all names begin with, up to the end of a part."""
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    begin = "".join(letters[0] for letters in alike)
    return max(begin.rfind(bound) for bound in _BOUNDS) + 1
