"""Return the scales of a plan by operand, and replace them by given scales."""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from quantizer.errors import CalibrationError
from quantizer.numerics.formats import qtype
from quantizer.numerics.rounding import held_scale, is_normal
from quantizer.plan.site_plan import CallRange, OperandPlan, Plan


def scales_of(plan: Plan) -> dict[str, Tensor]:
    """Return the scale of every quantized operand, float32 [] or [C], by ``SITE.OPERAND``.

    If calls have ranges of their own, the scale is [N], one for each call of a pass.
    """
    return {
        f"{path}.{operand.name}": operand.scale.clone() if operand.call_scales is None else operand.call_scales
        for path, entry in plan.items()
        for operand in entry.operands
        if operand.quantized and operand.scale is not None
    }


def with_scales(
    plan: Plan, scales: Mapping[str, Tensor], scale_dtype: torch.dtype, *, keep_zero_points: bool = False
) -> Plan:
    """Return the plan with some scales replaced.

    A scale is rounded to the target's float type; amax becomes the given scale times the largest integer of the format.
    A scale for one operand of a range group applies to the whole group.

    Args:
        plan: the plan of a calibration.
        scales: by ``SITE.OPERAND``, each [], or [C] with one entry for each output channel of a weight, or [N] with one
            for each call of a pass if calls have ranges of their own; [] then sets the scale of all calls.
        scale_dtype: the float type of scales on the target.
        keep_zero_points: keep the zero points of asymmetric formats, as in training; else compute them from the
            minimum.

    Raises:
        CalibrationError: a name is unknown, or a scale has a wrong shape or value; the message lists all problems.
    """
    groups = {f"{path}.{o.name}": scale_group(o) for path, entry in plan.items() for o in entry.operands}
    problems = []
    accepted: dict[str, Tensor] = {}
    # The scale of each range group, with the operand that it was passed for.
    shared: dict[Hashable, tuple[str, Tensor]] = {}
    for name, scale in scales.items():
        problem = _problem(name, scale, plan, scale_dtype)
        if problem is not None:
            problems.append(problem)
            continue
        accepted[name] = scale = scale.detach().cpu()
        group = groups[name]
        if group is None:
            continue
        first, first_scale = shared.setdefault(group, (name, scale))
        if scale.shape != first_scale.shape or not torch.equal(
            held_scale(scale, scale_dtype), held_scale(first_scale, scale_dtype)
        ):
            problems.append(
                f"{name}: {_text(scale)}, but {first} has {_text(first_scale)}: they read the same tensor and share "
                "a range; pass the same scale for both, or a scale for one of them"
            )
    if problems:
        count = "1 scale" if len(problems) == 1 else f"{len(problems)} scales"
        raise CalibrationError(f"{count} cannot be loaded:\n" + "\n".join(f"  - {problem}" for problem in problems))
    result: Plan = {}
    for path, entry in plan.items():
        operands = []
        for operand in entry.operands:
            group = scale_group(operand)
            scale_of_group = shared[group][1] if operand.quantized and group in shared else None
            new = accepted.get(f"{path}.{operand.name}", scale_of_group)
            operands.append(operand if new is None else _scaled(operand, new, scale_dtype, keep_zero_points))
        result[path] = replace(entry, operands=tuple(operands))
    return result


def with_given_weights(plan: Plan, model: nn.Module) -> Plan:
    """Return the plan with the scales of its weights marked as given, because training changed the weights.

    Weights that are computed from buffers are then computed from the buffers of ``model``, which was trained.
    """

    def marked(operand: OperandPlan) -> OperandPlan:
        computation = operand.computation
        if computation is not None:
            computation = computation.with_buffers_of(computation.inputs_of(model))
        return replace(operand, given=True, computation=computation)

    return {
        path: replace(
            entry,
            operands=tuple(marked(o) if o.quantized and o.role == "weight" else o for o in entry.operands),
        )
        for path, entry in plan.items()
    }


def scale_group(operand: OperandPlan) -> Hashable:
    """Return the key of operands that share a scale; None: the operand shares none.

    They have the range group, the format, the tensors that calls read, and SmoothQuant factors in common.
    """
    if operand.range_group is None:
        return None
    tensors = tuple(call.tensor for call in operand.calls)
    return operand.range_group, operand.dtype, operand.smooth is not None, tensors


def _text(scale: Tensor) -> str:
    return ", ".join(f"{float(each):.6g}" for each in scale.flatten())


def _problem(name: str, scale: object, plan: Plan, scale_dtype: torch.dtype) -> str | None:
    """Return why a scale cannot be used; None if it can."""
    path, _, last = name.rpartition(".")
    entry = plan.get(path)
    operand = None if entry is None else next((o for o in entry.operands if o.name == last), None)
    if entry is not None and not entry.quantized:
        return f"{name}: its site is not quantized ({entry.reason}); remove the scale, or change the configuration"
    if operand is None:
        near = difflib.get_close_matches(name, list(scales_of(plan)), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"{name}: no operand of the calibrated model has this name (SITE.OPERAND){hint}"
    if operand.quantized and operand.dynamic:
        return f"{name}: the operand is dynamically quantized and has no scale; remove the scale"
    if not operand.quantized or operand.scale is None:
        return f"{name}: the operand is not quantized ({operand.reason}); remove the scale, or change the configuration"
    if not isinstance(scale, Tensor) or not scale.is_floating_point():
        actual = scale.dtype if isinstance(scale, Tensor) else type(scale).__name__
        return f"{name}: expected a floating-point tensor, got {actual}"
    shapes: list[tuple[int, ...]] = [()]
    if operand.axis is not None:
        shapes.append(tuple(operand.scale.shape))
    if operand.several_ranges:
        shapes.append((len(operand.calls),))
    if tuple(scale.shape) not in shapes:
        entries = "its calls" if operand.axis is None else f"its channels, axis {operand.axis}"
        expected = "[]" if len(shapes) == 1 else f"[] or {list(shapes[1])} ({entries})"
        return f"{name}: shape {list(scale.shape)}, expected {expected}"
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        worst = scale[~(torch.isfinite(scale) & (scale > 0))].flatten()[0]
        return f"{name}: it contains {float(worst):g}; scales must be positive and finite"
    if operand.role != "weight" and not bool(is_normal(scale, scale_dtype).all()):
        least = torch.finfo(scale_dtype).smallest_normal
        return f"{name}: {float(scale.min()):g} is below {least:.2g}, the smallest normal number of {scale_dtype}"
    if not bool(torch.isfinite(held_scale(scale, scale_dtype) * qtype(operand.dtype).qmax).all()):
        return f"{name}: {float(scale.max()):g} is too large for {scale_dtype}, the target's type of scales"
    return None


def _scaled(operand: OperandPlan, scale: Tensor, scale_dtype: torch.dtype, keep_zero_points: bool) -> OperandPlan:
    if operand.several_ranges and scale.dim():
        # All other calls use the largest of these scales.
        widest = _scaled(replace(operand, calls=()), scale.max(), scale_dtype, keep_zero_points)
        return replace(widest, calls=_of_calls(operand, scale, scale_dtype, keep_zero_points))
    rounded = held_scale(scale, scale_dtype)
    zero_point = operand.zero_point
    if zero_point is not None and not keep_zero_points:
        assert operand.minimum is not None
        zero_point = min(round(max(-operand.minimum, 0.0) / float(rounded)), qtype(operand.dtype).qmax)
    return replace(
        operand,
        scale=rounded,
        given=True,
        note=None,
        amax=(scale.double() * qtype(operand.dtype).qmax).float(),
        axis=operand.axis if scale.dim() else None,
        block_size=operand.block_size if scale.dim() else None,
        zero_point=zero_point,
        calls=(),
        # Integers are valid only for the scale that they were chosen for.
        codes=None,
        rounding=None,
        # These were measured with the former range.
        sqnr_db=None,
        clipped=None,
        estimate=None,
    )


def _of_calls(
    operand: OperandPlan, scales: Tensor, scale_dtype: torch.dtype, keep_zero_points: bool
) -> tuple[CallRange, ...]:
    """Return the call ranges with other scales [N]; zero points stay, or move with the scale."""
    ranges = []
    for call, scale in zip(operand.calls, scales, strict=True):
        rounded, zero_point = float(held_scale(scale, scale_dtype)), call.zero_point
        if zero_point is not None and not keep_zero_points:
            zero_point = min(round(zero_point * call.scale / rounded), int(qtype(operand.dtype).qmax))
        amax = float((scale.double() * qtype(operand.dtype).qmax).float())
        ranges.append(replace(call, amax=amax, scale=rounded, zero_point=zero_point))
    return tuple(ranges)
