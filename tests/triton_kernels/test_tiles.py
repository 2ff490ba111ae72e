"""The table of measured tiles, with times that the tests give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quantizer.errors import EngineError
from quantizer.numerics.triton_kernels.tiles import TILES, Product, TileTable, bucket, first_tile, tiles_for

PRODUCT = Product(64, 96, 48, "gelu, int8", "9.0")


def _calls() -> dict[object, Callable[[], object]]:
    return {tile: lambda tile=tile: tile for tile in (*TILES, None)}


def test_products_of_one_bucket_share_a_tile() -> None:
    assert [bucket(rows) for rows in (1, 16, 17, 64, 65, 4096)] == [16, 16, 32, 64, 128, 4096]
    assert {tile.rows for tile in tiles_for(1)} == {16}
    assert set(tiles_for(4096)) == set(TILES)


@pytest.mark.parametrize("fastest", [*TILES, None])
def test_the_fastest_is_kept(fastest: object) -> None:
    table = TileTable()
    times = table.measure(PRODUCT, _calls(), lambda call: 1.0 if call() == fastest else 2.0)
    assert len(times) == len(TILES) + 1
    assert table.tile(PRODUCT, 50) == fastest


def test_a_tile_that_does_not_compile_is_left_out() -> None:
    def seconds(call: Callable[[], object]) -> float:
        if call() != TILES[1]:
            raise RuntimeError("out of resource: shared memory")
        return 1.0

    table = TileTable()
    assert set(table.measure(PRODUCT, _calls(), seconds)) == {TILES[1]}
    assert table.tile(PRODUCT, 50) == TILES[1]


def test_a_product_that_was_never_measured_or_could_not_be_has_the_first_choice() -> None:
    def seconds(_: Callable[[], object]) -> float:
        raise RuntimeError("no kernel image")

    table = TileTable()
    assert table.measure(PRODUCT, _calls(), seconds) == {}
    assert PRODUCT not in table
    assert table.tile(PRODUCT, 50) == first_tile(50)


def test_a_table_is_kept_in_a_file(tmp_path: Path) -> None:
    other = Product(16, 1, 2, "none", "8.0")
    table = TileTable({PRODUCT: TILES[2], other: None})
    table.write(tmp_path / "tiles.json")
    again = TileTable()
    again.read(tmp_path / "missing.json")
    assert list(again) == []
    again.read(tmp_path / "tiles.json")
    assert {product: again.tile(product, 1) for product in again} == {PRODUCT: TILES[2], other: None}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("", "{", "double quotes"),
        ('"format": 1', '"format": 9', "its format is 9"),
        ('"rows": 16', '"rows": 7', "tile"),
    ],
)
def test_a_damaged_file(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "tiles.json"
    TileTable({PRODUCT: TILES[0]}).write(path)
    text = path.read_text()
    path.write_text(text.replace(old, new) if old else new)
    with pytest.raises(EngineError, match=f"tiles.json is not a table of tiles: .*{message}.*delete it"):
        TileTable().read(path)
