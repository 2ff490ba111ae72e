"""Inputs made up from an engine's own description, to run it without data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quantizer.engines.base import Array
from quantizer.engines.base import TensorSpec

__all__ = ["made_up_inputs"]


def made_up_inputs(specs: Sequence[TensorSpec], batch: int, sequence: int) -> dict[str, Array]:
    """An array for each input: ones for integers (a valid token id and mask), small random numbers for floats.

    Shapes: [None, 384] gives [batch, 384], [None, None] gives [batch, sequence].
    """
    random = np.random.default_rng(0)
    arrays: dict[str, Array] = {}
    for spec in specs:
        shape = [
            size if size is not None else (batch if axis == 0 else sequence) for axis, size in enumerate(spec.shape)
        ]
        values = random.standard_normal(shape) if spec.dtype.kind == "f" else np.ones(shape)
        arrays[spec.name] = values.astype(spec.dtype)
    return arrays
