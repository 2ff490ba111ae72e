"""The scales of weights, computed from the weights that are frozen.

A given scale (``load_scales``, a training) is not computed from the weight and stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn

from quantizer.common.tensor_stamp import TensorStamp
from quantizer.errors import CalibrationError
from quantizer.numerics.granularity import scale_shape
from quantizer.numerics.held_scale import held_scale, is_normal
from quantizer.numerics.qtype import INT8, QType, qtype
from quantizer.plan.site_plan import OperandPlan, Plan
from quantizer.plan.weight_range import scale_bounds, weight_amax
from quantizer.proxy.weight import Weight, operand_of
from quantizer.reasons import ReasonCode

ONE_SCALE = "one scale for all channels, as no axis of it holds them alone (groups of several input channels)"
"""The note on the weight of a transposed convolution if no axis of it is that of the output channels."""

_BELOW_NORMAL = "normal numbers, and are rounded up there"


def scale_of(amax: Tensor, dtype: QType, scale_dtype: torch.dtype, qmax: int | None = None) -> Tensor:
    """Return amax / qmax, rounded to the target's float type; 1 if amax is 0 (zeros stay zeros with any scale).

    ``qmax`` is the largest code of INT8 in use, if it is less than qmax.
    """
    scale = amax.double() / (qmax if qmax is not None and dtype == INT8 else dtype.qmax)
    return held_scale(torch.where(amax > 0, scale, torch.ones_like(scale)), scale_dtype)


def beyond(amax: float, scale: Tensor, dtype: torch.dtype) -> str | None:
    """Return why an operand stays float, if its scale is infinite in the target's float type; None if it is finite."""
    if bool(torch.isfinite(scale).all()):
        return None
    return ReasonCode.SCALE_TOO_LARGE.text(amax=f"{amax:.3g}", dtype=_name(dtype))


def scaled_for(operand: OperandPlan, weight: Tensor, scale_dtype: torch.dtype, qmax: int | None) -> OperandPlan:
    """Return the plan of a weight operand with the range and the scales of ``weight`` [*].

    Args:
        operand: a plan with the format, axis and block size, and the factors of smoothing.
        weight: the weight as its site reads it.
        scale_dtype: the float type of scales on the target.
        qmax: the largest code of a weight in INT8 on the target; None: that of the format.

    Raises:
        CalibrationError: the weight has NaN or infinite values.
    """
    values, kind = as_rounded(operand, weight), qtype(operand.dtype)
    # A smaller range makes larger codes of what it clips, which such a target cannot add.
    bounded = qmax is not None and kind == INT8
    bounds = scale_bounds(values, operand.axis, operand.block_size)
    amax = _amax(operand, values, kind, None if bounded else operand.estimate, bounds)
    if not bool(torch.isfinite(amax).all()):
        raise CalibrationError(
            f"{operand.parameter}: the weight has NaN or infinite values, so no scale of it means anything; load a "
            "sound checkpoint, or train with a lower rate"
        )
    scale = scale_of(amax, kind, scale_dtype, qmax)
    kept = [text for text in (operand.note or "").split("; ") if text and not text.endswith(_BELOW_NORMAL)]
    notes = [_note(scale, scale_dtype), *kept]
    reason = beyond(float(amax.max()), scale, scale_dtype)
    return replace(
        operand,
        quantized=reason is None,
        estimate=None if bounded else operand.estimate,
        reason=reason,
        amax=amax,
        scale=scale,
        minimum=float(bounds[0].min()),
        maximum=float(bounds[1].max()),
        note="; ".join(text for text in notes if text is not None) or None,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Scaled:
    """A result of ``scaled_for``, with all that it came from."""

    stamps: tuple[TensorStamp, ...]
    asked: tuple[object, ...]
    result: OperandPlan


class ScaledWeights:
    """The results of ``scaled_for`` for the weights of a model, each computed once for the values that its weight has.

    ``look_at`` says when the values are compared with those before: they are not between two calls of it.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Tensor, TensorStamp]] = {}
        self._known: dict[str, _Scaled] = {}

    def look_at(self, parameters: Iterable[Tensor]) -> bool:
        """Take the stamps of parameters; return whether they are those of the last call, with the same values."""
        now = {id(parameter): (parameter, TensorStamp.of(parameter)) for parameter in parameters}
        before, self._seen = self._seen, now
        return before.keys() == now.keys() and all(before[key][1] == stamp for key, (_, stamp) in now.items())

    def forget(self) -> None:
        """Forget all results, since somebody wrote into one."""
        self._known = {}

    def scaled(
        self, name: str, operand: OperandPlan, weight: Weight, scale_dtype: torch.dtype, qmax: int | None
    ) -> OperandPlan:
        """Return ``scaled_for`` of the weight of ``name``, a ``SITE.OPERAND``."""
        seen = [self._seen[id(one)][1] for one in weight.parameters if id(one) in self._seen]
        stamps = tuple(seen) if len(seen) == len(weight.parameters) else None
        asked = (*(getattr(operand, field.name) for field in fields(operand)), scale_dtype, qmax)
        known = self._known.get(name)
        if known is None or known.stamps != stamps or not all(map(_alike, known.asked, asked)):
            result = scaled_for(operand, weight.tensor(), scale_dtype, qmax)
            if stamps is None:
                return result
            known = self._known[name] = _Scaled(stamps, asked, result)
        return known.result

    def holds(self, name: str, operand: OperandPlan, parameters: Iterable[Tensor]) -> bool:
        """Return whether the scale of ``name`` is of a result here, and of the values that its parameters have now."""
        known = self._known.get(name)
        made = known is not None and known.result.amax is operand.amax and known.result.scale is operand.scale
        return made and known is not None and known.stamps == tuple(map(TensorStamp.of, parameters))


def _alike(one: object, other: object) -> bool:
    return one is other or (not isinstance(one, Tensor) and not isinstance(other, Tensor) and one == other)


def with_range(operand: OperandPlan, amax: Tensor | None, scale_dtype: torch.dtype, qmax: int | None) -> OperandPlan:
    """Return the plan of a weight with another range, in the shape of its scale; None: as it is.

    ``scale_dtype`` and ``qmax`` are those of ``scaled_for``.
    """
    if amax is None:
        return operand
    return replace(operand, amax=amax, scale=scale_of(amax, qtype(operand.dtype), scale_dtype, qmax))


def with_scales_of_weights(
    plan: Plan, model: nn.Module, scale_dtype: torch.dtype, qmax: int | None, known: ScaledWeights | None = None
) -> Plan:
    """Return the plan with scales computed from the present weights of ``model``, except for given scales.

    Weights with codes keep codes and scales: see ``weight_codes.without_codes`` for weights that changed.

    Args:
        plan: the plan.
        model: the model.
        scale_dtype, qmax: as for ``scaled_for``.
        known: results that need not be computed again; None: there are none.

    Raises:
        CalibrationError: a weight has another shape, NaN or infinite values, or a scale that the target's float type
            cannot represent; or a given scale makes codes that are too large for the target's accumulator.
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
    """Return the plan of a weight with codes and scales on the device of the weight; a folder has them on the CPU."""
    assert operand.codes is not None
    assert operand.scale is not None
    return replace(operand, codes=operand.codes.to(device), scale=operand.scale.to(device))


def _check_codes(name: str, operand: OperandPlan, weight: Tensor, qmax: int) -> None:
    """Raise if the weight has larger codes with a given scale than the target can accumulate without saturation.

    Raises:
        CalibrationError: the largest code is above ``qmax``.
    """
    if operand.scale is None or qtype(operand.dtype) != INT8:
        return
    values = as_rounded(operand, weight)
    amax = _amax(operand, values, INT8, None)
    most = float((amax.cpu() / operand.scale.cpu()).max())
    if most > qmax + 0.5:
        raise CalibrationError(
            f"{name}: with the scale that it was given the weight has codes up to {min(round(most), INT8.qmax)}, and "
            f"the target sums products of bytes in 16 bits, which saturate beyond codes of {qmax}: give a scale of "
            f"the weight's largest magnitude / {qmax}, or leave it out"
        )


def as_rounded(operand: OperandPlan, weight: Tensor) -> Tensor:
    """Return the values that are rounded: the weight in float32 [*], multiplied by the factors of smoothing."""
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
    """Return the range of each scale of a weight [*]; with ``spread`` one range times the factor of each channel."""
    if operand.spread is None:
        return weight_amax(values, operand.axis, operand.block_size, kind, estimate, bounds)
    assert operand.axis is not None
    spread = operand.spread.to(values.device)
    equal = values / spread.reshape([-1] + [1] * (values.dim() - 1 - operand.axis))
    return weight_amax(equal, None, None, kind, estimate) * spread


def _note(scale: Tensor, scale_dtype: torch.dtype) -> str | None:
    """Return a note on scales below the normal numbers of the target's float type; None if there are none."""
    few = int((~is_normal(scale, scale_dtype)).sum())
    if not few:
        return None
    return f"{few} of {scale.numel()} scales are below {_name(scale_dtype)}'s {_BELOW_NORMAL}"


def _weight(model: nn.Module, operand: OperandPlan) -> Tensor | None:
    """Return the weight of an operand in a model; None if the model has no such parameter."""
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
            f"the calibration belongs to another model: {path} has the shape {list(parameters[0].shape)} here, which "
            "its scales do not fit; calibrate this model with a Quantizer of its own"
        )
    return weight


def _parameters(model: nn.Module, operand: OperandPlan) -> list[Tensor] | None:
    """Return the parameters of a weight; None if the model has not all of them."""
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
