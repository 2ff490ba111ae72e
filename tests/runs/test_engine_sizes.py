"""``EngineSizes``: which batches and lengths an engine gets, and that any number of samples comes back in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from quantizer.errors import EngineError
from quantizer.pipeline.engine_sizes import EngineSizes

ONLY = ({"batch": 4, "sequence": 16}, {"batch": 4, "sequence": 32}, {"batch": 2, "sequence": 8})


@pytest.mark.parametrize(
    ("batch", "only", "samples", "sizes"),
    [
        ((1, 2, 4), (), 3, [3]),
        ((1, 2, 4), (), 9, [4, 4, 1]),
        ((2, 2, 4), (), 9, [4, 4, 2]),
        ((2, 2, 4), (), 1, [2]),
        ((1, 2, 8), ({"batch": 3}, {"batch": 8}), 2, [3]),
        ((1, 2, 8), ({"batch": 3}, {"batch": 8}), 10, [8, 8]),
        ((1, 2, 8), ({"sequence": 3},), 10, [8, 8]),
    ],
)
def test_any_number_of_samples(
    batch: tuple[int, int, int], only: tuple[Mapping[str, int], ...], samples: int, sizes: list[int]
) -> None:
    ran = []

    def engine(inputs: Mapping[str, Any]) -> dict[str, Any]:
        ran.append(len(inputs["x"]))
        return {"y": inputs["x"] * 2}

    values = np.arange(samples * 2.0).reshape(samples, 2)
    outputs = EngineSizes({"batch": batch}, only).run(engine, {"x": values})
    assert ran == sizes
    assert np.array_equal(outputs["y"], values * 2)


def test_lengths_are_those_of_the_batches_that_run() -> None:
    sizes = EngineSizes({"batch": (1, 2, 4), "sequence": (8, 16, 32)})
    assert (sizes.longest, sizes.fitting(9, 3), sizes.fitting(9, 11)) == (32, (4, 8), (4, 11))
    only = EngineSizes({"batch": (2, 2, 4), "sequence": (8, 16, 32)}, ONLY)
    assert (only.longest, only.fitting(9, 3), only.fitting(9, 17)) == (32, (4, 16), (4, 32))
    assert only.fitting(1, 3) == (2, 8)
    assert EngineSizes({"batch": (1, 2, 4)}).longest == 0


def test_a_larger_batch_with_a_shorter_limit_cuts_no_sample() -> None:
    """Of the sizes of an engine, the largest batch often has the shortest length."""
    pairs = ((8, 128), (1, 512), (32, 16), (3, 256), (16, 45))
    only = tuple({"batch": batch, "sequence": length} for batch, length in pairs)
    sizes = EngineSizes({"batch": (1, 8, 32), "sequence": (16, 128, 512)}, only)
    assert sizes.fitting(10, 100) == (8, 128)
    assert sizes.fitting(40, 100) == (8, 128)
    assert sizes.fitting(40, 12) == (32, 16)
    assert sizes.fitting(2, 300) == (1, 512)
    ran = []

    def engine(inputs: Mapping[str, Any]) -> dict[str, Any]:
        ran.append(inputs["x"].shape)
        return {"y": inputs["x"].sum(1)}

    values = np.arange(10.0 * 128).reshape(10, 128)
    assert np.array_equal(sizes.run(engine, {"x": values}, 128)["y"], values.sum(1))
    assert ran == [(8, 128), (8, 128)]


def test_outputs_that_are_not_one_for_each_sample() -> None:
    sizes = EngineSizes({"batch": (1, 2, 2)})
    with pytest.raises(EngineError, match=r"'y' has the shape \[7\] for a batch of 2, .* the engine with 2 samples"):
        sizes.run(lambda inputs: {"y": np.zeros(7)}, {"x": np.zeros((3, 1))})
    assert sizes.run(lambda inputs: {"y": np.zeros(7)}, {"x": np.zeros((2, 1))})["y"].shape == (7,)
