"""The choice of a kernel for a frozen site, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantizer.numerics.qtype import qtype
from quantizer.proxy.lowered.calls import CALLS, Call
from quantizer.proxy.lowered.kernels import (
    Activation,
    IntegerConvolution,
    IntegerLinear,
    IntegerMatmul,
    Kernel,
    ScaledMatmul,
    TableLookup,
)
from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.proxy.site import Site

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The types of values that kernels take and return; they compute in float32 what they do not compute in codes."""

_CPU, _GPU = "cpu", "cuda"
_SPATIAL = {"conv1d": 1, "conv2d": 2}


@dataclass(frozen=True, slots=True)
class Lowering:
    """Settings of the choice of kernels, beside the site itself.

    Attributes:
        widest: the largest code of a weight whose products this CPU adds without saturating; None: any.
        kernels: ``cpu`` or ``cuda``, whose kernels to take; None: those of the device where the weight is.
    """

    widest: int | None = None
    kernels: str | None = None


def choose(site: Site, lowering: Lowering) -> Kernel | str:
    """Return the kernel that computes a site, or why it keeps the rounding of the frozen proxy."""
    call = CALLS.get(site.source.operation)
    if call is None:
        return f"torch has no kernel for {site.source.operation} of codes"
    if site.source.in_place:
        return "it writes into its operand"
    held = site.quantizer_of(call.weight)
    if held.stored is None:
        return "no kernel multiplies two activations" if call.channels else "its weight stays float"
    axes = held.stored.dim() - 2
    if axes != _SPATIAL.get(site.source.operation, 0):
        return f"no kernel takes a weight of {axes + 2} axes"
    scales = _scales(held, call)
    if scales is None:
        return f"no kernel takes weights of {held.dtype} with these scales"
    if held.stored_dtype not in FLOATS:
        return f"no kernel returns {str(held.stored_dtype).removeprefix('torch.')}, the type of the weight"
    if call.activation is None:
        whole = qtype(held.dtype).storage is torch.int8
        return TableLookup(held.stored, scales) if whole else f"no lookup in codes of {held.dtype}"
    given = site.quantizer_of(call.activation)
    reason = _unfit(given, held.stored.shape[1 - call.channels])
    return reason if reason is not None else _product(call, held, scales, given, lowering)


def _scales(held: OperandQuantizer, call: Call) -> Tensor | None:
    """Return one scale for each output channel; None if the weight is scaled in another way."""
    assert held.stored is not None
    assert held.scale is not None
    channels = held.stored.shape[call.channels]
    if held.block_size is not None:
        return None
    if held.axis is None:
        return held.scale.detach().float().reshape(1).expand(channels).contiguous()
    along = held.axis % held.stored.dim() == call.channels
    return held.scale.detach().float().reshape(channels).contiguous() if along else None


def _unfit(given: OperandQuantizer, k: int) -> str | None:
    """Return why no kernel takes an activation; None if one may."""
    if not given.enabled or (given.scale is None and not given.dynamic):
        return "only its weight is quantized"
    kind = qtype(given.dtype)
    if kind.bits < 8 * kind.storage.itemsize:
        return f"no kernel takes activations of {given.dtype}"
    if given.axis is not None:
        return "its activation has a scale for each channel"
    if given.dynamic and given.block_size not in (None, k):
        return f"its activation has a range for each {given.block_size} values, and a kernel adds {k} of them at once"
    return None


def _product(
    call: Call, held: OperandQuantizer, scales: Tensor, given: OperandQuantizer, lowering: Lowering
) -> Kernel | str:
    assert held.stored is not None
    device = lowering.kernels or held.stored.device.type
    weights, values = qtype(held.dtype), qtype(given.dtype)
    if weights.is_float != values.is_float:
        return f"no kernel multiplies {given.dtype} by {held.dtype}"
    spatial = held.stored.dim() - 2
    codes = (held.stored if call.channels == 0 else held.stored.t()).contiguous()
    if device == _GPU:
        if spatial:
            return "torch has no integer convolution on a GPU"
        return (ScaledMatmul if weights.is_float else IntegerMatmul)(codes, scales, Activation(given, codes.device))
    if device != _CPU:
        return f"torch has no integer kernels on {device}"
    if weights.is_float:
        return f"no CPU multiplies {held.dtype}; GPUs from compute capability 8.9 on do, once it is moved there"
    if not torch._C._has_mkldnn:
        return "this torch was built without oneDNN"
    if lowering.widest is not None and int(codes.int().abs().max()) > lowering.widest:
        return "this CPU adds products of bytes in 16 bits, which saturate"
    if spatial and given.dynamic and given.block_size is not None:
        return "its activation has a range for each row"
    return (IntegerConvolution if spatial else IntegerLinear)(codes, scales, Activation(given))
