"""Codes of 4 bits, packed two to a byte for files; torch computes with no 4-bit type."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
