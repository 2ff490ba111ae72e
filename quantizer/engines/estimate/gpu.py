"""The figures of one GPU of each compute capability: how fast it multiplies, and how fast it moves bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quantizer.engines.inspection.inspection import LOW_PRECISIONS
from quantizer.errors import EngineError

DEFAULT = "sm89"
"""The compute capability that is taken where none is named."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU as its data sheet has it: dense products in its tensor cores, which accumulate in their widest type.

    What a kernel reaches of that is less, and ``math_share`` and ``memory_share`` are assumptions, as ``kernel_us`` is:
    the model orders plans, and no figure of it is a latency.

    Attributes:
        name: the GPU.
        half_tera: products and additions of 16-bit floats, in 10^12 a second.
        low_tera: those in low precision.
        gigabytes: bytes that its memory moves, in 10^9 a second.
        math_share: what products reach of their peak.
        memory_share: what the memory reaches.
        kernel_us: the time of a kernel that does nothing, in microseconds.
    """

    name: str
    half_tera: float
    low_tera: float
    gigabytes: float
    math_share: float = 0.6
    memory_share: float = 0.75
    kernel_us: float = 2.0

    def math_us(self, multiply_adds: int, precision: str) -> float:
        """Return the time of products, in microseconds. 32-bit floats count as 16-bit ones."""
        tera = self.low_tera if precision in LOW_PRECISIONS else self.half_tera
        return 2 * multiply_adds / (tera * 1e6 * self.math_share)

    def memory_us(self, size: float) -> float:
        """Return the time in which so many bytes are moved, in microseconds."""
        return size / (self.gigabytes * 1e3 * self.memory_share)


_GPUS: Mapping[str, Gpu] = {
    "sm75": Gpu(name="T4", half_tera=65, low_tera=130, gigabytes=320),
    "sm80": Gpu(name="A100", half_tera=312, low_tera=624, gigabytes=1555),
    "sm86": Gpu(name="A10", half_tera=125, low_tera=250, gigabytes=600),
    "sm89": Gpu(name="L4", half_tera=121, low_tera=242, gigabytes=300),
    "sm90": Gpu(name="H100", half_tera=989, low_tera=1979, gigabytes=3350),
    "sm120": Gpu(name="GeForce RTX 5090", half_tera=419, low_tera=838, gigabytes=1792),
}


def gpu_of(capability: str = DEFAULT) -> Gpu:
    """Return the GPU that stands for a compute capability: the latest of those here that are not later.

    Raises:
        EngineError: there is none, or this is no compute capability.
    """
    known = [
        name for name in _GPUS if re.fullmatch("sm[0-9]{2,3}", capability) and _number(name) <= _number(capability)
    ]
    if not known:
        raise EngineError(f"no figures of a GPU with {capability!r}; expected {min(_GPUS, key=_number)} or later")
    return _GPUS[max(known, key=_number)]


def least(capabilities: Sequence[str]) -> str:
    """Return the earliest of some compute capabilities."""
    return min(capabilities, key=_number)


def _number(capability: str) -> int:
    return int(capability.removeprefix("sm"))
