"""Inputs made up from an engine's own description, to run it without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType

import numpy as np

from quantizer.engines.base import Array, Engine, TensorSpec
from quantizer.engines.dimensions import dimension_sizes
from quantizer.errors import EngineError

_MOST = 2**40
"""So many values no input has: a file that was damaged may ask for them."""


def made_up_inputs(
    specs: Sequence[TensorSpec],
    batch: int,
    sequence: int,
    whole: int = 1,
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Array]:
    """Return an array for each input: ones for integers (a valid token id and mask), small random numbers for floats.

    Shapes: [None, 384] gives [batch, 384], [None, None] gives [batch, sequence]; axes of one name get one size.

    Args:
        specs: the inputs.
        batch: size of the first dimension, where it is dynamic.
        sequence: size of the other dynamic dimensions.
        whole: value of integer inputs.
        sizes: sizes of dynamic dimensions by name, where they are known; they come before the two.

    Raises:
        EngineError: an input would be larger than any memory.
    """
    random = np.random.default_rng(0)
    named = dimension_sizes([spec.dimensions for spec in specs], batch, sequence, sizes)
    arrays: dict[str, Array] = {}
    for spec in specs:
        names = spec.dimensions or ("",) * len(spec.shape)
        shape = [
            size if size is not None else named.get(name, sequence if axis > 0 else batch)
            for axis, (size, name) in enumerate(zip(spec.shape, names, strict=True))
        ]
        if prod(shape) > _MOST:
            raise EngineError(f"input {spec} would have {prod(shape):.0e} values: a size in the file is wrong")
        values = random.standard_normal(shape) if spec.dtype.kind == "f" else np.full(shape, whole)
        arrays[spec.name] = values.astype(spec.dtype)
    return arrays


def working_inputs(
    engine: Engine, batch: int, sequence: int, sizes: Mapping[str, int] = MappingProxyType({})
) -> dict[str, Array]:
    """Return made-up inputs that the engine runs with: ones, or zeros if ones fail, as in a table of one row.

    Raises:
        EngineError: it runs with neither.
    """
    inputs = made_up_inputs(engine.inputs, batch, sequence, sizes=sizes)
    try:
        engine(inputs)
    except EngineError as error:
        inputs = made_up_inputs(engine.inputs, batch, sequence, whole=0, sizes=sizes)
        try:
            engine(inputs)
        except EngineError:
            raise error from None
    return inputs
