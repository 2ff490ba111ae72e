"""Ranges saved by NVIDIA's Model Optimizer or pytorch-quantization, as scales for ``Quantizer.load_scales``.

Both save the largest magnitude of each quantizer in the state dict of the quantized model:
``MODULE.input_quantizer._amax`` (Model Optimizer) or ``MODULE._input_quantizer._amax``. Neither library is needed to
read them. ``modelopt_state`` has settings but no ranges.

A scale is amax / 127, as in both toolkits. For a weight, the divisor is the largest integer that the target uses, which
is smaller if 8-bit multiplications would saturate. Clamping differs: pytorch-quantization clamps to [-127, 127], as
does Model Optimizer with ``narrow_range: True``. Its default is [-128, 127], as in this package. With ranges from
``max``, weights round alike, because none reaches -128; an activation below -amax may reach it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from quantizer.errors import QuantizerError
from quantizer.numerics.formats import qtype
from quantizer.plan.site_plan import OperandPlan, Plan, SitePlan
from quantizer.utils.paths import regular_file

_AMAX = re.compile(r"(?:(?P<module>.+)\.)?_?(?P<quantizer>[^.]+)\._amax")

_ATTENTION = {
    **{f"{letter}_bmm_quantizer": letter for letter in "qkpv"},
    **{f"matmul_{letter}_input_quantizer": letter for letter in "qkv"},
    "matmul_a_input_quantizer": "p",
    "softmax_quantizer": "p",
}
"""Quantizers of an attention, with their operands: query, key, probabilities or value."""

_FUSED = {"q": "query", "k": "key", "p": "probabilities", "v": "value"}
_PRODUCTS = {"q": (0, "lhs"), "k": (0, "rhs"), "p": (1, "lhs"), "v": (1, "rhs")}


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolkitScales:
    """The scales from a state dict, and the ranges left unused.

    Attributes:
        scales: float32 [] or [C], by ``SITE.OPERAND``, for ``Quantizer.load_scales``.
        unmatched: the reason why a range was not used, by its key in the state dict.
    """

    scales: dict[str, Tensor] = field(default_factory=dict)
    unmatched: dict[str, str] = field(default_factory=dict)


def read_toolkit_scales(source: Mapping[str, Any] | str | os.PathLike[str], plan: Plan) -> ToolkitScales:
    """Return the scales in a state dict or file of another toolkit for the operands that ``plan`` quantizes.

    - ``input_quantizer`` and ``weight_quantizer`` belong to the operands of a module's only matrix multiplication or
      convolution.
    - Quantizers of an attention (``q_bmm_quantizer``, ``matmul_q_input_quantizer``, ..) belong to its fused
      attention, or to its two matrix multiplications in source order, as in Model Optimizer: query and key to the
    first one, probabilities   and value to the second. Observed probabilities must lie in [0, 1].
    - Not used: ranges of more than one axis, per-channel ranges of inputs, and ranges of inputs that the toolkit scales
      first (SmoothQuant, AWQ).

    Raises:
        QuantizerError: the file cannot be read, or no range fits.
    """
    state = source if isinstance(source, Mapping) else _load(Path(source))
    hosts: dict[str, list[SitePlan]] = {}
    for path, entry in plan.items():
        hosts.setdefault(".".join(path.split(".")[:-2]), []).append(entry)
    result = ToolkitScales()
    for key, amax in state.items():
        match = _AMAX.fullmatch(key) if isinstance(key, str) else None
        if match is None:
            continue
        try:
            name, operand = _operand(match["quantizer"], hosts.get(match["module"] or "", []))
            if name in result.scales:
                raise _Unmatched(f"{name} has a range of another quantizer already")
            result.scales[name] = _scale(amax, _largest_integer(operand), key, state)
        except _Unmatched as reason:
            result.unmatched[key] = str(reason)
    if not result.scales:
        raise QuantizerError(_nothing(source, result.unmatched))
    return result


class _Unmatched(Exception):
    """The reason why a range belongs to no operand of the plan."""


def _operand(quantizer: str, sites: list[SitePlan]) -> tuple[str, OperandPlan]:
    """Return ``SITE.OPERAND`` and its plan for a quantizer of a module with these sites."""
    if not sites:
        raise _Unmatched("no quantizable operation belongs to a module of this name")
    if quantizer in ("input_quantizer", "weight_quantizer"):
        products = [entry for entry in sites if entry.kind != "residual_add"]
        if len(products) != 1:
            raise _Unmatched(
                f"its module has {len(products)} matrix multiplications or convolutions, and the name "
                f"does not say which"
            )
        role = "weight" if quantizer == "weight_quantizer" else "activation"
        operands = [operand for operand in products[0].operands if operand.role == role]
        if len(operands) > 1:
            raise _Unmatched(f"{products[0].name} has {len(operands)} operands of the role {role!r}")
        return _quantized(products[0], next(iter(operands), None))
    if quantizer not in _ATTENTION:
        raise _Unmatched("this quantizer is not one of a matrix multiplication or convolution")
    letter = _ATTENTION[quantizer]
    products = [entry for entry in sites if entry.kind == "matmul"]
    if len(products) == 1 and len(products[0].operands) == len(_FUSED):
        return _quantized(products[0], _named(products[0], _FUSED[letter]))
    if not _is_attention(products):
        raise _Unmatched("its module has no attention with two quantized matrix multiplications")
    place, name = _PRODUCTS[letter]
    return _quantized(products[place], _named(products[place], name))


def _is_attention(products: list[SitePlan]) -> bool:
    """Return whether two sites of one function multiply query with key, and probabilities with value."""
    if len(products) != 2 or len({entry.name.rpartition(".")[0] for entry in products}) != 1:
        return False
    left, right = (_named(products[1], name) for name in ("lhs", "rhs"))
    return left is not None and right is not None and _probable(left) and not _probable(right)


def _probable(operand: OperandPlan) -> bool:
    return operand.minimum is not None and operand.maximum is not None and 0 <= operand.minimum <= operand.maximum <= 1


def _named(entry: SitePlan, name: str) -> OperandPlan | None:
    return next((operand for operand in entry.operands if operand.name == name), None)


def _quantized(entry: SitePlan, operand: OperandPlan | None) -> tuple[str, OperandPlan]:
    if operand is None or not operand.quantized:
        why = operand.reason if operand is not None else None
        raise _Unmatched(f"{entry.name} is not quantized: {why or entry.reason}")
    if operand.smooth is not None or operand.zero_point is not None:
        how = (
            "it uses SmoothQuant (set activations.smoothquant_alpha: null, and no weights.rounding: awq)"
            if operand.smooth is not None
            else "it has a zero point (set activations.zero_point: false)"
        )
        raise _Unmatched(f"{entry.name}.{operand.name} has another form in this plan: {how}")
    return f"{entry.name}.{operand.name}", operand


def _largest_integer(operand: OperandPlan) -> int:
    """Return the integer for amax: the largest of the format or, for a weight, the largest that the target uses."""
    qmax = qtype(operand.dtype).qmax
    if operand.role != "weight" or operand.given or operand.scale is None or operand.amax is None:
        return qmax
    widest = operand.scale.flatten().argmax()
    amax = float(operand.amax.flatten()[widest])
    return min(round(amax / float(operand.scale.flatten()[widest])), qmax) if amax > 0 else qmax


def _scale(amax: object, qmax: int, key: str, state: Mapping[str, Any]) -> Tensor:
    """Return the scale [] or [C] of amax, which may be [C, 1] or [1, C]; amax 0 gets scale 1."""
    if f"{key.removesuffix('_amax')}_pre_quant_scale" in state:
        raise _Unmatched("the toolkit scales this tensor before quantization, so its range does not fit the model")
    if not isinstance(amax, Tensor) or not amax.is_floating_point():
        kind = amax.dtype if isinstance(amax, Tensor) else type(amax).__name__
        raise _Unmatched(f"expected a tensor of floats, got {kind}")
    if sum(size != 1 for size in amax.shape) > 1:
        raise _Unmatched(f"a range of shape {list(amax.shape)} is per block; expected one per tensor or per channel")
    if amax.numel() != 1 and not key.endswith("weight_quantizer._amax"):
        raise _Unmatched(f"a range of shape {list(amax.shape)}; expected one range per tensor for activations")
    if not bool((torch.isfinite(amax) & (amax >= 0)).all()):
        raise _Unmatched("not all of its values are finite and at least 0")
    amax = amax.detach().cpu().double()
    amax = amax.reshape(()) if amax.numel() == 1 else amax.flatten()
    return torch.where(amax > 0, amax / qmax, torch.ones_like(amax)).float()


def _nothing(source: object, unmatched: Mapping[str, str]) -> str:
    where = "the state dict" if isinstance(source, Mapping) else str(source)
    if not unmatched:
        return (
            f"{where} has no key that ends in '_quantizer._amax'; expected the state dict of a model calibrated by "
            "Model Optimizer or pytorch-quantization"
        )
    lines = "\n".join(f"  - {key}: {reason}" for key, reason in unmatched.items())
    return f"no range in {where} belongs to a quantized operand:\n{lines}"


def _load(path: Path) -> Mapping[str, Any]:
    try:
        regular_file(path)
        if path.suffix == ".safetensors":
            return load_file(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise QuantizerError(f"{path} cannot be read: {error}") from error
    except Exception as error:
        # The message of torch advises weights_only=False, which would run code in the file.
        raise QuantizerError(
            f"{path} contains objects other than tensors ({type(error).__name__}); save the state dict of the "
            f"quantized "
            "model: torch.save(model.state_dict(), path)"
        ) from error
    # mto.save also writes settings.
    state = loaded.get("model_state_dict", loaded) if isinstance(loaded, dict) else loaded
    if not isinstance(state, Mapping):
        raise QuantizerError(f"{path} holds a {type(state).__name__}; expected a state dict")
    return state
