"""The shape of a program's share of a product: the first choice for a number of rows, and a table of measured ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from quantizer.errors import EngineError
from quantizer.utils.files import whole_file
from quantizer.utils.plain_values import decoded, json_values


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


_LEAST_BUCKET = 16


def bucket(rows: int) -> int:
    """Return the next power of two of a number of rows, at least 16; products of one bucket share a tile."""
    return max(_LEAST_BUCKET, 1 << (rows - 1).bit_length())


@dataclass(frozen=True, order=True)
class Product:
    """A product whose tile is measured.

    Attributes:
        rows: the bucket of its number of rows.
        columns: N.
        depth: K.
        epilogue: the operations after the product in the kernel, such as ``gelu, int8``.
        capability: the compute capability of the GPU, such as ``9.0``.
    """

    rows: int
    columns: int
    depth: int
    epilogue: str
    capability: str


@dataclass(frozen=True)
class _Entry:
    product: Product
    tile: Tile | None


@dataclass(frozen=True)
class _File:
    format: int
    entries: tuple[_Entry, ...]


_FORMAT = 1


class TileTable:
    """The fastest tiles that were measured.

    A tile of None stands for operations of torch, which were faster than each tile.
    """

    def __init__(self, entries: Mapping[Product, Tile | None] | None = None) -> None:
        self._entries = dict(entries or {})

    def __contains__(self, product: Product) -> bool:
        return product in self._entries

    def __iter__(self) -> Iterator[Product]:
        return iter(self._entries)

    def tile(self, product: Product, rows: int) -> Tile | None:
        """Return the measured tile; for a product that was not measured, the first choice for its rows."""
        return self._entries[product] if product in self._entries else first_tile(rows)

    def measure(
        self,
        product: Product,
        candidates: Mapping[Tile | None, Callable[[], object]],
        seconds: Callable[[Callable[[], object]], float],
    ) -> dict[Tile | None, float]:
        """Time the candidates, keep the fastest, and return the seconds of each that ran.

        A candidate that raises, such as a tile that needs more shared memory than the GPU has, is left out. Nothing is
        kept if all of them raise.
        """
        times: dict[Tile | None, float] = {}
        for tile, call in candidates.items():
            try:
                times[tile] = seconds(call)
            except Exception:  # noqa: BLE001 - the compiler of kernels raises errors of many classes
                continue
        if times:
            self._entries[product] = min(times, key=lambda tile: times[tile])
        return times

    def read(self, path: Path) -> None:
        """Add the entries of a file, if it exists.

        Raises:
            EngineError: the file is damaged or of another release.
        """
        if not path.exists():
            return
        try:
            file: _File = decoded(_File, json_values(path.read_bytes()), "tiles")
            if file.format != _FORMAT:
                raise ValueError(f"its format is {file.format}, but this release reads format {_FORMAT}")
            if unknown := [entry.tile for entry in file.entries if entry.tile not in (None, *TILES)]:
                raise ValueError(f"{unknown[0]} is not a tile of this release")
        except (OSError, ValueError) as error:
            raise EngineError(f"{path} is not a table of tiles: {error}; delete it, and measure again") from error
        self._entries |= {entry.product: entry.tile for entry in file.entries}

    def write(self, path: Path) -> None:
        """Write all entries to a file.

        Raises:
            EngineError: the file cannot be written.
        """
        entries = [{"product": asdict(product), "tile": _plain(self._entries[product])} for product in sorted(self)]
        with whole_file(path, EngineError) as whole:
            whole.write_text(json.dumps({"format": _FORMAT, "entries": entries}, indent=1), encoding="utf-8")


def _plain(tile: Tile | None) -> Mapping[str, int] | None:
    return None if tile is None else asdict(tile)


def tiles_for(rows: int) -> Iterable[Tile]:
    """Return the tiles to measure for a number of rows: all tiles with at most the rows of its bucket."""
    return [tile for tile in TILES if tile.rows <= bucket(rows)]


TABLE = TileTable()
"""The tiles that were measured or read in this process."""
