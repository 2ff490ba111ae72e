"""The codes of weights in a plan: what ends them, and how a folder holds them.

A plan holds codes where they were chosen by looking at data. Elsewhere a weight is rounded to nearest when it is
stored. Codes belong to the weight, the scale and the factors of smoothing that they were chosen for.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from quantizer.numerics.granularity import scale_shape
from quantizer.numerics.packing import pack_pairs, unpack_pairs
from quantizer.numerics.qtype import QTYPES, qtype
from quantizer.plan.site_plan import OperandPlan, Plan, summary


def without_codes(plan: Plan, why: str, ends: Callable[[OperandPlan], bool] = lambda _: True) -> Plan:
    """Return the plan with nearest rounding of weights that have codes.

    Args:
        plan: the plan.
        why: what takes the place of the text on their choice.
        ends: a function that tells which weights; all by default.
    """
    result: Plan = {}
    for path, entry in plan.items():
        operands = tuple(
            replace(operand, codes=None, rounding=f"rounded to nearest: {why}")
            if operand.codes is not None and ends(operand)
            else operand
            for operand in entry.operands
        )
        changed = entry.quantized and any(new is not old for new, old in zip(operands, entry.operands, strict=True))
        result[path] = replace(
            entry, operands=operands, reason=summary(operands, entry.bias_note) if changed else entry.reason
        )
    return result


def changed_buffers(plan: Plan, model: nn.Module) -> list[str]:
    """Return the paths of buffers of a model from which weights are computed, and whose values changed since."""
    operands = (operand for entry in plan.values() for operand in entry.operands)
    computed = (operand.computation for operand in operands if operand.computation is not None)
    return list(dict.fromkeys(path for computation in computed for path in computation.changed_buffers(model)))


def without_former_codes(plan: Plan, changed: Collection[str]) -> Plan:
    """Return the plan with nearest rounding of weights that changed since their codes were chosen, and warn of them.

    Args:
        plan: the plan.
        changed: the paths of the parameters and buffers that changed.
    """

    def has_changed(operand: OperandPlan) -> bool:
        return not set(operand.parameters).isdisjoint(changed)

    operands = (operand for entry in plan.values() for operand in entry.operands)
    former = sum(o.quantized and o.codes is not None and has_changed(o) for o in operands)
    if former:
        warnings.warn(
            f"{former} weights changed since their codes were chosen and are rounded to nearest: calibrate again",
            stacklevel=5,
        )
    return without_codes(plan, "it changed since its codes were chosen", has_changed)


def file_of_codes(codes: Tensor, dtype: str) -> Tensor:
    """Return codes int8 [.., K] as a file holds them: of 4 bits and an even K, uint8 [.., K / 2]; else as they are."""
    if not qtype(dtype).is_packed or codes.dim() == 0 or codes.shape[-1] % 2:
        return codes.contiguous().clone()
    return pack_pairs(codes.contiguous()).reshape(*codes.shape[:-1], codes.shape[-1] // 2)


def codes_of_file(held: Tensor | None, dtype: str) -> Tensor | None:
    """Return the codes that ``file_of_codes`` gave; None for None, and anything else of a damaged file as it is."""
    packed = dtype in QTYPES and qtype(dtype).is_packed
    if held is None or not packed or held.dtype != torch.uint8 or held.dim() == 0:
        return held
    return unpack_pairs(held.flatten(), (*held.shape[:-1], 2 * held.shape[-1]))


def code_faults(operand: OperandPlan) -> Iterator[str]:
    """Yield what is wrong with the codes of an operand from a file."""
    codes, kind = operand.codes, qtype(operand.dtype)
    if codes is None:
        return
    if operand.role != "weight" or kind.is_float or kind.has_zero_point:
        yield f"codes: expected none for {operand.role} in {kind.name}"
    elif codes.dtype != kind.storage:
        yield f"codes: expected a tensor of {kind.storage}, got {codes.dtype}"
    elif not _fit(codes, operand):
        scales = [] if operand.scale is None else list(operand.scale.shape)
        yield f"codes: their shape {list(codes.shape)} does not fit scales {scales} along axis {operand.axis}"
    elif codes.numel() and not kind.qmin <= int(codes.min()) <= int(codes.max()) <= kind.qmax:
        yield f"codes: expected {kind.qmin} to {kind.qmax}, got {int(codes.min())} to {int(codes.max())}"


def _fit(codes: Tensor, operand: OperandPlan) -> bool:
    if operand.scale is None:
        return False
    try:
        expected = scale_shape(codes.shape, operand.axis, operand.block_size)
    except IndexError:
        return False
    whole = operand.axis is None or operand.block_size is None or codes.shape[operand.axis] % operand.block_size == 0
    return whole and expected == tuple(operand.scale.shape)
