"""The records of sites: the decision for each, its operands, their histograms, and the products in float."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from quantizer.reasons import ReasonCode, RuleKind
from quantizer.report.record_base import Record

# Additions of integers, tuples or broadcasts are sites like all others, but of no interest to a reader.
_QUIET = (
    ReasonCode.NOT_TENSORS,
    ReasonCode.ADD_BROADCASTS,
    ReasonCode.ADD_PARAMETER,
    ReasonCode.ADD_UNWEIGHTED,
    ReasonCode.ADD_ONE_PRODUCT,
)
_FUNCTIONAL = ("torch", "nn", "functional.py")


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
    """Its number format if it is quantized: ``int8``, ``uint8``, ``fp8``, ``int4``."""
    dynamic: bool = False
    """Whether its range is that of its values at each run, so that it has neither ``amax`` nor ``scale``."""
    block_size: int | None = None
    """How many neighbours along the input channels of a weight share a scale; null without blocks."""
    zero_point: int | None = None
    """The code of 0.0 in an asymmetric format; null in a symmetric one."""
    minimum: float | None = None
    """Lowest value in calibration; null if there was none."""
    maximum: float | None = None
    """Highest value in calibration; null if there was none."""
    amax: float | None = None
    """Largest absolute value that the format represents (over all channels); null if there is no range."""
    scale: float | None = None
    """Scale, the value of one step of the format (the largest of all channels); null if there is no range."""
    channels: int = 1
    """Number of scales: 1 is per tensor, more are one for each output channel, block, or call of a pass."""
    sqnr_db: float | None = None
    """Signal to quantization noise of this operand in calibration, in dB; null if it was not measured."""
    clipped: float | None = None
    """Share of the values beyond the range in calibration, 0 to 1; null if it was not measured."""
    estimate: str | None = None
    """The calibrator that was chosen for the range among several; null if there was no choice."""
    group: str | None = None
    """The precision group, whose operands fall back to float together; null if there is none."""


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
    """The rule of the configuration that decided, such as ``exclude.names: classifier``; null if none did."""
    multiply_adds: int | None = None
    """Multiply-adds of all its calls in calibration; null if they were not counted."""
    operands: tuple[Operand, ...] = ()
    """The operands that can be quantized."""

    @property
    def quiet(self) -> bool:
        """True for an addition that is no candidate, and for an embedding that is not worth it: tables omit both."""
        if self.kind == "embedding" and not self.quantized:
            return self.rule in {RuleKind.SWITCH.text(key="embedding", value=value) for value in ("false", "auto")}
        if self.kind != "residual_add" or self.quantized:
            return False
        code = ReasonCode.of(self.reason)
        # torch.nn.functional adds sizes and offsets; the branches of a model are not joined there.
        return code in _QUIET or (code is ReasonCode.PASSED_ON and PurePath(self.file).parts[-3:] == _FUNCTIONAL)

    @property
    def ran(self) -> bool:
        """False if calibration never reached it, as the branch for another ``padding_mode`` in ``nn.Conv2d``."""
        return ReasonCode.of(self.reason) is not ReasonCode.NEVER_RAN

    @property
    def place(self) -> str:
        """Its source as ``file.py:350``; empty if there is none."""
        return f"{PurePath(self.file).name}:{self.line}" if self.file else ""


@dataclass(frozen=True, kw_only=True)
class RangeCandidate(Record):
    """A candidate for the range of an operand."""

    name: str
    """The estimate: ``max``, ``percentile 99.9``, ``mse``, ``entropy``, ``0.81 of max``; ``chosen`` for any other
    range."""
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
    """The absolute values of an operand in calibration, with candidates for its range."""

    name: str
    """The operand, as ``SITE.OPERAND``."""
    dtype: str
    """The format for which the candidates are judged."""
    minimum: float
    """Lowest value in calibration."""
    maximum: float
    """Highest value in calibration."""
    width: float
    """Width of a bin."""
    counts: tuple[int, ...]
    """Number of values in each bin: bin i holds absolute values from i times the width up to the next bin."""
    candidates: tuple[RangeCandidate, ...]
    """The candidate ranges, the largest first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.counts, default=-1) < 0 or max(self.counts) == 0:
            raise ValueError(f"histogram of {self.name}: expected counts of 0 or more, and not all of them 0")


@dataclass(frozen=True, kw_only=True)
class UnquantizedProduct(Record):
    """Matrix products or convolutions of one operation in one place that do not run in low precision."""

    path: str
    """Path of the innermost module that computed the product; empty for the model itself."""
    site: str | None = None
    """Name of the site; null if the product ran outside of any site."""
    operation: str
    """The operation as torch executed it, such as ``addmm``."""
    multiply_adds: int
    """Multiply-adds of all its calls in calibration."""
    share: float
    """Share of all multiply-adds, 0 to 1."""
    reason: str
    """Why; one of a closed list, such as ``excluded by rule``."""
    detail: str = ""
    """The evidence: the calling function and line, the type of the operands, or the reason of the site."""
