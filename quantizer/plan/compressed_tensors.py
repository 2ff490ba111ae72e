"""Checkpoints in the format of the library ``compressed-tensors``, which transformers and vLLM load.

A quantized linear layer has ``weight`` (int8 or float8_e4m3fn, [out, in]), ``weight_scale`` (float32, [out, 1] or [1])
and, with a calibrated range, ``input_scale`` (float32, [1]) and ``input_zero_point`` (int8, [1]). A layer with integers
in its weight alone has ``weight_packed`` (int32) and ``weight_shape`` instead of ``weight``. The other tensors are the
model's. ``quantization_config`` in ``config.json`` describes the formats, and lists the linear layers in floating point
as ``ignore``.

The format describes layers ``torch.nn.Linear`` alone. Corrections of biases are added to the biases. Other quantized
sites, and linear layers with factors of SmoothQuant or AWQ, stay in floating point.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quantizer.errors import QuantizerError
from quantizer.numerics.formats import INT8, UINT8, qtype
from quantizer.plan.apply import is_frozen_by
from quantizer.plan.site_plan import OperandPlan, Plan, SitePlan
from quantizer.proxy.build import sites_of
from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.utils.files import whole_file
from quantizer.utils.paths import is_file
from quantizer.utils.plain_values import json_values

METHOD = "compressed-tensors"
"""The ``quant_method`` in ``config.json``."""

_CONFIG = "config.json"
_WORD = 32
"""The bits of one packed integer."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CompressedCheckpoint:
    """A model in the format of ``compressed-tensors``.

    Attributes:
        tensors: the state dict.
        config: the ``quantization_config``.
        linears: the paths of the quantized layers.
        left: the reason for each quantized site that the format cannot express, by the path of the site.
    """

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    linears: tuple[str, ...]
    left: dict[str, str] = field(default_factory=dict)

    def save(self, model: nn.Module, folder: str | os.PathLike[str]) -> None:
        """Write the model, of transformers, with the tensors and the config of this checkpoint."""
        saved: Any = model
        if not hasattr(model, "save_pretrained"):
            raise QuantizerError(
                f"{METHOD}: {type(model).__name__} is not a transformers model, so it has no config.json; save the "
                "tensors and the config of compressed_checkpoint(...) yourself"
            )
        saved.save_pretrained(folder, state_dict=self.tensors)
        path = Path(folder) / _CONFIG
        document = json_values(path.read_bytes())
        assert isinstance(document, dict)
        with whole_file(path) as part:
            part.write_text(json.dumps({**document, "quantization_config": self.config}, indent=2) + "\n", "utf-8")


class _Scheme(NamedTuple):
    """The formats of a layer, so that layers with equal ones form a group."""

    dtype: str
    strategy: str
    group_size: int | None
    inputs: str | None
    input_strategy: str
    input_group: int | None
    dynamic: bool

    @property
    def format(self) -> str:
        """The name of the storage."""
        if qtype(self.dtype).is_float:
            return "float-quantized" if self.inputs else "naive-quantized"
        return "int-quantized" if self.inputs else "pack-quantized"

    def group(self, targets: list[str]) -> dict[str, Any]:
        """Return the group of ``quantization_config`` with these layers."""
        weights = {**_format(self.dtype), "symmetric": True, "strategy": self.strategy, "group_size": self.group_size}
        inputs: dict[str, Any] | None = None
        if self.inputs is not None:
            symmetric = not qtype(self.inputs).has_zero_point
            inputs = {**_format(self.inputs), "symmetric": symmetric, "strategy": self.input_strategy}
        return {
            "targets": targets,
            "weights": {**weights, "dynamic": False},
            "input_activations": inputs and {**inputs, "group_size": self.input_group, "dynamic": self.dynamic},
            "output_activations": None,
            "format": self.format,
        }


def _format(dtype: str) -> dict[str, Any]:
    kind = qtype(dtype)
    return {"num_bits": kind.bits, "type": "float" if kind.is_float else "int"}


def is_compressed(folder: Path) -> bool:
    """Return whether a folder is a checkpoint of this format."""
    if not is_file(folder / _CONFIG):
        return False
    try:
        document = json_values((folder / _CONFIG).read_bytes())
    except (OSError, ValueError):
        return False
    section = document.get("quantization_config") if isinstance(document, dict) else None
    return isinstance(section, dict) and section.get("quant_method") == METHOD


def compressed_checkpoint(
    model: nn.Module, frozen: nn.Module, plan: Plan, *, dynamic: bool = False
) -> CompressedCheckpoint:
    """Return a model in the format of ``compressed-tensors``, with the integers and scales of its frozen proxy.

    Args:
        model: the float model.
        frozen: the result of ``quantize(model)``.
        plan: the plan of the frozen proxy.
        dynamic: compute one range per token at run time instead of the ranges of the plan.

    Raises:
        QuantizerError: the proxy is not frozen by this plan, or no layer can be expressed.
    """
    if not is_frozen_by(frozen, plan):
        raise QuantizerError(
            f"{METHOD}: the proxy is not the result of quantize(model) with this plan; pass the latest result, and the "
            "plan of its Quantizer"
        )
    tensors = {name: value.detach() for name, value in model.state_dict().items()}
    names = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    tied = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    schemes: dict[str, _Scheme] = {}
    left: dict[str, str] = {}
    for site in sites_of(frozen):
        entry = plan[site.path]
        if not entry.quantized:
            continue
        host = model.get_submodule(site.host_path)
        reason = _no_linear(entry, host, site.host_path) or _no_scheme(entry)
        if reason is None and isinstance(host, nn.Linear):
            if names[id(host)] > 1 or tied[id(host.weight)] > 1:
                reason = "its weight is shared with another module"
            elif site.bias_shift is not None and host.bias is not None and tied[id(host.bias)] > 1:
                reason = "its bias is corrected, and shared with another module"
        if reason is not None:
            left[site.path] = reason
            continue
        scheme = schemes[site.host_path] = _scheme(entry, dynamic)
        prefix = f"{site.host_path}." if site.host_path else ""
        weight = tensors.pop(f"{prefix}weight")
        for name, value in _tensors(entry, scheme, site.quantizer_of("weight"), weight):
            tensors[f"{prefix}{name}"] = value
        if site.bias_shift is not None and f"{prefix}bias" in tensors:
            bias = tensors[f"{prefix}bias"]
            tensors[f"{prefix}bias"] = bias + site.bias_shift.to(bias)
    if not schemes:
        why = "; ".join(f"{path}: {reason}" for path, reason in list(left.items())[:4]) or "the plan quantizes nothing"
        raise QuantizerError(f"{METHOD}: no quantized linear layer can be expressed in this format: {why}")
    return CompressedCheckpoint(tensors=tensors, config=_config(model, schemes), linears=tuple(schemes), left=left)


def write_compressed_tensors(
    model: nn.Module, frozen: nn.Module, plan: Plan, folder: str | os.PathLike[str], *, dynamic: bool = False
) -> CompressedCheckpoint:
    """Write a transformers model to a folder that ``AutoModel.from_pretrained`` loads with ``compressed-tensors``.

    Example::

        quantizer.write_compressed_tensors(model, q.quantize(model), q.plan, "my-model-int8")

    The tokenizer is not written.

    Args:
        model: the float model, of transformers.
        frozen: the result of ``q.quantize(model)``, where ``q`` is a ``Quantizer``.
        plan: its plan, ``q.plan``.
        folder: the folder.
        dynamic: compute one range per token at run time instead of the ranges of the plan.

    Raises:
        QuantizerError: the model is not one of transformers, ``frozen`` is not the result of this plan, or no layer can
            be expressed.
    """
    checkpoint = compressed_checkpoint(model, frozen, plan, dynamic=dynamic)
    checkpoint.save(model, folder)
    return checkpoint


def _no_linear(entry: SitePlan, host: nn.Module, path: str) -> str | None:
    """Return why a quantized site is not a layer of the format; None if it is one."""
    if entry.kind != "linear":
        return f"a site of kind {entry.kind} is not a linear layer"
    # Subclasses may read their weight elsewhere, as the output projection of nn.MultiheadAttention is read.
    if type(host) is not nn.Linear:
        return f"its weight belongs to {type(host).__name__}, and the format describes torch.nn.Linear alone"
    weight = _operand(entry, "weight")
    if weight is None or weight.parameter != (f"{path}.weight" if path else "weight") or weight.as_computed:
        return "its weight is not the parameter of its layer"
    return None if weight.read_outside is None else f"its weight is also read in {weight.read_outside}"


def _no_scheme(entry: SitePlan) -> str | None:
    """Return why the format cannot express the operands of a linear layer; None if it can."""
    weight, data = _operand(entry, "weight"), _operand(entry, "activation")
    if weight is None or data is None or not weight.quantized:
        return "its weight is not quantized"
    if weight.factor is not None or data.factor is not None:
        return (
            "its input is multiplied by factors of SmoothQuant or AWQ, which the format does not have; quantize with "
            "activations.smoothquant_alpha null and no AWQ"
        )
    if entry.calls_apart:
        return "its calls have ranges of their own"
    if weight.block_size is None and weight.axis not in (None, 0):
        return f"its weight has scales along axis {weight.axis}"
    if weight.block_size is not None and (data.quantized or qtype(weight.dtype).is_float):
        return "its weight has scales in blocks, and its input is quantized"
    if not data.quantized:
        return None
    if qtype(weight.dtype).is_packed:
        return f"its weight is in {weight.dtype}, and its input is quantized"
    if qtype(weight.dtype).is_float is not qtype(data.dtype).is_float:
        return f"its input is in {data.dtype}, and its weight in {weight.dtype}"
    return None


def _operand(entry: SitePlan, role: str) -> OperandPlan | None:
    return next((operand for operand in entry.operands if operand.role == role), None)


def _scheme(entry: SitePlan, dynamic: bool) -> _Scheme:
    """Return the formats of a linear layer that the format can express."""
    weight, data = _operand(entry, "weight"), _operand(entry, "activation")
    assert weight is not None
    assert data is not None
    strategy = "group" if weight.block_size is not None else "tensor" if weight.axis is None else "channel"
    per_token = data.quantized and dynamic
    block = data.block_size if data.dynamic and not per_token else None
    return _Scheme(
        dtype=weight.dtype,
        strategy=strategy,
        group_size=weight.block_size,
        inputs=data.dtype if data.quantized else None,
        input_strategy="token" if per_token else "tensor" if block is None else "group",
        input_group=block,
        dynamic=per_token or (data.quantized and data.dynamic),
    )


def _tensors(
    entry: SitePlan, scheme: _Scheme, weight: OperandQuantizer, values: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a linear layer by name: weight [out, in], or packed [out, in * bits / 32]; scales."""
    assert weight.stored is not None
    assert weight.scale is not None
    scale = weight.scale.detach().float()
    shape = {"tensor": (1,), "channel": (-1, 1)}.get(scheme.strategy, tuple(scale.shape))
    if scheme.format == "pack-quantized":
        yield "weight_packed", _packed(weight.stored, scheme.dtype)
        yield "weight_shape", torch.tensor(values.shape)
    else:
        yield "weight", weight.stored
    yield "weight_scale", scale.reshape(shape).contiguous()
    data = _operand(entry, "activation")
    if data is None or data.scale is None or not data.quantized or scheme.dynamic:
        return
    yield "input_scale", data.scale.float().reshape(1)
    if data.zero_point is not None:
        # The library stores UINT8 as INT8, with a zero point that is 128 lower.
        moved = data.zero_point + INT8.qmin - UINT8.qmin
        yield "input_zero_point", torch.tensor([moved], dtype=torch.int8)


def _packed(codes: Tensor, dtype: str) -> Tensor:
    """Return integers [out, in], less the lowest of their format, in words of 32 bits, the lowest bits first."""
    kind = qtype(dtype)
    each = _WORD // kind.bits
    padded = nn.functional.pad(codes.int() - kind.qmin, (0, -codes.shape[1] % each))
    values = padded.reshape(len(codes), -1, each)
    shifts = torch.arange(each, device=codes.device) * kind.bits
    words: Tensor = (values.long() << shifts).sum(dim=-1)
    # Words from 2^31 on are negative in int32.
    return (words - ((words >> (_WORD - 1)) << _WORD)).int()


def _config(model: nn.Module, schemes: dict[str, _Scheme]) -> dict[str, Any]:
    """Return the ``quantization_config`` of a model whose linear layers have these schemes."""
    linears = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    groups = dict.fromkeys(schemes.values())
    formats = {scheme.format for scheme in groups}
    targets = {
        scheme: [path for path, other in schemes.items() if other == scheme] if len(groups) > 1 else ["Linear"]
        for scheme in groups
    }
    return {
        "quant_method": METHOD,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{number}": scheme.group(targets[scheme]) for number, scheme in enumerate(groups)},
        "ignore": [path for path in linears if path not in schemes],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
