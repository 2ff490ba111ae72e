"""The scales of NVIDIA tripy's quantized ``Linear``, from a plan.

``nvtripy.Linear(in_features, out_features, quant_dtype=nvtripy.int8, weight_quant_dim=...)`` computes x W^T + b with W
[out, in]. Its ``input_scale`` is []; its ``weight_scale`` is [out] if ``weight_quant_dim`` is 0, and [] if it is None.
A weight stored as [in, out], as by transformers' ``Conv1D``, must be transposed for tripy; its output channels are then
also on axis 0.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from quantizer.errors import QuantizerError
from quantizer.numerics.formats import INT8
from quantizer.plan.site_plan import OperandPlan, Plan, SitePlan
from quantizer.utils.files import whole_file


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TripyLinear:
    """The scales of one quantized ``nvtripy.Linear``.

    Attributes:
        input_scale: float32 [].
        weight_scale: float32 [out], or [] for the whole weight.
        weight_quant_dim: the axis of tripy's weight [out, in] that ``weight_scale`` runs along: 0, or None.
        transposed: the model keeps the weight as [in, out]; transpose it for tripy.
    """

    input_scale: Tensor
    weight_scale: Tensor
    weight_quant_dim: int | None
    transposed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class TripyScales:
    """The scales of a plan's quantized linear layers.

    Attributes:
        linears: the scales of each linear layer, by the path of the module with the weight.
        left: the reason for each quantized site without a counterpart in tripy, by the path of the site.
    """

    linears: dict[str, TripyLinear] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)


def tripy_scales(plan: Plan) -> TripyScales:
    """Return the scales of each quantized linear layer of ``plan`` (``Quantizer.plan``), in tripy's orientation."""
    readers: dict[str, int] = {}
    for parameter in (parameter for entry in plan.values() for parameter in entry.reads):
        readers[parameter] = readers.get(parameter, 0) + 1
    result = TripyScales()
    for path, entry in plan.items():
        if not entry.quantized:
            continue
        weight = next((operand for operand in entry.operands if operand.role == "weight"), None)
        data = next((operand for operand in entry.operands if operand.role == "activation"), None)
        reason = _no_linear(entry, weight, readers) or _no_int8(entry)
        if reason is not None or weight is None or data is None:
            result.left[path] = reason or "it has no input beside its weight"
            continue
        assert data.scale is not None
        assert weight.scale is not None
        assert weight.parameter is not None
        result.linears[weight.parameter.removesuffix("weight").rstrip(".")] = TripyLinear(
            input_scale=data.scale.clone(),
            weight_scale=weight.scale.clone(),
            weight_quant_dim=None if weight.axis is None else 0,
            transposed=_out_axis(weight) == 1,
        )
    return result


def write_tripy_scales(plan: Plan, path: str | os.PathLike[str]) -> TripyScales:
    """Write the scales of each quantized linear layer of ``plan`` atomically to a ``.safetensors`` file.

    Its tensors are ``MODULE.input_scale`` and ``MODULE.weight_scale``, parameters of tripy's ``Linear``. Its metadata
    has, as text, ``MODULE.weight_quant_dim`` (``0`` or ``None``), an argument of the constructor of ``Linear``, and
    ``MODULE.transposed`` (``true`` or ``false``).
    """
    result = tripy_scales(plan)
    if not result.linears:
        raise QuantizerError(f"nothing to write to {path}: no quantized site of the plan can be a tripy Linear")
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for name, linear in result.linears.items():
        prefix = f"{name}." if name else ""
        tensors[f"{prefix}input_scale"], tensors[f"{prefix}weight_scale"] = linear.input_scale, linear.weight_scale
        metadata[f"{prefix}weight_quant_dim"] = str(linear.weight_quant_dim)
        metadata[f"{prefix}transposed"] = str(linear.transposed).lower()
    with whole_file(Path(path)) as part:
        part.write_bytes(save(tensors, metadata))
    return result


def _no_linear(entry: SitePlan, weight: OperandPlan | None, readers: dict[str, int]) -> str | None:
    """Return why a quantized site cannot be an ``nvtripy.Linear``; None if it can."""
    if entry.kind != "linear" or weight is None:
        return f"a {entry.kind} is not a Linear"
    if weight.name not in ("weight", "rhs") or entry.operation == "einsum":
        return f"the weight is the operand {weight.name!r} of {entry.operation}, which is not x W^T"
    if weight.parameter is None or weight.parameter.rpartition(".")[2] != "weight":
        return f"{weight.parameter} is not the 'weight' of a module"
    if weight.computation is not None:
        return f"the weight is computed from {', '.join(weight.parameters)}"
    if readers.get(weight.parameter, 0) > 1:
        return f"several calls read {weight.parameter}"
    two_axes = weight.view is None or (len(weight.view.order) == len("oi") and weight.view.offset == 0)
    return None if two_axes else f"the weight is a part of {weight.parameter}, or does not have two axes"


def _no_int8(entry: SitePlan) -> str | None:
    """Return why the operands are not quantized as ``nvtripy.Linear`` requires; None if they are."""
    for operand in entry.operands:
        if not operand.quantized or operand.dtype != INT8.name:
            return f"{operand.name} is {operand.dtype if operand.quantized else 'float'}, expected int8"
        if operand.smooth is not None:
            return f"{operand.name} uses SmoothQuant, which tripy scales cannot represent"
        if operand.codes is not None:
            return f"{operand.name} has learned integers (weights.rounding), which tripy scales cannot represent"
    return None if entry.bias_shift is None else "its bias is corrected, which tripy scales cannot represent"


def _out_axis(weight: OperandPlan) -> int:
    """Return the axis of the output channels in the parameter, which is [out, in] or [in, out]."""
    axis = 0 if weight.name == "weight" else 1
    return axis if weight.view is None else weight.view.order[axis]
