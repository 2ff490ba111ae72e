"""Ranges that NVIDIA's Model Optimizer or pytorch-quantization saved, as scales for ``Quantizer.load_scales``.

Both save the largest magnitude of each quantizer, which maps to the last step of its format, in the state dict of the
quantized model: ``MODULE.input_quantizer._amax`` (Model Optimizer) or ``MODULE._input_quantizer._amax``. Neither
library is needed to read them. ``modelopt_state`` has settings but no ranges.

A scale is amax / 127, as in both toolkits. For a weight it is amax over the number of steps that the target uses, which
are fewer if products of bytes would saturate. The clamping differs: pytorch-quantization clamps to [-127, 127], and so
does Model Optimizer with ``narrow_range: True``; its default is [-128, 127], as here. With ranges from ``max`` no
weight reaches -128, so weights round alike; an activation below -amax may reach it.
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
"""The quantizers of an attention's products, and their operands: query, key, probabilities or value."""

_FUSED = {"q": "query", "k": "key", "p": "probabilities", "v": "value"}
_PRODUCTS = {"q": (0, "lhs"), "k": (0, "rhs"), "p": (1, "lhs"), "v": (1, "rhs")}


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolkitScales:
    """The scales from a state dict, and its ranges that were not used.

    Attributes:
        scales: float32 [] or [C], by ``SITE.OPERAND``, for ``Quantizer.load_scales``.
        unmatched: the reason why a range was not used, by its key in the state dict.
    """

    scales: dict[str, Tensor] = field(default_factory=dict)
    unmatched: dict[str, str] = field(default_factory=dict)


def read_toolkit_scales(source: Mapping[str, Any] | str | os.PathLike[str], plan: Plan) -> ToolkitScales:
    """Read the ranges of another toolkit for the operands that ``plan`` quantizes.

    - ``input_quantizer`` and ``weight_quantizer`` belong to the operands of the one product that a module computes.
    - Quantizers of an attention (``q_bmm_quantizer``, ``matmul_q_input_quantizer``, ..) belong to its fused attention,
      or to its two products in the order of the source, as in Model Optimizer: query and key to the first one,
      probabilities and value to the second. Observed probabilities must lie in [0, 1].
    - Not used: ranges of more than one axis, per-channel ranges of inputs, and ranges of inputs that the toolkit scales
      first (SmoothQuant, AWQ).
    """
    state = source if isinstance(source, Mapping) else _load(Path(source))
    hosts: dict[str, list[SitePlan]] = {}
    for path, entry in plan.items():
        hosts.setdefault(".".join(path.split(".")[:-2]), []).append(entry)
    found = ToolkitScales()
    for key, amax in state.items():
        match = _AMAX.fullmatch(key) if isinstance(key, str) else None
        if match is None:
            continue
        try:
            name, operand = _operand(match["quantizer"], hosts.get(match["module"] or "", []))
            if name in found.scales:
                raise _Unmatched(f"{name} has a range of another quantizer already")
            found.scales[name] = _scale(amax, _steps(operand), key, state)
        except _Unmatched as reason:
            found.unmatched[key] = str(reason)
    if not found.scales:
        raise QuantizerError(_nothing(source, found.unmatched))
    return found


class _Unmatched(Exception):
    """The reason why a range belongs to no operand of the plan."""


def _operand(quantizer: str, sites: list[SitePlan]) -> tuple[str, OperandPlan]:
    """Return ``SITE.OPERAND`` and the plan of the operand of a module's quantizer; ``sites``: those of the module."""
    if not sites:
        raise _Unmatched("no module of this name has a site")
    if quantizer in ("input_quantizer", "weight_quantizer"):
        products = [entry for entry in sites if entry.kind != "residual_add"]
        if len(products) != 1:
            raise _Unmatched(f"its module has {len(products)} products, and the name does not say which")
        role = "weight" if quantizer == "weight_quantizer" else "activation"
        operands = [operand for operand in products[0].operands if operand.role == role]
        if len(operands) > 1:
            raise _Unmatched(f"{products[0].name} has {len(operands)} operands of the role {role!r}")
        return _quantized(products[0], next(iter(operands), None))
    if quantizer not in _ATTENTION:
        raise _Unmatched("a quantizer of this name is no operand of a product")
    letter = _ATTENTION[quantizer]
    products = [entry for entry in sites if entry.kind == "matmul"]
    if len(products) == 1 and len(products[0].operands) == len(_FUSED):
        return _quantized(products[0], _named(products[0], _FUSED[letter]))
    if not _is_attention(products):
        raise _Unmatched("its module has no attention of two quantized products whose operands can be told")
    place, name = _PRODUCTS[letter]
    return _quantized(products[place], _named(products[place], name))


def _is_attention(products: list[SitePlan]) -> bool:
    """Return whether these are the two products of one function, of which the second multiplies probabilities."""
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
            "its outliers are moved (set activations.smoothquant_alpha: null, and no weights.rounding: awq)"
            if operand.smooth is not None
            else "it has a zero point (set activations.zero_point: false)"
        )
        raise _Unmatched(f"{entry.name}.{operand.name} is held in another way here: {how}")
    return f"{entry.name}.{operand.name}", operand


def _steps(operand: OperandPlan) -> int:
    """Return the step that amax maps to: the last of the format, or for a weight the last that the target uses."""
    qmax = qtype(operand.dtype).qmax
    if operand.role != "weight" or operand.given or operand.scale is None or operand.amax is None:
        return qmax
    widest = operand.scale.flatten().argmax()
    amax = float(operand.amax.flatten()[widest])
    return min(round(amax / float(operand.scale.flatten()[widest])), qmax) if amax > 0 else qmax


def _scale(amax: object, qmax: int, key: str, state: Mapping[str, Any]) -> Tensor:
    """Return the scale [] or [C] of amax, which may be [C, 1] or [1, C]; amax 0 gets scale 1: zeros stay zeros."""
    if f"{key.removesuffix('_amax')}_pre_quant_scale" in state:
        raise _Unmatched("the toolkit scales this tensor before it rounds it: the range is not that of the model's own")
    if not isinstance(amax, Tensor) or not amax.is_floating_point():
        got = amax.dtype if isinstance(amax, Tensor) else type(amax).__name__
        raise _Unmatched(f"a tensor of floats is needed, got {got}")
    if sum(size != 1 for size in amax.shape) > 1:
        raise _Unmatched(f"a range of shape {list(amax.shape)} is one of blocks; one, or one a channel, is needed")
    if amax.numel() != 1 and not key.endswith("weight_quantizer._amax"):
        raise _Unmatched(f"a range of shape {list(amax.shape)}; what is no weight has one range")
    if not bool((torch.isfinite(amax) & (amax >= 0)).all()):
        raise _Unmatched("not all of its values are finite and at least 0")
    amax = amax.detach().cpu().double()
    amax = amax.reshape(()) if amax.numel() == 1 else amax.flatten()
    return torch.where(amax > 0, amax / qmax, torch.ones_like(amax)).float()


def _nothing(source: object, unmatched: Mapping[str, str]) -> str:
    where = "the state dict" if isinstance(source, Mapping) else str(source)
    if not unmatched:
        return (
            f"{where} has no key that ends in '_quantizer._amax': it is none of a model that Model Optimizer or "
            "pytorch-quantization calibrated"
        )
    lines = "\n".join(f"  - {key}: {reason}" for key, reason in unmatched.items())
    return f"no range of {where} belongs to an operand that is quantized:\n{lines}"


def _load(path: Path) -> Mapping[str, Any]:
    try:
        regular_file(path)
        if path.suffix == ".safetensors":
            return load_file(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise QuantizerError(f"{path} cannot be read: {error}") from error
    except Exception as error:
        # torch's own message advises weights_only=False, which runs any code in the file.
        raise QuantizerError(
            f"{path} does not hold tensors alone ({type(error).__name__}); save the state dict of the quantized "
            "model: torch.save(model.state_dict(), path)"
        ) from error
    # mto.save writes settings beside the tensors.
    state = loaded.get("model_state_dict", loaded) if isinstance(loaded, dict) else loaded
    if not isinstance(state, Mapping):
        raise QuantizerError(f"{path} holds a {type(state).__name__}; a state dict is expected")
    return state
