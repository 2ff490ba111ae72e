"""Methods of a product or an attention on a GPU: a kernel with a tile, a library, or float16; and the measured ones.

What was not measured is computed by the kernel, with a tile that fits its size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

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


@dataclass(frozen=True, order=True)
class AttentionTile:
    """A tile of an attention.

    Attributes:
        queries: rows of the result.
        keys: keys that are loaded at once.
        warps: groups of 32 threads of a program.
        stages: loads that run ahead of the products.
    """

    queries: int
    keys: int
    warps: int
    stages: int


_FEW_QUERIES = AttentionTile(16, 64, 4, 2)
_SOME_QUERIES = AttentionTile(64, 64, 4, 3)
_MANY_QUERIES = AttentionTile(128, 64, 8, 3)

ATTENTION_TILES = (_FEW_QUERIES, _SOME_QUERIES, _MANY_QUERIES)
"""All tiles of attentions. None of them spills registers; see benchmarks/results/gpu.md."""

LIBRARY: Final = "library"
"""``torch._int_mm`` or ``torch._scaled_mm``, and the epilogue as one elementwise kernel.

For an attention, PyTorch's ``scaled_dot_product_attention``.
"""

FLOAT16: Final = "float16"
"""The matrix multiplication in float16, with a second copy of the weight, and the same epilogue.

It reads the quantized activation, although floats would be more accurate and need no conversion: methods depend on the
number of rows of a call, but the types that kernels write are fixed in the graph. Another graph for each combination of
methods would be needed, and its results would no longer be those of the frozen proxy.
"""

Method = Tile | AttentionTile | Literal["library", "float16"]
"""How a product or an attention is computed: a tile of the kernel, ``LIBRARY`` or ``FLOAT16``."""


def first_tile(rows: int) -> Tile:
    """Return a tile for a product with this number of rows: small ones for few, so that many programs run."""
    return next((tile for most, tile in _BY_ROWS if rows <= most), _MANY_ROWS)


def first_attention_tile(queries: int) -> AttentionTile:
    """Return a tile for an attention with this number of queries."""
    return next((tile for tile in ATTENTION_TILES if queries <= tile.queries), _MANY_QUERIES)


_LEAST_BUCKET = 16


def power_of_two(number: int) -> int:
    """Return the next power of two."""
    return 1 << (number - 1).bit_length()


def bucket(rows: int) -> int:
    """Return the next power of two of a number of rows, at least 16; products of one bucket share a tile."""
    return max(_LEAST_BUCKET, power_of_two(rows))


@dataclass(frozen=True, order=True)
class Product:
    """A product whose method is measured.

    Attributes:
        rows: the bucket of its number of rows.
        columns: N.
        depth: K.
        operands: the type of both operands, ``int8`` or ``float8_e4m3fn``.
        epilogue: the operations after the product in the kernel, such as ``gelu, int8``.
        capability: the compute capability of the GPU, such as ``9.0``.
    """

    rows: int
    columns: int
    depth: int
    operands: str
    epilogue: str
    capability: str


@dataclass(frozen=True, order=True)
class Attention:
    """An attention whose method is measured.

    Attributes:
        heads: the number of heads.
        width: the values of a head.
        operands: the type of its operands, ``float16`` or ``bfloat16``.
        result: the type of its result, that of its operands or of quantized values.
        capability: the compute capability of the GPU, such as ``9.0``.
        samples: the next power of two of the number of samples.
        queries: the bucket of the number of queries.
        keys: the bucket of the number of keys, with padding.
    """

    heads: int
    width: int
    operands: str
    result: str
    capability: str
    samples: int
    queries: int
    keys: int


@dataclass(frozen=True)
class Measured:
    """The fastest method of a product or an attention.

    Attributes:
        method: the method.
        gain: how many times as fast it is as the fastest tile, for ``FLOAT16`` as the fastest method in 8 bits; None
            for a tile, or if no other method ran.
    """

    method: Method
    gain: float | None = None


@dataclass(frozen=True)
class _Entry:
    product: Product
    measured: Measured


@dataclass(frozen=True)
class _AttentionEntry:
    attention: Attention
    measured: Measured


@dataclass(frozen=True)
class _File:
    format: int
    entries: tuple[_Entry, ...]
    attentions: tuple[_AttentionEntry, ...]


_FORMAT = 3


class TileTable:
    """The fastest methods that were measured."""

    def __init__(self, entries: Mapping[Product | Attention, Measured] | None = None) -> None:
        self._entries = dict(entries or {})

    def __contains__(self, product: Product | Attention) -> bool:
        return product in self._entries

    def __iter__(self) -> Iterator[Product | Attention]:
        return iter(self._entries)

    def __getitem__(self, product: Product | Attention) -> Measured:
        return self._entries[product]

    @property
    def products(self) -> list[Product]:
        """The measured products in their order."""
        return sorted(each for each in self if isinstance(each, Product))

    @property
    def attentions(self) -> list[Attention]:
        """The measured attentions in their order."""
        return sorted(each for each in self if isinstance(each, Attention))

    def method(self, product: Product | Attention, rows: int) -> Method:
        """Return the fastest method; of what was not measured, the first tile for its rows or queries."""
        if product in self._entries:
            return self._entries[product].method
        return first_tile(rows) if isinstance(product, Product) else first_attention_tile(rows)

    def measure(
        self,
        product: Product | Attention,
        candidates: Mapping[Method, Callable[[], object]],
        seconds: Callable[[Callable[[], object]], float],
    ) -> dict[Method, float]:
        """Time the candidates, keep the fastest, and return the seconds of each that ran.

        ``FLOAT16`` is kept only if it is 1.05 times as fast as each method in 8 bits, because it needs more memory. A
        candidate that raises, such as a tile that needs more shared memory than the GPU has, is left out. Nothing is
        kept if all of them raise.
        """
        times: dict[Method, float] = {}
        for method, call in candidates.items():
            try:
                times[method] = seconds(call)
            except Exception:  # noqa: BLE001 - the compiler of kernels raises errors of many classes
                continue
        if times:
            self._entries[product] = _fastest(times)
        return times

    def read(self, path: Path) -> None:
        """Add the entries of a file, if it exists.

        Raises:
            EngineError: the file is damaged or of another release.
        """
        if not path.exists():
            return
        try:
            values = json_values(path.read_bytes())
            found = values.get("format") if isinstance(values, dict) else None
            if found != _FORMAT:
                raise ValueError(f"its format is {found}, but this release reads format {_FORMAT}")
            file: _File = decoded(_File, values, "tiles")
            found_entries = {entry.product: entry.measured for entry in file.entries}
            entries = found_entries | {entry.attention: entry.measured for entry in file.attentions}
            for product, measured in entries.items():
                if measured.method not in methods_for(product):
                    raise ValueError(f"{measured.method} is not a method of this release for {product}")
        except (OSError, ValueError) as error:
            raise EngineError(f"{path} is not a table of tiles: {error}; delete it, and measure again") from error
        self._entries |= entries

    def write(self, path: Path) -> None:
        """Write all entries to a file.

        Raises:
            EngineError: the file cannot be written.
        """
        entries = [asdict(_Entry(product, self[product])) for product in self.products]
        attentions = [asdict(_AttentionEntry(attention, self[attention])) for attention in self.attentions]
        values = {"format": _FORMAT, "entries": entries, "attentions": attentions}
        with whole_file(path, EngineError) as whole:
            whole.write_text(json.dumps(values, indent=1), encoding="utf-8")


_WORTH_A_COPY = 1.05
"""How many times as fast float16 must be for a second copy of the weight."""


def _fastest(times: Mapping[Method, float]) -> Measured:
    """Return the fastest method by the seconds of each."""
    tiles = [taken for method, taken in times.items() if not isinstance(method, str)]
    eight_bits = [taken for method, taken in times.items() if method != FLOAT16]
    if FLOAT16 in times and (not eight_bits or _WORTH_A_COPY * times[FLOAT16] < min(eight_bits)):
        return Measured(FLOAT16, min(eight_bits) / times[FLOAT16] if eight_bits else None)
    best = min((method for method in times if method != FLOAT16), key=lambda method: times[method])
    return Measured(best, min(tiles) / times[best] if best == LIBRARY and tiles else None)


def tiles_for(rows: int) -> Iterable[Tile]:
    """Return the tiles to measure for a number of rows: all tiles with at most the rows of its bucket."""
    return [tile for tile in TILES if tile.rows <= bucket(rows)]


_ALIGNED = 16
"""N and K of a library's product are multiples of it."""


def methods_for(product: Product | Attention) -> list[Method]:
    """Return the methods to measure; a library takes only products whose N and K are multiples of 16.

    ``torch._int_mm`` also needs more than 16 rows.
    """
    if isinstance(product, Attention):
        return [*(tile for tile in ATTENTION_TILES if tile.queries <= product.queries), LIBRARY]
    is_aligned = product.columns % _ALIGNED == 0 and product.depth % _ALIGNED == 0
    has_rows = product.operands != "int8" or product.rows > _LEAST_BUCKET
    library: list[Method] = [LIBRARY] if is_aligned and has_rows else []
    return [*tiles_for(product.rows), *library, FLOAT16]


TABLE = TileTable()
"""The methods that were measured or read in this process."""
