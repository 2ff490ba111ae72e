"""The table of measured tiles, libraries and float16, with times that the tests give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from quantizer.errors import EngineError
from quantizer.numerics.triton_kernels.tiles import (
    ATTENTION_TILES,
    FLOAT16,
    LIBRARY,
    TILES,
    Attention,
    Measured,
    Method,
    Product,
    TileTable,
    bucket,
    first_attention_tile,
    first_tile,
    methods_for,
    tiles_for,
)

PRODUCT = Product(64, 96, 48, "int8", "gelu, int8", "9.0")
ATTENTION = Attention(12, 64, "float16", "int8", "9.0", samples=32, queries=128, keys=512)


def _calls() -> dict[Method, Callable[[], object]]:
    return {method: lambda method=method: method for method in (*TILES, LIBRARY, FLOAT16)}


def _measured(times: dict[Method, float]) -> Measured:
    """What a table keeps if the methods take these seconds, and all others fail."""

    def seconds(call: Callable[[], object]) -> float:
        return times[call()]  # type: ignore[index]

    table = TileTable()
    assert table.measure(PRODUCT, _calls(), seconds) == times
    return table[PRODUCT]


def test_products_of_one_bucket_share_a_tile() -> None:
    assert [bucket(rows) for rows in (1, 16, 17, 64, 65, 4096)] == [16, 16, 32, 64, 128, 4096]
    assert {tile.rows for tile in tiles_for(1)} == {16}
    assert set(tiles_for(4096)) == set(TILES)


@pytest.mark.parametrize("fastest", [*TILES, LIBRARY, FLOAT16])
def test_the_fastest_is_kept(fastest: Method) -> None:
    table = TileTable()
    times = table.measure(PRODUCT, _calls(), lambda call: 1.0 if call() == fastest else 2.0)
    assert len(times) == len(TILES) + 2
    assert table.method(PRODUCT, 50) == fastest
    assert table[PRODUCT].gain == (2.0 if fastest in (LIBRARY, FLOAT16) else None)


def test_a_tile_that_does_not_compile_is_left_out() -> None:
    assert _measured({TILES[1]: 1.0}) == Measured(TILES[1])


def test_a_library_or_float16_is_taken_only_if_it_was_faster() -> None:
    assert _measured({TILES[0]: 2.0, LIBRARY: 2.0, FLOAT16: 2.0}) == Measured(TILES[0])
    assert _measured({TILES[0]: 3.0, TILES[1]: 2.5, LIBRARY: 2.0}) == Measured(LIBRARY, 1.25)
    # Float16 needs a second copy of the weight.
    assert _measured({TILES[0]: 2.0, LIBRARY: 3.0, FLOAT16: 1.95}) == Measured(TILES[0])
    assert _measured({TILES[0]: 3.0, LIBRARY: 2.0, FLOAT16: 1.6}) == Measured(FLOAT16, 1.25)
    assert _measured({FLOAT16: 1.6}) == Measured(FLOAT16)
    assert _measured({LIBRARY: 1.6, FLOAT16: 1.6}) == Measured(LIBRARY)


@pytest.mark.parametrize(
    ("rows", "n", "k", "operands", "has_library"),
    [
        *((64, 96, 48, "int8", True), (16, 96, 48, "int8", False), (32, 96, 48, "int8", True)),
        *((64, 100, 48, "int8", False), (64, 96, 40, "int8", False), (64, 16, 16, "int8", True)),
        *((16, 96, 48, "float8_e4m3fn", True), (64, 100, 48, "float8_e4m3fn", False)),
    ],
)
def test_shapes_that_a_library_takes(rows: int, n: int, k: int, operands: str, has_library: bool) -> None:
    methods = methods_for(Product(rows, n, k, operands, "none", "9.0"))
    assert (LIBRARY in methods) == has_library
    assert methods[-1] == FLOAT16
    assert methods[: len(list(tiles_for(rows)))] == list(tiles_for(rows))


def test_a_product_that_was_never_measured_or_could_not_be_has_the_first_choice() -> None:
    def seconds(_: Callable[[], object]) -> float:
        raise RuntimeError("no kernel image")

    table = TileTable()
    assert table.measure(PRODUCT, _calls(), seconds) == {}
    assert PRODUCT not in table
    assert table.method(PRODUCT, 50) == first_tile(50)


def test_an_attention_is_computed_by_a_tile_for_its_queries_or_by_pytorch() -> None:
    assert methods_for(ATTENTION) == [*ATTENTION_TILES, LIBRARY]
    assert methods_for(replace(ATTENTION, queries=32)) == [ATTENTION_TILES[0], LIBRARY]
    assert [first_attention_tile(queries).queries for queries in (1, 16, 17, 64, 65, 500)] == [16, 16, 64, 64, 128, 128]
    table = TileTable()
    assert table.method(ATTENTION, 100) == ATTENTION_TILES[-1]
    calls: dict[Method, Callable[[], object]] = {LIBRARY: lambda: 2.0, ATTENTION_TILES[1]: lambda: 3.0}
    table.measure(ATTENTION, calls, lambda call: float(call()))  # type: ignore[arg-type]
    assert table[ATTENTION] == Measured(LIBRARY, 1.5)
    assert table.method(ATTENTION, 100) == LIBRARY


def test_a_table_is_kept_in_a_file(tmp_path: Path) -> None:
    entries = {
        PRODUCT: Measured(LIBRARY, 1.25),
        Product(16, 1, 2, "int8", "none", "8.0"): Measured(FLOAT16),
        Product(64, 1, 2, "int8", "none", "8.0"): Measured(TILES[1]),
        ATTENTION: Measured(ATTENTION_TILES[2]),
        replace(ATTENTION, samples=1): Measured(LIBRARY, 1.5),
    }
    table = TileTable(entries)
    table.write(tmp_path / "tiles.json")
    again = TileTable()
    again.read(tmp_path / "missing.json")
    assert list(again) == []
    again.read(tmp_path / "tiles.json")
    assert {product: again[product] for product in again} == entries


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("", "{", "double quotes"),
        ('"format": 3', '"format": 2', "its format is 2, but this release reads format 3"),
        ('"rows": 16', '"rows": 7', "is not a method of this release"),
        ('"depth": 48', '"depth": "x"', "depth"),
    ],
)
def test_a_damaged_file(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "tiles.json"
    TileTable({PRODUCT: Measured(TILES[0])}).write(path)
    text = path.read_text()
    path.write_text(text.replace(old, new) if old else new)
    with pytest.raises(EngineError, match=f"tiles.json is not a table of tiles: .*{message}.*delete it"):
        TileTable().read(path)


def test_a_file_with_a_tile_of_a_product_for_an_attention(tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    TileTable({ATTENTION: Measured(TILES[0])}).write(path)
    with pytest.raises(EngineError, match=r"Tile.* is not a method of this release for Attention"):
        TileTable().read(path)


def test_a_file_with_a_library_for_a_shape_that_it_does_not_take(tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    TileTable({PRODUCT: Measured(LIBRARY, 1.25)}).write(path)
    path.write_text(path.read_text().replace('"columns": 96', '"columns": 97'))
    with pytest.raises(EngineError, match="library is not a method of this release for Product"):
        TileTable().read(path)
