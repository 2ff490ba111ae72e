"""``EngineSizes``: the batch sizes and lengths that an engine accepts, and calls with any number of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from quantizer.engines import Array
from quantizer.errors import EngineError
from quantizer.utils.sizes import BATCH, SEQUENCE


@dataclass(frozen=True)
class EngineSizes:
    """The sizes of an engine.

    Attributes:
        dimensions: the minimum, usual and maximum size of each dynamic dimension.
        only: the combinations of sizes that the engine is limited to; empty for all.
    """

    dimensions: Mapping[str, Sequence[int]]
    only: Sequence[Mapping[str, int]] = ()

    def batch(self, samples: int) -> int:
        """Return the size of the batches in which the engine runs a number of samples."""
        minimum, _, maximum = self.dimensions[BATCH]
        allowed = sorted({sizes[BATCH] for sizes in self.only if BATCH in sizes})
        if allowed:
            return next((size for size in allowed if size >= samples), allowed[-1])
        return min(max(samples, minimum), maximum)

    def batches(self, samples: int) -> Iterator[tuple[slice, int]]:
        """Yield the samples of each batch, and the size to which the batch is filled."""
        size = self.batch(samples)
        for start in range(0, samples, size):
            stop = min(start + size, samples)
            yield slice(start, stop), size if self.only else self.batch(stop - start)

    def lengths(self, samples: int) -> tuple[int, Callable[[int], int]]:
        """Return the maximum length of these samples, and a function from a length to the next one that is allowed."""
        shortest, _, longest = self.dimensions[SEQUENCE]
        size = self.batch(samples)
        fitting = [sizes for sizes in self.only if sizes.get(BATCH, size) == size]
        lengths = sorted(sizes[SEQUENCE] for sizes in fitting if SEQUENCE in sizes)

        def padded(count: int) -> int:
            return next((length for length in lengths if length >= count), max(count, shortest))

        return (lengths[-1] if lengths else longest), padded

    def run(
        self, engine: Callable[[Mapping[str, Array]], Mapping[str, Array]], inputs: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Return the outputs of any number of samples, from inputs of an allowed length.

        The samples run in batches of an allowed size. The last sample repeats to fill a batch.

        Raises:
            EngineError: an output does not have one entry per sample, so that batches cannot be joined.
        """
        samples = len(next(iter(inputs.values())))
        parts = []
        for chunk, size in self.batches(samples):
            outputs = engine({name: _filled(value[chunk], size) for name, value in inputs.items()})
            if size == samples:
                return dict(outputs)
            for name, value in outputs.items():
                if value.ndim == 0 or len(value) != size:
                    raise EngineError(
                        f"output {name!r} has the shape {list(value.shape)} for a batch of {size}, not one entry per "
                        f"sample: call the engine with {size} samples"
                    )
            parts.append({name: value[: chunk.stop - chunk.start] for name, value in outputs.items()})
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _filled(value: Array, size: int) -> Array:
    """Return samples of which the last one repeats up to a batch size."""
    return value if len(value) == size else np.concatenate([value, np.repeat(value[-1:], size - len(value), axis=0)])
