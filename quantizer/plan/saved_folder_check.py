"""Checks that a plan from a file is consistent; the types of its values were checked when it was read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from quantizer.numerics.qtype import QTYPES
from quantizer.plan.site_plan import OperandPlan, SitePlan
from quantizer.plan.weight_codes import code_faults

_ROLES = ("activation", "weight")
_TENSORS = ("amax", "scale", "smooth", "spread")


def check_plan(sites: Sequence[SitePlan], plan: Mapping[str, SitePlan], tensors: Mapping[str, Tensor]) -> None:
    """Check a plan and the tensors of its operands.

    Args:
        sites: the sites in the order of the file.
        plan: the same by name, each operand with its tensors.
        tensors: all tensors of the file, by ``SITE/OPERAND/FIELD`` or ``SITE/bias_shift``.

    Raises:
        ValueError: the plan is inconsistent; the message gives the first place in the file.
    """
    names: set[str] = set()
    known: set[str] = set()
    for number, site in enumerate(plan[site.name] for site in sites):
        place = f"sites[{number}]"
        if site.name in names:
            raise ValueError(f"{place}.name: {site.name!r} is there twice")
        names.add(site.name)
        for fault in _of_site(site):
            raise ValueError(f"{place}.{fault}")
        own = [operand.name for operand in site.operands]
        if len(set(own)) < len(own):
            raise ValueError(f"{place}.operands: two of them have one name, of {', '.join(own)}")
        for index, operand in enumerate(site.operands):
            for fault in _of_operand(operand):
                raise ValueError(f"{place}.operands[{index}].{fault}")
            known |= {f"{site.name}/{operand.name}/{field}" for field in (*_TENSORS, "codes")}
        known.add(f"{site.name}/bias_shift")
    lost = [name for name in tensors if name not in known]
    if lost:
        raise ValueError(f"the tensor {lost[0]!r} belongs to no site or operand")


def _of_site(site: SitePlan) -> Iterator[str]:
    for name, value in (("line", site.line), ("multiply_adds", site.multiply_adds)):
        if value < 0:
            yield f"{name}: expected 0 or more, got {value}"
    if site.quantized != any(operand.quantized for operand in site.operands):
        yield f"quantized: is {site.quantized}, and its operands say otherwise"
    shift = site.bias_shift
    if shift is None:
        return
    if not site.quantized:
        yield "bias_shift: there is one, and the site is float"
    elif shift.dtype != torch.float32 or shift.dim() != 1 + (site.calls_apart > 0):
        expected = f"[{site.calls_apart}, C]" if site.calls_apart else "[C]"
        yield f"bias_shift: expected a tensor of float32 {expected}, got {shift.dtype} {list(shift.shape)}"
    elif not bool(torch.isfinite(shift).all()):
        yield "bias_shift: expected finite numbers"


def _of_operand(operand: OperandPlan) -> Iterator[str]:
    if operand.role not in _ROLES:
        yield f"role: expected {' or '.join(_ROLES)}, got {operand.role!r}"
    if operand.dtype not in QTYPES:
        yield f"dtype: expected one of {', '.join(QTYPES)}, got {operand.dtype!r}"
        return
    yield from _of_tensors(operand)
    yield from _of_view(operand)
    yield from _of_calls(operand)
    if operand.block_size is not None and operand.block_size < 1:
        yield f"block_size: expected 1 or more, got {operand.block_size}"
    kind = QTYPES[operand.dtype]
    if operand.zero_point is not None and not (kind.has_zero_point and kind.qmin <= operand.zero_point <= kind.qmax):
        steps = f"a step of {kind.name}, {kind.qmin} to {kind.qmax}" if kind.has_zero_point else f"none for {kind.name}"
        yield f"zero_point: expected {steps}, got {operand.zero_point}"
    for name, value in (("minimum", operand.minimum), ("maximum", operand.maximum)):
        if value is not None and math.isnan(value):
            yield f"{name}: expected a number, got NaN"
    if operand.quantized and operand.role == "weight" and operand.parameter is None:
        yield "parameter: is null for a weight that is quantized"
    yield from (f"computation.{fault}" for fault in (operand.computation.faults() if operand.computation else ()))
    yield from code_faults(operand)


def _of_tensors(operand: OperandPlan) -> Iterator[str]:
    for name in _TENSORS:
        tensor: Tensor | None = getattr(operand, name)
        if tensor is not None and tensor.dtype != torch.float32:
            yield f"{name}: expected a tensor of float32, got {tensor.dtype}"
    scale, amax, smooth = operand.scale, operand.amax, operand.smooth
    if operand.dynamic and (operand.role == "weight" or scale is not None or QTYPES[operand.dtype].is_float):
        yield "dynamic: expected an activation in integers without a scale"
    if operand.quantized and not operand.dynamic and (scale is None or amax is None):
        yield "scale: there is no range of it, and it is quantized"
    if (smooth is None) != (operand.smooth_axis is None) or (smooth is not None and smooth.dim() != 1):
        yield "smooth_axis: there is one where there are factors [K] along it, and only there"
    if scale is None or amax is None:
        return
    if operand.quantized and not bool((torch.isfinite(scale) & (scale > 0)).all()):
        yield "scale: expected numbers above 0"
    if operand.spread is not None and operand.spread.shape != scale.shape:
        yield f"spread: its shape is {list(operand.spread.shape)}, that of scale {list(scale.shape)}"
    if scale.shape != amax.shape:
        yield f"scale: its shape is {list(scale.shape)}, that of amax {list(amax.shape)}"
    # One scale, one for each index of an axis, or one for each block along it, of a matrix or of those of experts.
    expected = (0,) if operand.axis is None else (1,) if operand.block_size is None else (2, 3)
    if scale.dim() not in expected or (operand.axis is None and operand.block_size is not None):
        yield f"axis: is {operand.axis} with block_size {operand.block_size}, and its scales are {list(scale.shape)}"


def _of_calls(operand: OperandPlan) -> Iterator[str]:
    if operand.calls and (operand.role == "weight" or operand.scale is None or operand.axis is not None):
        yield "calls: expected them for an activation with one scale"
    kind = QTYPES[operand.dtype]
    for number, call in enumerate(operand.calls):
        if not (math.isfinite(call.scale) and call.scale > 0 and math.isfinite(call.amax) and call.amax >= 0):
            yield f"calls[{number}]: expected a scale above 0 and an amax from 0, got {call.scale} and {call.amax}"
        point = call.zero_point
        if (point is None) != (operand.zero_point is None) or not kind.qmin <= (point or 0) <= kind.qmax:
            yield f"calls[{number}].zero_point: expected one such as that of all calls, got {point}"


def _of_view(operand: OperandPlan) -> Iterator[str]:
    view = operand.view
    if view is None:
        return
    if any(size < 0 for size in view.shape) or view.offset < 0:
        yield f"view: expected sizes and an offset of 0 or more, got {list(view.shape)} and {view.offset}"
    elif sorted(view.order) != list(range(len(view.shape))):
        yield f"view.order: expected an order of {len(view.shape)} axes, got {list(view.order)}"
