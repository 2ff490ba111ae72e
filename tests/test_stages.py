"""What an engine is called with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from quantizer.engines import TensorSpec
from quantizer.stages import engine_inputs


def test_an_engine_of_half_precision_takes_images_in_half() -> None:
    specs = (TensorSpec("pixel_values", np.dtype("float16"), (None, 3)), TensorSpec("ids", np.dtype("int64"), (None,)))
    engine: Any = SimpleNamespace(inputs=specs)
    made = engine_inputs(
        engine, {"pixel_values": torch.ones(2, 3) / 3, "ids": torch.arange(2), "unused": torch.ones(1)}
    )
    assert {name: (array.dtype.name, array.shape) for name, array in made.items()} == {
        "pixel_values": ("float16", (2, 3)),
        "ids": ("int64", (2,)),
    }
    assert made["pixel_values"][0, 0] == np.float16(1 / 3)
