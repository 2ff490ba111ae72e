"""The plan: the decision for each site, made once from calibration statistics, as data.

Coverage shows the plan, ``quantize()`` applies it, and ``save()`` writes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from quantizer.numerics.formats import FLOAT16_MAX, INT8
from quantizer.plan.reasons import ReasonCode, RuleKind
from quantizer.proxy.weight import Computation, WeightView
from quantizer.utils.fingerprint import tensors_digest

_REMARKS = {"reason", "rule", "note", "bias_note", "smoothing", "rounding", "estimate", "sqnr_db", "clipped"}
"""Fields that only explain a decision."""
_OF_THE_MODEL = {"file", "line", "group", "range_group", "view", "computation"}
"""Fields that are equal in all plans of a model, or that name places in the source."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallRange:
    """The range of an activation in one call of a forward pass; fields as in ``OperandPlan``, as numbers.

    ``tensor`` is the index of the tensor among those that the range group reads in a pass. Operands that read the same
    tensor have the same range. -1: the range covers all calls.
    """

    tensor: int
    amax: float
    scale: float
    zero_point: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OperandPlan:
    """The decision for one operand.

    Attributes:
        quantized: whether the operand is in low precision; ``reason`` explains a False.
        amax: the range, float32 [] or [C], before the scale is rounded to the target's float type.
        scale: the scale, float32 [] or [C], that the quantizer uses.
        dtype: the format of the operand, if it is quantized.
        dynamic: whether an activation is quantized with the range of its values at each run; it then has no scale.
        axis: the axis of a weight's output channels (None: per tensor); with ``block_size``, of its input channels.
        block_size: the number of input channels that share a scale; if ``dynamic``, of neighbors in a row.
        zero_point: the quantized value of 0.0 in an asymmetric format (None: 0).
        minimum: the lowest value; like the range, after ``smooth``.
        maximum: the highest value; like the range, after ``smooth``.
        sqnr_db: the signal-to-quantization-noise ratio of the operand, in dB (None: not measured).
        clipped: the share of values beyond the range, 0 to 1.
        range_group: the name of the first of the operands that share the range.
        estimate: the calibrator that was chosen for the range (None: there was only one).
        group: the precision group, see ``decide_sites.py``.
        parameter: the path of the weight in the model.
        view: the weight as a view of the parameter (None: the parameter itself).
        computation: the computation of the weight from parameters and buffers, the largest of which is ``parameter``
            (None: the weight is not computed).
        smooth: float32 [K] along ``smooth_axis``; the activation is divided by it and the weight multiplied by it.
        spread: float32 [C] along ``axis``: the output channels have one scale times these factors (None: no factors).
        smoothing: a note on ``smooth``, or on why there is none (None: smoothing was not requested).
        codes: quantized weight values, int8 in the shape that the site reads, that replace rounding to nearest (None:
            rounding to nearest).
        rounding: a note on the choice of ``codes`` (None: it was not requested).
        given: whether the scale was loaded or trained, so that it is not computed from the weight.
        read_outside: the place outside of the site that reads the weight in float (None: calibration found none).
        calls: the ranges of calls 0, 1, .. of a pass, if they differ; other calls use ``scale``, which covers all
            (empty: all calls have one range).
        note: other remarks that the coverage shows.
    """

    name: str
    role: str
    quantized: bool
    reason: str | None = None
    amax: Tensor | None = None
    scale: Tensor | None = None
    dtype: str = INT8.name
    dynamic: bool = False
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
    computation: Computation | None = None
    smooth: Tensor | None = None
    smooth_axis: int | None = None
    spread: Tensor | None = None
    smoothing: str | None = None
    codes: Tensor | None = None
    rounding: str | None = None
    given: bool = False
    read_outside: str | None = None
    calls: tuple[CallRange, ...] = ()
    note: str | None = None

    @property
    def factor(self) -> Tensor | None:
        """The factor [K] along ``smooth_axis`` that multiplies the operand before quantization; None: 1."""
        return self.smooth if self.smooth is None or self.role == "weight" else self.smooth.reciprocal()

    @property
    def as_computed(self) -> bool:
        """True if a weight is a view or is computed, so that its strides may be any."""
        return self.view is not None or self.computation is not None

    @property
    def notes(self) -> list[str]:
        """The notes that the coverage shows."""
        outside = f"also read in float outside of its site, {self.read_outside}" if self.read_outside else None
        computed = None if self.computation is None else f"computed from {', '.join(self.computation.inputs)}"
        return [text for text in (self.rounding, self._calls_note, self.note, outside, computed) if text is not None]

    @property
    def _calls_note(self) -> str | None:
        if not self.several_ranges:
            return None
        amax = [call.amax for call in self.calls]
        return f"each of its {len(amax)} calls has its own range, amax {min(amax):.3g} to {max(amax):.3g}"

    @property
    def several_ranges(self) -> bool:
        """True if calls have different ranges, so that a pass must number its calls."""
        return len(self.calls) > 1

    def of_call(self, number: int | None) -> OperandPlan:
        """Return the plan with the range of call ``number`` of a pass; None: the range of all calls."""
        if number is None or number >= len(self.calls):
            return self
        call = self.calls[number]
        amax, scale = (torch.tensor(value, dtype=torch.float32) for value in (call.amax, call.scale))
        return replace(self, amax=amax, scale=scale, zero_point=call.zero_point, calls=())

    @property
    def call_scales(self) -> Tensor | None:
        """The scale of each call, float32 [N]; None if all calls have one scale."""
        scales = [call.scale for call in self.calls]
        return torch.tensor(scales, dtype=torch.float32) if self.several_ranges else None

    @property
    def parameters(self) -> tuple[str, ...]:
        """The paths of the parameters and buffers of a weight; empty for an activation."""
        if self.computation is not None:
            return self.computation.inputs
        return () if self.parameter is None else (self.parameter,)

    @property
    def largest_amax(self) -> float | None:
        """The largest amax over all channels; None without a range."""
        return None if self.amax is None else float(self.amax.max())

    @property
    def scales(self) -> int:
        """The number of scales; 1 without a range."""
        if self.several_ranges:
            return len(self.calls)
        return 1 if self.amax is None else self.amax.numel()

    @property
    def largest_scale(self) -> float | None:
        """The largest scale over all channels; None without a range."""
        return None if self.scale is None else float(self.scale.max())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SitePlan:
    """The decision for one site, with its reason.

    Attributes:
        rule: the rule that decided: a key of the configuration, ``target NAME`` for the target's profile (also for
            quantized sites) or ``fallback``; None: calibration statistics decided, see ``reason``.
        reads: the paths of the parameters among its operands, quantized or not.
        beyond_half: the largest magnitude in its module if it exceeds the float16 maximum (None: it does not).
        follows: the sites that must be quantized before this one can be. The output of a convolution needs that
            convolution; an add needs at least one of the results among its operands.
        bias_shift: float32 [C], added to the bias to cancel the mean error of the output, or [N, C] with one row for
            each call that has a range of its own (None: no correction).
        bias_note: a note on ``bias_shift``, or on why there is none (None: correction was not requested).
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
    bias_shift: Tensor | None = None
    bias_note: str | None = None
    follows: tuple[str, ...] = ()
    operands: tuple[OperandPlan, ...] = ()

    @property
    def calls_apart(self) -> int:
        """The number of calls of a pass with ranges of their own; 0: all calls have one range."""
        return max((len(operand.calls) for operand in self.operands if operand.several_ranges), default=0)


Plan = dict[str, SitePlan]


def with_fallback(plan: Plan, groups: Mapping[str, str]) -> Plan:
    """Return the plan with some groups in float; ``groups`` maps each group to its reason."""
    result: Plan = {}
    for path, entry in plan.items():
        operands = tuple(
            replace(o, quantized=False, reason=_fallback_reason(entry, groups[o.group]))
            if o.quantized and o.group is not None and o.group in groups
            else o
            for o in entry.operands
        )
        quantized = any(operand.quantized for operand in operands)
        changed = [new for new, old in zip(operands, entry.operands, strict=True) if new is not old]
        if not changed:
            result[path] = entry
        elif quantized:
            result[path] = replace(entry, operands=operands, reason=summary(operands, entry.bias_note))
        else:
            # The shift cancels the error of quantization, which a float operation does not have.
            result[path] = replace(
                entry,
                operands=operands,
                quantized=False,
                reason=changed[0].reason or "",
                rule=RuleKind.FALLBACK.text(),
                bias_shift=None,
                bias_note=None,
            )
    return without_orphans(result)


def with_biases_of(plan: Plan, other: Plan) -> Plan:
    """Return the plan with the bias shifts of another plan of the same sites."""
    return {
        path: replace(entry, bias_shift=source.bias_shift, bias_note=source.bias_note, reason=source.reason)
        if (source := other[path]).bias_shift is not entry.bias_shift or source.bias_note != entry.bias_note
        else entry
        for path, entry in plan.items()
    }


def without_orphans(plan: Plan) -> Plan:
    """Return the plan without output sites whose convolution is float, and without adds of no quantized output."""
    while True:
        orphans = {path: entry for path, entry in plan.items() if entry.quantized and _is_orphan(entry, plan)}
        if not orphans:
            return plan
        plan = {**plan, **{path: _orphaned(entry) for path, entry in orphans.items()}}


def _is_orphan(entry: SitePlan, plan: Plan) -> bool:
    entries = [plan.get(path) for path in entry.follows]
    quantized = [
        followed is not None and followed.quantized and all(o.quantized for o in followed.operands)
        for followed in entries
    ]
    if entry.kind == "output":
        return not all(quantized)
    return entry.kind == "residual_add" and bool(quantized) and not any(quantized)


def _orphaned(entry: SitePlan) -> SitePlan:
    why = ReasonCode.NOT_OF_CONVOLUTION.text()
    operands = tuple(replace(operand, quantized=False, reason=operand.reason or why) for operand in entry.operands)
    return replace(entry, quantized=False, reason=why, operands=operands)


def _fallback_reason(site: SitePlan, why: str) -> str:
    if site.beyond_half is None:
        return why
    return ReasonCode.IN_FLOAT32.text(why=why, largest=f"{site.beyond_half:.3g}", end=f"{FLOAT16_MAX:.0f}")


def summary(operands: tuple[OperandPlan, ...], bias_note: str | None = None) -> str:
    """Return the summary of a site, such as ``int8: input, weight; rhs not: REASON``, with all notes."""
    formats: dict[str, list[str]] = defaultdict(list)
    for operand in operands:
        if operand.quantized:
            blocks = f" in blocks of {operand.block_size}" if operand.block_size is not None else ""
            ranges = " with ranges at run time" if operand.dynamic else ""
            formats[operand.dtype + blocks + ranges].append(operand.name)
    quantized = [f"{dtype}: {', '.join(names)}" for dtype, names in formats.items()]
    unquantized = [f"{operand.name} not: {operand.reason}" for operand in operands if not operand.quantized]
    smoothing = [operand.smoothing for operand in operands if operand.smoothing and operand.role == "activation"]
    notes = [f"{operand.name}: {note}" for operand in operands if operand.quantized for note in operand.notes]
    return "; ".join([*quantized, *unquantized, *smoothing, *([] if bias_note is None else [bias_note]), *notes])


def plan_digest(plan: Mapping[str, SitePlan]) -> str:
    """Return the SHA-256 (hexadecimal) of all fields of a plan that change what a proxy of its model computes.

    New fields count unless they are listed in ``_REMARKS`` or ``_OF_THE_MODEL``: at worst a cached result is
    recomputed.
    """
    tensors: dict[str, Tensor] = {}
    values: list[str] = []
    for path, entry in plan.items():
        parts: list[SitePlan | OperandPlan] = [entry, *entry.operands]
        for place, part in enumerate(parts):
            for name in {field.name for field in fields(part)} - _REMARKS - _OF_THE_MODEL - {"operands"}:
                value = getattr(part, name)
                if isinstance(value, Tensor):
                    tensors[f"{path} {place} {name}"] = value
                else:
                    values.append(f"{path} {place} {name} {value!r}")
    return tensors_digest(tensors, "\n".join(sorted(values)))
