"""The records of sites: what became of each, the values that its operands took, and the products without one."""

from __future__ import annotations

from dataclasses import dataclass

from quantizer.reasons import ReasonCode
from quantizer.reasons import RuleKind
from quantizer.report.record_base import Record

__all__ = ["Histogram", "Operand", "RangeCandidate", "Site", "UnquantizedProduct"]

# An add of integers, tuples or broadcasts is found like any other, but tells a reader nothing.
_QUIET = (
    ReasonCode.NOT_TENSORS,
    ReasonCode.ADD_BROADCASTS,
    ReasonCode.ADD_PARAMETER,
    ReasonCode.ADD_UNWEIGHTED,
    ReasonCode.ADD_ONE_PRODUCT,
)


@dataclass(frozen=True, kw_only=True)
class Operand(Record):
    """One operand of a site."""

    name: str
    """Name of the operand quantizer."""
    role: str
    """``activation`` or ``weight``."""
    quantized: bool
    """Whether this operand is in low precision."""
    dtype: str = "int8"
    """The format that it is held in where it is quantized: ``int8``, ``uint8``, ``fp8``, ``int4``."""
    block_size: int | None = None
    """How many neighbours along the input channels of a weight share a scale; null where there are no blocks."""
    zero_point: int | None = None
    """The step of 0.0 in an asymmetric format; null in a symmetric one."""
    minimum: float | None = None
    """Lowest value seen; null where none was."""
    maximum: float | None = None
    """Highest value seen; null where none was."""
    amax: float | None = None
    """Largest absolute value that is represented (of all channels); null where there is no range."""
    scale: float | None = None
    """Step between two neighbouring values (the largest of all channels); null where there is no range."""
    channels: int = 1
    """Number of ranges: 1 is per tensor, more is one for each output channel, or for each block."""
    sqnr_db: float | None = None
    """Signal to quantization noise of this operand in calibration, in dB; null where it was not measured."""
    clipped: float | None = None
    """Share of the values beyond the range in calibration, 0 to 1; null where it was not measured."""
    estimate: str | None = None
    """The calibrator that was chosen for the range among several; null where there was no choice."""
    group: str | None = None
    """The precision group: what goes back to float together; null where there is none."""


@dataclass(frozen=True, kw_only=True)
class Site(Record):
    """One call of a quantizable operation, quantized or not."""

    name: str
    """Full name: the path of the module and the operation in its function."""
    kind: str
    """Kind of operation: ``linear``, ``conv``, ``matmul``, ``residual_add``."""
    host_type: str
    """Type of the module that runs the operation."""
    file: str
    """Source file that holds the operation."""
    line: int
    """Line in that file, from 1."""
    quantized: bool
    """Whether the site runs in low precision."""
    reason: str
    """Why it is quantized, or why not."""
    rule: str | None = None
    """The rule of the configuration that decided, such as ``exclude.names: classifier``; null where none did."""
    multiply_adds: int | None = None
    """Multiply-adds of one call in calibration; null where they were not counted."""
    operands: tuple[Operand, ...] = ()
    """The operands that can be quantized."""

    @property
    def quiet(self) -> bool:
        """True for an addition that is no candidate, or a table that nobody asked to quantize: no view shows it."""
        if self.kind == "embedding":
            return self.rule == RuleKind.SWITCH.text(key="embedding", value="false")
        return self.kind == "residual_add" and not self.quantized and ReasonCode.of(self.reason) in _QUIET


@dataclass(frozen=True, kw_only=True)
class RangeCandidate(Record):
    """A range that an operand might have."""

    name: str
    """How it is estimated: ``max``, ``percentile 99.9``, ``mse``, ``entropy``; ``chosen`` for a range that none of
    them gives."""
    amax: float
    """Largest absolute value that it represents."""
    clipped: float
    """Share of the values beyond it, 0 to 1."""
    sqnr_db: float
    """Signal to quantization noise of the operand with this range, in dB."""
    chosen: bool = False
    """Whether this is the range that the operand has."""


@dataclass(frozen=True, kw_only=True)
class Histogram(Record):
    """The absolute values that an operand took in calibration, and what ranges would make of them."""

    name: str
    """The operand, as ``SITE.OPERAND``."""
    dtype: str
    """The format that the candidates are judged by."""
    minimum: float
    """Lowest value seen."""
    maximum: float
    """Highest value seen."""
    width: float
    """Width of a bin."""
    counts: tuple[int, ...]
    """Number of values in each bin: bin i holds absolute values from i times the width up to the next bin."""
    candidates: tuple[RangeCandidate, ...]
    """Ranges to choose from, the largest first."""


@dataclass(frozen=True, kw_only=True)
class UnquantizedProduct(Record):
    """Matrix products or convolutions of one operation in one place that do not run in low precision."""

    path: str
    """Path of the innermost module that was running; empty for the model itself."""
    site: str | None = None
    """Name of the site; null where the product ran outside of any site."""
    operation: str
    """The operation as torch executed it, such as ``addmm``."""
    multiply_adds: int
    """Multiply-adds of all its calls in calibration."""
    share: float
    """Share of all multiply-adds, 0 to 1."""
    reason: str
    """Why; one of a closed list, such as ``excluded by rule``."""
    detail: str = ""
    """The evidence: the calling function and line, the type of the operands, or what the site says."""
