"""Codes of one byte in one pass over the values, by torch's own quantizer.

torch's quantized tensors are deprecated, and nothing that replaces them is one pass: the operators of
``quantized_decomposed`` are five, which takes ten times as long.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor


def byte_codes(values: Tensor, scale: float, zero_point: int) -> Tensor:
    """Return UINT8 codes, clamp(round(values / scale) + zero_point, 0, 255), of float32 values on the CPU.

    ``int_repr`` would copy them one by one, which takes four times as long as making them; the codes' own memory is
    taken instead.
    """
    held = torch.quantize_per_tensor(values, scale, zero_point, torch.quint8)
    return torch.empty(0, dtype=torch.uint8).set_(held.untyped_storage(), 0, held.shape, held.stride())


def spend_deprecation_warning() -> None:
    """Let torch give its warning, once in a process, that tensors of quantized types will go, where nobody sees it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        byte_codes(torch.zeros(1), 1.0, 0)
