"""Codes of one byte and of four bits, as files and kernels hold them.

torch's quantized tensors are deprecated, and nothing that replaces them is one pass: the operators of
``quantized_decomposed`` are five, which takes ten times as long.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

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


_LOW = 0b1111
_SIGN = 0b1000


def packed_size(count: int) -> int:
    """Return the number of bytes of ``count`` packed codes."""
    return (count + 1) // 2


def pack_pairs(codes: Tensor) -> Tensor:
    """Return codes int8 [*] from -8 to 7 as uint8 [packed_size(*)], the first of two in the lower half of a byte."""
    flat = torch.nn.functional.pad(codes.flatten(), (0, codes.numel() % 2)).view(torch.uint8) & _LOW
    return flat[0::2] | (flat[1::2] << _LOW.bit_length())


def unpack_pairs(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the codes that ``pack_pairs`` packed, int8 of the given shape."""
    halves = torch.stack([packed & _LOW, packed >> _LOW.bit_length()], dim=1).flatten()
    # Two's complement of 4 bits: the highest bit has the weight -8.
    codes = (halves ^ _SIGN).view(torch.int8) - _SIGN
    return codes[: torch.Size(shape).numel()].reshape(shape).clone()
