"""``quantizer::integer_linear``, oneDNN's integer linear as one operator of a compiled graph.

Inductor takes oneDNN's own operator only where it prepacks the weight itself, from a constant of a frozen graph, and
stops with an assertion elsewhere. This operator takes the weight as it is stored and packs it at the first call, so
that graphs need not be frozen. Legend as in ``kernels.py``; s [] and z [] are tensors, which a range of each call makes
in the graph.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_NAME = "quantizer::integer_linear"
_PACKED: MutableMapping[Tensor, tuple[Tensor, Tensor]] = WeakTensorKeyDictionary()

torch.library.define(_NAME, "(Tensor codes, Tensor s, Tensor z, Tensor weight, Tensor t, Tensor? bias) -> Tensor")


@torch.library.impl(_NAME, "CPU")
def _integer_linear(codes: Tensor, s: Tensor, z: Tensor, weight: Tensor, t: Tensor, bias: Tensor | None) -> Tensor:
    held = _PACKED.get(weight)
    if held is None:
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        held = _PACKED[weight] = packed, torch.zeros(len(weight), dtype=torch.int64)
    call: Any = torch.ops.onednn.qlinear_pointwise.default
    given = (codes.contiguous(), float(s), int(z), held[0], t, held[1], bias)
    result: Tensor = call(*given, 1.0, 0, torch.float32, "none", [], "")
    return result


def _without_data(codes: Tensor, s: Tensor, z: Tensor, weight: Tensor, t: Tensor, bias: Tensor | None) -> Tensor:
    return codes.new_empty((*codes.shape[:-1], len(weight)), dtype=torch.float32)


torch.library.register_fake(_NAME, _without_data)


def integer_linear(codes: Tensor, s: Tensor, z: Tensor, weight: Tensor, t: Tensor, bias: Tensor | None) -> Tensor:
    """Return y [.., N], float32, of codes a [.., K], uint8, and the weight w [N, K], int8."""
    made: Tensor = torch.ops.quantizer.integer_linear(codes, s, z, weight, t, bias)
    return made
