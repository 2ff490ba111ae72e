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
    longest, padded = EngineSizes({"batch": (1, 2, 4), "sequence": (8, 16, 32)}).lengths(9)
    assert (longest, padded(3), padded(11)) == (32, 8, 11)
    longest, padded = EngineSizes({"batch": (2, 2, 4), "sequence": (8, 16, 32)}, ONLY).lengths(9)
    assert (longest, padded(3), padded(17)) == (32, 16, 32)
    assert EngineSizes({"batch": (2, 2, 4), "sequence": (8, 16, 32)}, ONLY).lengths(1)[0] == 8


def test_outputs_that_are_not_one_for_each_sample() -> None:
    sizes = EngineSizes({"batch": (1, 2, 2)})
    with pytest.raises(EngineError, match=r"'y' has the shape \[7\] for a batch of 2, .* the engine with 2 samples"):
        sizes.run(lambda inputs: {"y": np.zeros(7)}, {"x": np.zeros((3, 1))})
    assert sizes.run(lambda inputs: {"y": np.zeros(7)}, {"x": np.zeros((2, 1))})["y"].shape == (7,)
