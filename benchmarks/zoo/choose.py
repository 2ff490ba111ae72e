"""Which models of the zoo go on to exports and to other tools: some of each modality, by a rule and not by hand."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["MANY", "Row", "chosen"]

MANY = 80
_LEAST = 3

Row = Mapping[str, Any]


def chosen(rows: Sequence[Row], many: int = MANY) -> list[str]:
    """Return the keys of ``many`` rows of models that run, all of them if they are fewer, in the order of their names.

    Each modality has three (all, if it has fewer) and of the rest as many as is its share of the rows. Of its rows,
    those are taken whose names have the lowest checksums: rows that are added later change few of them.
    """
    groups: dict[str, list[str]] = {}
    for row in rows:
        if row.get("built") == "ok":
            groups.setdefault(row["modality"], []).append(_key(row))
    found: list[str] = []
    for group, count in _counts({group: len(keys) for group, keys in groups.items()}, many).items():
        found += sorted(groups[group], key=_checksum)[:count]
    return sorted(found)


def _counts(sizes: Mapping[str, int], many: int) -> dict[str, int]:
    """How many of each group, none more than it has: the next always goes to the one that is furthest behind."""
    counts = {group: min(_LEAST, size) for group, size in sorted(sizes.items())}
    while sum(counts.values()) < min(many, sum(sizes.values())):
        open_ones = [group for group in counts if counts[group] < sizes[group]]
        counts[max(open_ones, key=lambda group: sizes[group] / (counts[group] + 1))] += 1
    return counts


def _checksum(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _key(row: Row) -> str:
    """The name of a row's file, as of its subject."""
    name: str = row["name"]
    return name if row["library"] == "transformers" else f"{row['library']}.{name}"
