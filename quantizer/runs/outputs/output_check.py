"""Checks of one output of an engine: its figures, and the condition on them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from quantizer.report.output_record import ALIKE_DB, FURTHER_DB, is_no_further

HALF_DB = 30.0
"""Float16 has 11 bits: 66 dB for one rounding, and a network has hundreds."""
FLOAT_DB = 60.0
"""Float32 has 24 bits: 144 dB for one rounding."""


@dataclass(frozen=True, kw_only=True)
class OutputCheck:
    """One output of an engine at one shape.

    Attributes:
        batch: the rows of the shape.
        sequence: its tokens; None: rows are images.
        output: the name of the output.
        sqnr_db: the SQNR against the reference output, in dB; None: no difference; ``NOTHING_DB``: the reference is
            all zeros and has no power.
        float_db: the same against the float model's output.
        proxy_float_db: the SQNR of the reference output against the float model's: the error of quantization itself.
        cosine: the mean cosine of its vectors to the float model's.
        noise_float_db: the least SQNR of the reference against the float model with the noise of float sums; None: it
            was not needed.
    """

    batch: int
    sequence: int | None
    output: str
    sqnr_db: float | None
    float_db: float | None
    proxy_float_db: float | None
    cosine: float
    noise_float_db: float | None = None

    @property
    def size(self) -> str:
        """The shape in words."""
        return shape_words(self.batch, self.sequence)

    def is_no_further(self, decibels: float) -> bool:
        """Return whether the engine is at most so much further from the float model than PyTorch is."""
        return is_no_further(self.float_db, (self.proxy_float_db, self.noise_float_db), decibels)


@dataclass(frozen=True)
class Tolerance:
    """The condition on an engine's outputs.

    Attributes:
        decibels: the SQNR against the reference that is always enough, in dB.
        beyond_db: an engine also passes if it is at most this much further from the float model than the reference
            is, with the noise of float sums or without, in dB; None: it does not.
    """

    decibels: float
    beyond_db: float | None = None

    def __str__(self) -> str:
        least = f"SQNR of {self.decibels:g} dB or more"
        if self.beyond_db is None:
            return least
        return f"{least}, or at most {self.beyond_db:g} dB further from the float model than PyTorch"

    def holds(self, distance: OutputCheck) -> bool:
        """Return whether an output of an engine passes."""
        if distance.sqnr_db is None or distance.sqnr_db >= self.decibels:
            return True
        return self.beyond_db is not None and distance.is_no_further(self.beyond_db)


def far_from_float(checks: Iterable[OutputCheck]) -> float | None:
    """Return the least SQNR of outputs against the float model's, in dB; None: they are equal."""
    return min((check.float_db for check in checks if check.float_db is not None), default=None)


def shape_words(batch: int, sequence: int | None) -> str:
    """Return a shape in words: ``batch 8``, or ``batch 8 x sequence 128``."""
    return f"batch {batch}{'' if sequence is None else f' x sequence {sequence}'}"


def tolerance(asked: float | None, quantized: bool, float_dtype: torch.dtype) -> Tolerance:
    """Return the tolerance that was asked for, in dB, or the default for the engine's types."""
    if asked is not None:
        return Tolerance(asked)
    if quantized:
        return Tolerance(ALIKE_DB, FURTHER_DB)
    return Tolerance(FLOAT_DB if float_dtype == torch.float32 else HALF_DB)
