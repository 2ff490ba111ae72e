"""Names and sizes of the dynamic dimensions of inputs: axes of one name have one size, in every input and call.

An ONNX file states the names, and its libraries do not enforce them. OpenVINO, given two sizes, may return the result
of an earlier call, and go on doing so; its engine files do not keep the names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from quantizer.common.decoder_cache import PAST, TOTAL


@dataclass(frozen=True)
class InputSizes:
    """Sizes for the dynamic dimensions of made-up inputs.

    Attributes:
        batch: the size of the first dimension of an input.
        sequence: the size of its other dimensions, such as the tokens of a text.
        named: sizes of dimensions by name, where they are known; they come before the two.
    """

    batch: int = 8
    sequence: int = 128
    named: Mapping[str, int] = field(default_factory=dict)

    def of(self, shapes: Iterable[Sequence[str]]) -> dict[str, int]:
        """Return a size for each name of a dimension; ``shapes`` has the names of the axes of each input.

        A name other than ``batch`` or ``sequence`` gets the batch's size if it is the first axis of every input that
        has it, else the sequence's: [b, s] gives b the batch's size and s the sequence's. With a cache, ``sequence``
        tokens are one that is read and those before it, which are in the cache.
        """
        sizes: dict[str, int] = {}
        for names in shapes:
            for axis, name in enumerate(names):
                if name and (axis > 0 or name not in sizes):
                    sizes[name] = self.sequence if axis > 0 else self.batch
        sizes |= {"batch": self.batch, "sequence": self.sequence, **self.named}
        return sizes | {PAST: self.sequence - 1, TOTAL: self.sequence, "sequence": 1} if PAST in sizes else sizes

    def words(self, shapes: Iterable[Sequence[int | str | None]]) -> str:
        """Return what inputs were made up with: ``8 x 128``, or ``batch 8`` where only the number of rows varies.

        Where other dimensions vary, each is named: ``batch 8, x_axis2 160``. ``shapes`` has the axes of each input: a
        size or an empty name where it is fixed, None or a name where it varies.
        """
        others = [f"{name} {size}" for name, size in self.named.items() if name != "batch"]
        if any(name not in ("batch", "sequence") for name in self.named):
            return ", ".join([f"batch {self.batch}", *others])
        varies = any(size is None or (isinstance(size, str) and size) for shape in shapes for size in shape[1:])
        return f"{self.batch} x {self.sequence}" if varies else f"batch {self.batch}"


USUAL_SIZES = InputSizes()


def ranges_with_cache(ranges: Mapping[str, Sequence[int]], shapes: Iterable[Sequence[str]]) -> dict[str, Sequence[int]]:
    """Return the ranges of the dimensions of a file; with a cache, those of ``sequence`` hold for all its tokens.

    The usual call of such a decoder reads one token.

    Args:
        ranges: smallest, usual and largest size of each name.
        shapes: the names of the axes of each input.
    """
    if "sequence" not in ranges or not any(PAST in names for names in shapes):
        return dict(ranges)
    _, usual, most = ranges["sequence"]
    return {**ranges, "sequence": (1, 1, most), PAST: (0, usual - 1, most - 1), TOTAL: (1, usual, most)}
