"""``DataSizes``: which axes of inputs are open, and the sizes that they have in the data."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantizer.utils.sizes import DataSizes


def ids(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long)


@pytest.mark.parametrize(
    ("batches", "axes"),
    [
        ([{"x": torch.zeros(8, 3, 32, 32)}], {"x": {0: "batch"}}),
        ([{"img": torch.zeros(8, 160, 160, 3, dtype=torch.uint8)}], {"img": {0: "batch"}}),
        ([{"ids": ids(16, 3, 5)}], {"ids": {0: "batch"}}),
        ([{"ids": ids(16, 5)}], {"ids": {0: "batch", 1: "sequence"}}),
        ([{"ids": ids(16, 1)}], {"ids": {0: "batch"}}),
        (
            [{"ids": ids(2, 9), "boxes": ids(2, 9, 4)}],
            {"ids": {0: "batch", 1: "sequence"}, "boxes": {0: "batch", 1: "sequence"}},
        ),
        (
            [{"ids": ids(2, 9), "other": ids(2, 5)}],
            {"ids": {0: "batch", 1: "sequence"}, "other": {0: "batch", 1: "other_sequence"}},
        ),
        ([{"x": torch.zeros(4, 9, 8), "mask": ids(4, 9)}], {"x": {0: "batch"}, "mask": {0: "batch"}}),
        ([{"x": torch.zeros(4, n, 16)} for n in (20, 30, 25)], {"x": {0: "batch", 1: "sequence"}}),
        (
            [{"x": torch.zeros(4, n, 16), "mask": ids(4, n)} for n in (20, 30)],
            {"x": {0: "batch", 1: "sequence"}, "mask": {0: "batch", 1: "sequence"}},
        ),
        ([{"x": torch.zeros(4, 16, n)} for n in (20, 30)], {"x": {0: "batch", 2: "x_axis2"}}),
        (
            [{"x": torch.zeros(4, 3, h, w)} for h, w in ((32, 32), (48, 32), (24, 24))],
            {"x": {0: "batch", 2: "x_axis2", 3: "x_axis3"}},
        ),
        ([{"x": torch.zeros(4, 3, n, n)} for n in (32, 48)], {"x": {0: "batch", 2: "x_axis2", 3: "x_axis2"}}),
        (
            [{"x": torch.zeros(n, 16), "edge_index": ids(2, e)} for n, e in ((53, 231), (40, 99))],
            {"x": {0: "batch"}, "edge_index": {1: "edge_index_axis1"}},
        ),
        (
            [{"x": torch.zeros(n, 16), "adjacency": torch.zeros(n, n)} for n in (53, 40)],
            {"x": {0: "batch"}, "adjacency": {0: "batch", 1: "batch"}},
        ),
        (
            [{"ids": ids(n, s), "mask": torch.zeros(n, 1, s, s, dtype=torch.bool)} for n, s in ((2, 9), (3, 7))],
            {"ids": {0: "batch", 1: "sequence"}, "mask": {0: "batch", 2: "sequence", 3: "sequence"}},
        ),
    ],
)
def test_axes_are_open_by_what_the_data_has(batches: list[dict[str, Tensor]], axes: dict[str, dict[int, str]]) -> None:
    assert DataSizes.of(batches).axes == axes


def test_sizes_are_those_of_the_data() -> None:
    sizes = DataSizes.of([{"x": torch.zeros(b, n, 16)} for b, n in ((8, 20), (8, 40), (5, 30))])
    assert sizes.usual == {"batch": 8, "sequence": 20}
    assert sizes.ranges == {"batch": (5, 8, 8), "sequence": (20, 20, 40)}
    assert sizes.seen["sequence"] == (20, 40, 30)
    fixed = sizes.only({"x": {1: "sequence"}})
    assert fixed.axes == {"x": {1: "sequence"}}
    assert fixed.seen == {"batch": (8,), "sequence": (20, 40, 30)}
    assert not fixed.is_open("batch")


def test_a_batch_is_cut_and_repeated_along_open_axes_alone() -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    sizes = DataSizes.of([{"x": x}, {"x": torch.zeros(2, 5, 4)}])
    made = sizes.resized({"x": x}, {"batch": 3, "sequence": 2, "other": 9})
    assert torch.equal(made["x"], x[[0, 1, 0], :2])
    assert sizes.only({"x": {1: "sequence"}}).resized({"x": x}, {"batch": 3})["x"] is x
