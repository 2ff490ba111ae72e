"""What can be damaged: a kind names files, says how they are damaged, and reads them as a user would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torture.mutations import Mutation


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Files of one kind.

    Attributes:
        name: as on the command line.
        make: writes good files into a folder, once.
        files: which of them are damaged.
        how: the damage, one for each case.
        read: reads the folder; what it gives stands for all that came of it.
        exact: what is damaged is refused, or gives what the good files gave.
    """

    name: str
    make: Callable[[Path], object]
    files: tuple[str, ...]
    how: tuple[Mutation, ...]
    read: Callable[[Path], object]
    exact: bool = False


KINDS: dict[str, Kind] = {}


def kind(entry: Kind) -> Kind:
    """Register a kind."""
    KINDS[entry.name] = entry
    return entry
