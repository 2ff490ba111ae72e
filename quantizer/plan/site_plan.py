"""The plan: what becomes of each site, decided once from what calibration saw, and then data.

A plan is what coverage shows, what ``quantize()`` carries out, and what is saved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace

from torch import Tensor

from quantizer.numerics.float16 import FLOAT16_MAX
from quantizer.numerics.qtype import INT8
from quantizer.proxy.weight import WeightView
from quantizer.reasons import ReasonCode
from quantizer.reasons import RuleKind

__all__ = [
    "OperandPlan",
    "Plan",
    "SitePlan",
    "with_fallback",
    "summary",
]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OperandPlan:
    """The decision for one operand, held in the format ``dtype`` where it is quantized.

    ``amax`` [] or [C] is the range before the target's float type rounds the scale; ``scale`` [] or [C] is what the
    quantizer uses. ``range_group`` names the operands that share one range; ``clipped`` is the share of values beyond
    it; ``estimate`` the calibrator that was chosen for it among several (None: there was no choice); ``axis`` the
    output channels of a weight (None: per tensor), or with ``block_size`` its input channels, of which so many share a
    scale; ``zero_point`` the step of 0.0 of an asymmetric format (None: 0); ``parameter`` the weight's path in the
    model and ``view`` how the operand shows it (None: as it is).

    ``smooth`` [K] along ``smooth_axis`` is what an activation is divided by and a weight multiplied by before it is
    rounded, and ``smoothing`` says so in words, or why not (both None: nobody asked). Ranges, minimum and maximum are
    those of the operand after that.

    ``given``: the scale is no function of the weight: it came from elsewhere, or from a training. ``read_outside``:
    where the weight is read outside of its site, as floats (None: nowhere that calibration saw). ``note`` says what
    else a reader of the coverage should know.
    """

    name: str
    role: str
    quantized: bool
    reason: str | None = None
    amax: Tensor | None = None
    scale: Tensor | None = None
    dtype: str = INT8.name
    axis: int | None = None
    block_size: int | None = None
    zero_point: int | None = None
    minimum: float | None = None
    maximum: float | None = None
    sqnr_db: float | None = None
    clipped: float | None = None
    range_group: str | None = None
    estimate: str | None = None
    group: str | None = None
    parameter: str | None = None
    view: WeightView | None = None
    smooth: Tensor | None = None
    smooth_axis: int | None = None
    smoothing: str | None = None
    given: bool = False
    read_outside: str | None = None
    note: str | None = None

    @property
    def factor(self) -> Tensor | None:
        """The factor of the operand before it is rounded, [K] along ``smooth_axis``; None: 1."""
        return self.smooth if self.smooth is None or self.role == "weight" else self.smooth.reciprocal()

    @property
    def notes(self) -> list[str]:
        """A note for the reader of a coverage."""
        outside = f"read as floats outside of its site too, {self.read_outside}" if self.read_outside else None
        return [text for text in (self.note, outside) if text is not None]

    @property
    def largest_amax(self) -> float | None:
        """The largest amax of its channels; None where no range was seen."""
        return None if self.amax is None else float(self.amax.max())

    @property
    def scales(self) -> int:
        """The number of its scales; 1 where no range was seen."""
        return 1 if self.amax is None else self.amax.numel()

    @property
    def largest_scale(self) -> float | None:
        """The largest scale of its channels; None where no range was seen."""
        return None if self.scale is None else float(self.scale.max())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SitePlan:
    """The decision for one site, with its reason.

    ``rule`` is what decided: an entry of the configuration, ``target NAME`` for the target's profile (also of a site
    that is quantized), ``fallback``; None: what calibration saw of the operands, as ``reason`` says.

    ``reads`` are the parameters among its operands, whether quantized or not. ``beyond_half`` is the largest magnitude
    in its module where float16 cannot hold that (None: it can).
    """

    name: str
    operation: str
    kind: str
    host_type: str
    file: str
    line: int
    quantized: bool
    reason: str
    rule: str | None = None
    multiply_adds: int = 0
    reads: tuple[str, ...] = ()
    beyond_half: float | None = None
    operands: tuple[OperandPlan, ...] = ()


Plan = dict[str, SitePlan]


def with_fallback(plan: Plan, groups: Mapping[str, str]) -> Plan:
    """Return the plan with whole groups back in float; ``groups`` gives each one's reason."""
    result: Plan = {}
    for path, entry in plan.items():
        operands = tuple(
            replace(o, quantized=False, reason=_put_back(entry, groups[o.group]))
            if o.quantized and o.group is not None and o.group in groups
            else o
            for o in entry.operands
        )
        quantized = any(operand.quantized for operand in operands)
        changed = [new for new, old in zip(operands, entry.operands, strict=True) if new is not old]
        reason = entry.reason
        if changed:
            reason = summary(operands) if quantized else changed[0].reason or ""
        rule = RuleKind.FALLBACK.text() if changed and not quantized else entry.rule
        result[path] = replace(entry, operands=operands, quantized=quantized, reason=reason, rule=rule)
    return result


def _put_back(site: SitePlan, why: str) -> str:
    if site.beyond_half is None:
        return why
    return ReasonCode.IN_FLOAT32.text(why=why, largest=f"{site.beyond_half:.3g}", end=f"{FLOAT16_MAX:.0f}")


def summary(operands: tuple[OperandPlan, ...]) -> str:
    """``int8: input, weight``, or format by format, and what is left out."""
    formats: dict[str, list[str]] = defaultdict(list)
    for operand in operands:
        if operand.quantized:
            blocks = f" in blocks of {operand.block_size}" if operand.block_size is not None else ""
            formats[operand.dtype + blocks].append(operand.name)
    held = [f"{dtype}: {', '.join(names)}" for dtype, names in formats.items()]
    left = [f"{operand.name} not: {operand.reason}" for operand in operands if not operand.quantized]
    smoothing = [operand.smoothing for operand in operands if operand.smoothing and operand.role == "activation"]
    notes = [f"{operand.name}: {note}" for operand in operands if operand.quantized for note in operand.notes]
    return "; ".join([*held, *left, *smoothing, *notes])
