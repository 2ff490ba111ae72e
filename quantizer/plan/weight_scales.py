"""Ranges, scales and integers of weights in a plan.

The range is the largest magnitude of the values of each scale, or a smaller one that clips a few. Scales are computed
from the current weights, except for scales that were loaded or trained.

A plan contains integers only for weights whose rounding was chosen from data; others are rounded to nearest. They are
valid only for the weight, the scale and the smoothing factors that they were chosen for.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn

from quantizer.errors import CalibrationError
from quantizer.functional import fake_quantize
from quantizer.numerics.formats import INT8, QTYPES, QType, qtype
from quantizer.numerics.granularity import in_blocks, scale_shape
from quantizer.numerics.rounding import held_scale, is_normal
from quantizer.numerics.weight_codes import pack_pairs, unpack_pairs
from quantizer.plan.reasons import ReasonCode
from quantizer.plan.site_plan import OperandPlan, Plan, summary
from quantizer.proxy.weight import Weight, operand_of
from quantizer.utils.fingerprint import TensorStamp

ONE_SCALE = (
    "one scale for all channels, because no axis is the axis of the output channels (grouped transposed convolution)"
)
"""The note on the weight of a grouped transposed convolution."""

_BELOW_NORMAL = "smallest normal number and are rounded up to it"


def scale_of(amax: Tensor, dtype: QType, scale_dtype: torch.dtype, qmax: int | None = None) -> Tensor:
    """Return amax / qmax, rounded to the target's float type; 1 if amax is 0.

    ``qmax`` overrides the largest quantized value of INT8.
    """
    scale = amax.double() / (qmax if qmax is not None and dtype == INT8 else dtype.qmax)
    return held_scale(torch.where(amax > 0, scale, torch.ones_like(scale)), scale_dtype)


def beyond(amax: float, scale: Tensor, dtype: torch.dtype) -> str | None:
    """Return why an operand is not quantized if its scale overflows the target's float type; None if it does not."""
    if bool(torch.isfinite(scale).all()):
        return None
    return ReasonCode.SCALE_TOO_LARGE.text(amax=f"{amax:.3g}", dtype=_name(dtype))


def scaled_for(operand: OperandPlan, weight: Tensor, scale_dtype: torch.dtype, qmax: int | None) -> OperandPlan:
    """Return the plan of a weight operand with the range and scales of ``weight`` [*]."""
    values, kind = as_rounded(operand, weight), qtype(operand.dtype)
    # A smaller range produces larger integers, whose sums saturate on such a target.
    bounded = qmax is not None and kind == INT8
    bounds = scale_bounds(values, operand.axis, operand.block_size)
    amax = _amax(operand, values, kind, None if bounded else operand.estimate, bounds)
    scale = scale_of(amax, kind, scale_dtype, qmax)
    # One copy, because each copy waits for a GPU.
    figures = (
        *(bounds[0].min(), bounds[1].max(), amax.max(), torch.isfinite(amax).all()),
        *(torch.isfinite(scale).all(), (~is_normal(scale, scale_dtype)).sum()),
    )
    minimum, maximum, largest, has_range, has_scale, raised = torch.stack(
        [value.double() for value in figures]
    ).tolist()
    if not has_range:
        raise CalibrationError(
            f"{operand.parameter}: the weight has NaN or infinite values, so it has no scale; load a valid checkpoint, "
            "or train with a lower learning rate"
        )
    former = [text for text in (operand.note or "").split("; ") if text and not text.endswith(_BELOW_NORMAL)]
    notes = [_note(int(raised), scale, scale_dtype), *former]
    reason = None if has_scale else beyond(largest, scale, scale_dtype)
    return replace(
        operand,
        quantized=reason is None,
        estimate=None if bounded else operand.estimate,
        reason=reason,
        amax=amax,
        scale=scale,
        minimum=minimum,
        maximum=maximum,
        note="; ".join(text for text in notes if text is not None) or None,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Scaled:
    """A result of ``scaled_for`` with its inputs."""

    stamps: tuple[TensorStamp, ...]
    inputs: tuple[object, ...]
    result: OperandPlan


class ScaledWeights:
    """A cache of ``scaled_for``: each weight is computed once for its current values.

    Values are compared only when ``look_at`` is called.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Tensor, TensorStamp]] = {}
        self._known: dict[str, _Scaled] = {}

    def look_at(self, parameters: Iterable[Tensor]) -> bool:
        """Record the state of parameters; return whether their values are unchanged since the last call."""
        now = {id(parameter): (parameter, TensorStamp.of(parameter)) for parameter in parameters}
        before, self._seen = self._seen, now
        return before.keys() == now.keys() and all(before[key][1] == stamp for key, (_, stamp) in now.items())

    def forget(self) -> None:
        self._known = {}

    def scaled(
        self, name: str, operand: OperandPlan, weight: Weight, scale_dtype: torch.dtype, qmax: int | None
    ) -> OperandPlan:
        recorded = [self._seen[id(parameter)][1] for parameter in weight.parameters if id(parameter) in self._seen]
        stamps = tuple(recorded) if len(recorded) == len(weight.parameters) else None
        inputs = (*(getattr(operand, field.name) for field in fields(operand)), scale_dtype, qmax)
        known = self._known.get(name)
        if known is None or known.stamps != stamps or not all(map(_alike, known.inputs, inputs)):
            result = scaled_for(operand, weight.tensor(), scale_dtype, qmax)
            if stamps is None:
                return result
            known = self._known[name] = _Scaled(stamps, inputs, result)
        return known.result

    def holds(self, name: str, operand: OperandPlan, parameters: Iterable[Tensor]) -> bool:
        known = self._known.get(name)
        same = known is not None and known.result.amax is operand.amax and known.result.scale is operand.scale
        return same and known is not None and known.stamps == tuple(map(TensorStamp.of, parameters))


def _alike(first: object, second: object) -> bool:
    return first is second or (not isinstance(first, Tensor) and not isinstance(second, Tensor) and first == second)


def with_range(operand: OperandPlan, amax: Tensor | None, scale_dtype: torch.dtype, qmax: int | None) -> OperandPlan:
    """Return the plan of a weight with the range ``amax``; None: unchanged. Other arguments as in ``scaled_for``."""
    if amax is None:
        return operand
    return replace(operand, amax=amax, scale=scale_of(amax, qtype(operand.dtype), scale_dtype, qmax))


def with_scales_of_weights(
    plan: Plan, model: nn.Module, scale_dtype: torch.dtype, qmax: int | None, known: ScaledWeights | None = None
) -> Plan:
    """Return the plan with scales computed from the current weights of ``model``, except for given scales.

    Weights with chosen integers keep integers and scales; see ``without_former_codes`` for weights that changed.
    """
    result: Plan = {}
    for path, entry in plan.items():
        operands = []
        for operand in entry.operands:
            if operand.role == "weight" and operand.quantized and operand.codes is not None:
                weight = _weight(model, operand)
                operand = operand if weight is None else _beside(operand, weight.device)
            elif operand.role == "weight" and operand.quantized and not operand.given:
                weight = _weight(model, operand)
                # If the model has no such weight, the application of the plan raises an error.
                if weight is not None and not _holds(known, path, operand, _parameters(model, operand)):
                    operand = scaled_for(operand, weight, scale_dtype, qmax)
                if not operand.quantized:
                    raise CalibrationError(f"{operand.parameter}: {operand.reason}; calibrate the model again")
            elif operand.role == "weight" and operand.quantized and qmax is not None:
                weight = _weight(model, operand)
                if weight is not None:
                    _check_codes(f"{path}.{operand.name}", operand, weight, qmax)
            operands.append(operand)
        result[path] = replace(entry, operands=tuple(operands))
    return result


def _holds(known: ScaledWeights | None, path: str, operand: OperandPlan, parameters: list[Tensor] | None) -> bool:
    return known is not None and parameters is not None and known.holds(f"{path}.{operand.name}", operand, parameters)


def _beside(operand: OperandPlan, device: torch.device) -> OperandPlan:
    """Return the plan of a weight with its integers and scales on ``device``; a saved folder has them on the CPU."""
    assert operand.codes is not None
    assert operand.scale is not None
    return replace(operand, codes=operand.codes.to(device), scale=operand.scale.to(device))


def _check_codes(name: str, operand: OperandPlan, weight: Tensor, qmax: int) -> None:
    """Raise if a given scale produces integers that saturate when the target accumulates them."""
    if operand.scale is None or qtype(operand.dtype) != INT8:
        return
    values = as_rounded(operand, weight)
    amax = _amax(operand, values, INT8, None)
    most = float((amax.cpu() / operand.scale.cpu()).max())
    if most > qmax + 0.5:
        raise CalibrationError(
            f"{name}: with the given scale the weight has integers up to {min(round(most), INT8.qmax)}, and the target "
            f"sums products of bytes in 16 bits, which saturate beyond {qmax}: use a scale of the weight's largest "
            f"magnitude / {qmax}, or remove it"
        )


def as_rounded(operand: OperandPlan, weight: Tensor) -> Tensor:
    """Return the values to quantize: the weight in float32 [*], multiplied by the SmoothQuant factors."""
    values = weight.detach().float()
    if operand.smooth is None:
        return values
    assert operand.smooth_axis is not None
    after = values.dim() - 1 - operand.smooth_axis
    return values * operand.smooth.to(values.device).reshape([-1] + [1] * after)


def _amax(
    operand: OperandPlan,
    values: Tensor,
    kind: QType,
    estimate: str | None,
    bounds: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the range of each scale of a weight [*]; with ``spread``, one range times the factor of each channel."""
    if operand.spread is None:
        return weight_amax(values, operand.axis, operand.block_size, kind, estimate, bounds)
    assert operand.axis is not None
    spread = operand.spread.to(values.device)
    equalized = values / spread.reshape([-1] + [1] * (values.dim() - 1 - operand.axis))
    return weight_amax(equalized, None, None, kind, estimate) * spread


def _note(number: int, scale: Tensor, scale_dtype: torch.dtype) -> str | None:
    """Return a note on the number of scales below the normal numbers of their type; None without any."""
    if not number:
        return None
    return f"{number} of {scale.numel()} scales are below {_name(scale_dtype)}'s {_BELOW_NORMAL}"


def _weight(model: nn.Module, operand: OperandPlan) -> Tensor | None:
    path, parameters = operand.parameter, _parameters(model, operand)
    if parameters is None:
        return None
    try:
        weight = operand_of(parameters, operand.view, operand.computation)
        shape = scale_shape(weight.shape, operand.axis, operand.block_size)
        fits = operand.codes is None or operand.codes.shape == weight.shape
    except (IndexError, RuntimeError, ValueError):
        fits = False
    if not fits or operand.scale is None or shape != tuple(operand.scale.shape):
        raise CalibrationError(
            f"the calibration belongs to another model: {path} has the shape {list(parameters[0].shape)}, which "
            "does not fit its scales; calibrate this model with a new Quantizer"
        )
    return weight


def _parameters(model: nn.Module, operand: OperandPlan) -> list[Tensor] | None:
    if operand.computation is not None:
        try:
            return operand.computation.inputs_of(model)
        except KeyError:
            return None
    owner, _, name = (operand.parameter or "").rpartition(".")
    try:
        parameter = model.get_submodule(owner)._parameters.get(name)
    except AttributeError:
        return None
    return None if parameter is None else [parameter]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_SHARES = tuple(round(1 - 0.02 * number, 2) for number in range(31))
"""The shares of the largest magnitude that ``mse`` compares: 1 to 0.4. INT4 clips most, but seldom below half."""


def scale_bounds(values: Tensor, axis: int | None, block_size: int | None) -> tuple[Tensor, Tensor]:
    """Return the lowest and the highest value of each scale of a weight [*]; arguments as in ``weight_amax``."""
    return over_scale(values, axis, block_size, torch.amin), over_scale(values, axis, block_size, torch.amax)


def weight_amax(
    values: Tensor,
    axis: int | None,
    block_size: int | None,
    dtype: QType,
    estimate: str | None,
    bounds: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the range of each scale of a weight, float32, in the shape of ``scale_shape``."""
    low, high = scale_bounds(values, axis, block_size) if bounds is None else bounds
    # Two passes over the weight avoid writing and reading a tensor of its magnitudes.
    largest = torch.maximum(low.abs(), high.abs())
    # The caller raises an error for a weight with NaN, with its name.
    if estimate is None or not bool(torch.isfinite(largest).all()):
        return largest
    if estimate.startswith("percentile "):
        return _percentile(values.abs(), axis, block_size, float(estimate.split()[1]))
    return least_error_amax(values, largest, axis, block_size, dtype, _SHARES)


def least_error_amax(
    values: Tensor,
    largest: Tensor,
    axis: int | None,
    block_size: int | None,
    dtype: QType,
    shares: Iterable[float],
    costs: Tensor | None = None,
) -> Tensor:
    """Return the range r of each scale that minimizes the sum of c (w_r - w)^2, in the shape of the scale.

    Legend: w the values of one scale, w_r the values quantized with the scale r / qmax, c ``costs`` (None: 1).
    """
    best, least = largest, torch.full_like(largest, math.inf)
    for share in shares:
        amax = largest * share
        scale = torch.where(amax > 0, amax / dtype.qmax, 1.0)
        rounded = fake_quantize(values, scale, dtype.name, axis=axis, block_size=block_size)
        squares = (rounded - values).square()
        error = over_scale(squares if costs is None else squares * costs, axis, block_size, torch.sum)
        best, least = torch.where(error < least, amax, best), torch.minimum(error, least)
    return best


def over_scale(values: Tensor, axis: int | None, block_size: int | None, reduce: Callable[..., Tensor]) -> Tensor:
    """Return the values [*] of each scale, reduced by ``torch.amax``, ``mean`` or ``sum``."""
    if axis is None:
        return reduce(values, dim=list(range(values.dim())))
    if block_size is not None:
        return reduce(in_blocks(values, axis, block_size), dim=axis + 1)
    others = [d for d in range(values.dim()) if d != axis % values.dim()]
    return reduce(values, dim=others) if others else values


def _percentile(magnitudes: Tensor, axis: int | None, block_size: int | None, percentile: float) -> Tensor:
    if axis is None:
        rows, shape = magnitudes.reshape(1, -1), torch.Size()
    elif block_size is not None:
        blocks = in_blocks(magnitudes, axis, block_size).movedim(axis + 1, -1)
        rows, shape = blocks.reshape(-1, block_size), blocks.shape[:-1]
    else:
        rows = magnitudes.movedim(axis, 0).flatten(1) if magnitudes.dim() > 1 else magnitudes.reshape(-1, 1)
        shape = rows.shape[:1]
    place = max(1, math.ceil(percentile / 100 * rows.shape[1]))
    return rows.kthvalue(place, dim=1).values.reshape(shape)


def without_codes(plan: Plan, why: str, selects: Callable[[OperandPlan], bool] = lambda _: True) -> Plan:
    """Return the plan with rounding to nearest for weights with chosen integers."""
    result: Plan = {}
    for path, entry in plan.items():
        operands = tuple(
            replace(operand, codes=None, rounding=f"rounded to nearest: {why}")
            if operand.codes is not None and selects(operand)
            else operand
            for operand in entry.operands
        )
        changed = entry.quantized and any(new is not old for new, old in zip(operands, entry.operands, strict=True))
        result[path] = replace(
            entry, operands=operands, reason=summary(operands, entry.bias_note) if changed else entry.reason
        )
    return result


def changed_buffers(plan: Plan, model: nn.Module) -> list[str]:
    """Return the paths of buffers that computed weights depend on and that changed since calibration."""
    operands = (operand for entry in plan.values() for operand in entry.operands)
    computed = (operand.computation for operand in operands if operand.computation is not None)
    return list(dict.fromkeys(path for computation in computed for path in computation.changed_buffers(model)))


def without_former_codes(plan: Plan, changed: Collection[str]) -> Plan:
    """Return the plan with rounding to nearest for weights that changed since their integers were chosen; warn."""

    def has_changed(operand: OperandPlan) -> bool:
        return not set(operand.parameters).isdisjoint(changed)

    operands = (operand for entry in plan.values() for operand in entry.operands)
    former = sum(o.quantized and o.codes is not None and has_changed(o) for o in operands)
    if former:
        warnings.warn(
            f"{former} weights changed since their integers were chosen and are rounded to nearest; calibrate again",
            stacklevel=5,
        )
    return without_codes(plan, "it changed since its integers were chosen", has_changed)


def file_of_codes(codes: Tensor, dtype: str) -> Tensor:
    """Return integers [.., K] as a file stores them: packed 4-bit pairs, uint8 [.., K / 2], if K is even."""
    if not qtype(dtype).is_packed or codes.dim() == 0 or codes.shape[-1] % 2:
        return codes.contiguous().clone()
    return pack_pairs(codes.contiguous()).reshape(*codes.shape[:-1], codes.shape[-1] // 2)


def codes_of_file(stored: Tensor | None, dtype: str) -> Tensor | None:
    """Return the integers that ``file_of_codes`` stored; values of a damaged file are returned unchanged."""
    packed = dtype in QTYPES and qtype(dtype).is_packed
    if stored is None or not packed or stored.dtype != torch.uint8 or stored.dim() == 0:
        return stored
    return unpack_pairs(stored.flatten(), (*stored.shape[:-1], 2 * stored.shape[-1]))


def code_faults(operand: OperandPlan) -> Iterator[str]:
    """Yield the problems of an operand's integers from a file."""
    codes, kind = operand.codes, qtype(operand.dtype)
    if codes is None:
        return
    if operand.role != "weight" or kind.is_float or kind.has_zero_point:
        yield f"codes: expected no integers for {operand.role} in {kind.name}"
    elif codes.dtype != kind.storage:
        yield f"codes: expected a tensor of {kind.storage}, got {codes.dtype}"
    elif not _fit(codes, operand):
        scales = [] if operand.scale is None else list(operand.scale.shape)
        yield f"codes: the shape {list(codes.shape)} does not fit scales {scales} along axis {operand.axis}"
    elif codes.numel() and not kind.qmin <= int(codes.min()) <= int(codes.max()) <= kind.qmax:
        yield f"codes: expected {kind.qmin} to {kind.qmax}, got {int(codes.min())} to {int(codes.max())}"


def _fit(codes: Tensor, operand: OperandPlan) -> bool:
    if operand.scale is None:
        return False
    try:
        expected = scale_shape(codes.shape, operand.axis, operand.block_size)
    except IndexError:
        return False
    divisible = (
        operand.axis is None or operand.block_size is None or codes.shape[operand.axis] % operand.block_size == 0
    )
    return divisible and expected == tuple(operand.scale.shape)
