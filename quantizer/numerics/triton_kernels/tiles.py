"""The shape of a program's share of a product: the tiles to try for a number of rows, and the first choice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Tile:
    """A tile of a product.

    Attributes:
        rows: rows of the result.
        columns: columns of the result.
        depth: values of K that are loaded at once.
        warps: groups of 32 threads of a program.
        stages: loads that run ahead of the product.
        group: rows of tiles whose programs run next to each other.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int = 8


_BY_ROWS = (
    (16, Tile(16, 64, 128, 4, 4)),
    (64, Tile(64, 64, 128, 4, 4)),
    (512, Tile(64, 128, 128, 4, 4)),
)
_MANY_ROWS = Tile(128, 128, 128, 8, 4)

TILES = (*(tile for _, tile in _BY_ROWS), _MANY_ROWS)
"""All tiles that are used. None of them spills registers; see benchmarks/results/gpu.md."""


def first_tile(rows: int) -> Tile:
    """Return a tile for a product with this number of rows: small ones for few, so that many programs run."""
    return next((tile for most, tile in _BY_ROWS if rows <= most), _MANY_ROWS)
