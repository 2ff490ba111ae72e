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

    @property
    def longest(self) -> int:
        """The maximum length of a sample; 0 for an engine of one length."""
        lengths = [sizes[SEQUENCE] for sizes in self.only if SEQUENCE in sizes]
        return max(lengths, default=self.dimensions.get(SEQUENCE, (0,))[-1])

    def fitting(self, samples: int, length: int = 0) -> tuple[int, int]:
        """Return the size of the batches in which samples of a length run, and the length to which they are padded."""
        minimum, _, maximum = self.dimensions[BATCH]
        usual = min(max(samples, minimum), maximum), max(length, self.dimensions.get(SEQUENCE, (0,))[0])
        if not self.only:
            return usual
        allowed = [(sizes.get(BATCH, usual[0]), sizes.get(SEQUENCE, usual[1])) for sizes in self.only]
        fitting = [size for size in allowed if size[1] >= length]
        enough = [size for size in fitting if size[0] >= samples]
        return min(enough) if enough else min(fitting, key=lambda size: (-size[0], size[1]))

    def batches(self, samples: int, length: int = 0) -> Iterator[tuple[slice, int]]:
        """Yield the samples of each batch, and the size to which the batch is filled."""
        size, _ = self.fitting(samples, length)
        for start in range(0, samples, size):
            stop = min(start + size, samples)
            yield slice(start, stop), size if self.only else self.fitting(stop - start, length)[0]

    def run(
        self, engine: Callable[[Mapping[str, Array]], Mapping[str, Array]], inputs: Mapping[str, Array], length: int = 0
    ) -> dict[str, Array]:
        """Return the outputs of any number of samples, from inputs padded to ``length``, one that ``fitting`` returned.

        The samples run in batches of an allowed size. The last sample repeats to fill a batch.

        Raises:
            EngineError: an output does not have one entry per sample, so that batches cannot be joined.
        """
        samples = len(next(iter(inputs.values())))
        parts = []
        for chunk, size in self.batches(samples, length):
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
        return joined(parts)


def joined(parts: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Return the outputs of several batches as those of one."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _filled(value: Array, size: int) -> Array:
    """Return samples of which the last one repeats up to a batch size."""
    return value if len(value) == size else np.concatenate([value, np.repeat(value[-1:], size - len(value), axis=0)])
