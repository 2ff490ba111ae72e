"""The shape of a program's share of a product, chosen by measurement and kept on disk.

A choice is kept by the number of rows (rounded up to a power of two), N, K, what follows the product, the type of the
operands and the compute capability of the GPU.
"""

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
