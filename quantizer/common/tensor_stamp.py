"""The version of a tensor, and its stamp, which shows a later look whether it is the same memory and values.

torch counts in-place operations, but not what ``.data`` or a numpy view writes, so a stamp has a checksum of all values
as well. It has to be faster than what it saves, which for the range of a weight is two passes at the speed of memory:
CRC-32 takes longer than those. So 8 bytes at a time are added up, many columns at once, and CRC-32 is of the sums.

Legend: w_i the words of 8 bytes of a part of P Q words, P and Q primes. The sums are those of all w_i with one i mod P,
and those of all w_i with one i mod Q. No two words have both in common, so that words that change places change sums,
whatever the width of the matrix.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_P, _Q = 503, 509
"""P and Q: odd, so that all signs changed do not add up to no change, and of a part that the caches hold."""


def tensor_version(tensor: Tensor) -> int:
    """Return torch's count of in-place changes, without those by ``.data``; 0 for a tensor of inference mode."""
    return 0 if tensor.is_inference() else tensor._version


@dataclass(frozen=True, slots=True)
class TensorStamp:
    """The state of a tensor at one time: two of one tensor are equal if nothing was written into it between them.

    Attributes:
        version: how often torch changed it in place.
        place: its memory: address, device, type, shape and strides.
        values: the checksum of its values; None on the meta device, which has none. Where the values cannot be read, as
            those of another kind of tensor, it is an object that equals no other.
    """

    version: int
    place: tuple[Any, ...]
    values: object

    @classmethod
    def of(cls, tensor: Tensor) -> TensorStamp:
        """Return the stamp of a tensor as it is now; it takes one pass over the values."""
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return cls(0, (), object())
        place = tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride()
        return cls(tensor_version(tensor), place, None if tensor.is_meta else _checksum(tensor.detach()))


def _checksum(tensor: Tensor) -> int:
    """Return a checksum of all bytes of a tensor [*]."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    whole = len(flat) // (8 * _P * _Q) * (8 * _P * _Q)
    checksum = zlib.crc32(flat[whole:].cpu().numpy().tobytes())
    if flat.device.type == "cpu":
        # numpy adds along columns three times as fast as torch. The second sum of a part reads it from the cache.
        for part in flat[:whole].numpy().view(np.uint64).reshape(-1, _P * _Q):
            checksum = zlib.crc32(np.add.reduce(part.reshape(_P, _Q), axis=0), checksum)
            checksum = zlib.crc32(np.add.reduce(part.reshape(_Q, _P), axis=0), checksum)
        return checksum
    aligned = flat[:whole] if flat.storage_offset() % 8 == 0 else flat[:whole].clone()
    words = aligned.view(torch.int64)
    for rows, columns in ((_P, _Q), (_Q, _P)):
        checksum = zlib.crc32(words.reshape(-1, rows, columns).sum(1).cpu().numpy().tobytes(), checksum)
    return checksum
