"""The fields of a ranking that pictures read, and the order of blocks in pictures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class RankedRow(Protocol):
    """A group with its error."""

    @property
    def group(self) -> str:
        """Name of the group."""

    @property
    def kind(self) -> str:
        """Kind of its sites."""

    @property
    def block(self) -> str:
        """The block of its first site."""

    @property
    def position(self) -> int:
        """Its place in the model's order."""

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of its sites."""

    @property
    def error(self) -> float:
        """The error of quantizing it alone."""

    @property
    def fallback(self) -> bool:
        """True if it fell back to float."""


def blocks_in_order(rows: Iterable[RankedRow]) -> list[str]:
    """Return each block once, in the model's order."""
    return list(dict.fromkeys(row.block for row in sorted(rows, key=lambda row: (row.position, row.group))))
