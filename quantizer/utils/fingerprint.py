"""A checksum of tensors, because no file format of tensors detects a flipped bit.

Fingerprints of a model's weights, which detect weights other than those of the calibration.

Ranges of activations are valid only for the weights they were measured with. A checksum of every parameter detects a
change; a version counter would miss writes through ``.data``, and weights in a file have none.

The version of a tensor, and its stamp, which shows a later look whether it is the same memory and values.

torch counts in-place operations, but not what ``.data`` or a numpy view writes, so a stamp has a checksum of all values
as well. It has to be faster than what it saves, which for the range of a weight is two passes at the speed of memory:
CRC-32 takes longer than those. So 8 bytes at a time are added up, many columns at once, and CRC-32 is of the sums.

Legend: w_i the words of 8 bytes of a part of P Q words, P and Q primes. The sums are those of all w_i with one i mod P,
and those of all w_i with one i mod Q. No two words have both in common, so that words that change places change sums,
whatever the width of the matrix.
"""

from __future__ import annotations

import hashlib
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quantizer.errors import CalibrationError, QuantizerError


def tensors_digest(tensors: Mapping[str, Tensor], text: str = "") -> str:
    """Return the SHA-256 (hexadecimal) of the name, type, shape and values of every tensor, and of ``text``."""
    found = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        found.update(f"\0{name}\0{value.dtype}\0{list(value.shape)}\0".encode())
        found.update(value.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


_SAMPLE = 1024
"""How many values of a parameter, about, give the mean magnitude that distinguishes a cast from other values."""

_CAST = 0.02
"""The largest relative change of the mean magnitude by a cast: bfloat16 has 8 significant bits."""


@dataclass(frozen=True, slots=True)
class _Print:
    """The fingerprint of one parameter; the checksum is None if its values cannot be read, as on the meta device."""

    shape: tuple[int, ...]
    dtype: str
    checksum: int | None
    magnitude: float


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The fingerprints of a model's parameters, by path.

    Attributes:
        parameters: the fingerprint of each.
        stamps: what shows whether a parameter is still what it was then; none of a file.
    """

    parameters: Mapping[str, _Print]
    stamps: Mapping[str, TensorStamp] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, model: nn.Module, known: Fingerprint | None = None) -> Fingerprint:
        """Return the fingerprint of a model; it takes one pass over the parameters, at about 5 GB/s."""
        before = {} if known is None else known.stamps
        prints, stamps = {}, {}
        for path, parameter in model.named_parameters():
            stamp = stamps[path] = TensorStamp.of(parameter)
            same = known is not None and before.get(path) == stamp
            prints[path] = known.parameters[path] if known is not None and same else _print(parameter.detach())
        return cls(prints, stamps)

    def plain(self) -> dict[str, list[Any]]:
        """Return the fingerprint as plain values, to be saved."""
        return {
            path: [list(one.shape), one.dtype, one.checksum, one.magnitude] for path, one in self.parameters.items()
        }

    @classmethod
    def from_plain(cls, values: Mapping[str, Any] | None) -> Fingerprint | None:
        """Return the fingerprint whose ``plain()`` this is; None for None."""
        if values is None:
            return None
        try:
            return cls({str(path): _read(*entry) for path, entry in values.items()})
        except (AttributeError, OverflowError, TypeError, ValueError) as error:
            raise QuantizerError(f"the fingerprint of the weights cannot be read, it is damaged: {error!r}") from error


def refuse_other_shapes(before: Fingerprint, now: Fingerprint) -> None:
    """Raise if parameters have other shapes than in the calibrated model."""
    both = ((path, one.shape, now.parameters.get(path)) for path, one in before.parameters.items())
    found = [(path, shape, other.shape) for path, shape, other in both if other is not None and other.shape != shape]
    if found:
        path, was, is_now = found[0]
        raise CalibrationError(
            f"the calibration belongs to another model: {path} had the shape {list(was)} and has {list(is_now)} here "
            f"({len(found)} parameters differ); calibrate this model with a Quantizer of its own"
        )


def changed_parameters(before: Fingerprint, now: Fingerprint) -> list[str]:
    """Return the paths of parameters with other values now; a cast to another float type is no change."""
    both = ((path, one, now.parameters.get(path)) for path, one in before.parameters.items())
    return [path for path, one, other in both if other is not None and not _alike(one, other)]


def changed_types(before: Fingerprint, now: Fingerprint) -> dict[torch.dtype, torch.dtype]:
    """Return the float types of the calibrated model whose parameters have another type now, each with that one."""
    found: dict[str, str] = {}
    first: dict[str, str] = {}
    for path, one in before.parameters.items():
        other = now.parameters.get(path)
        if other is None:
            continue
        if found.setdefault(one.dtype, other.dtype) != other.dtype:
            raise CalibrationError(
                f"parts of the model were cast since the calibration: {first[one.dtype]} is {found[one.dtype]} and "
                f"{path} is {other.dtype}, and both were {one.dtype}; calibrate it again as it is now"
            )
        first.setdefault(one.dtype, path)
    kinds = ((getattr(torch, was), getattr(torch, now)) for was, now in found.items() if was != now)
    return {was: now for was, now in kinds if was.is_floating_point and now.is_floating_point}


def warn_of_other_weights(before: Fingerprint, now: Fingerprint, buffers: Sequence[str] = ()) -> None:
    """Warn if parameters of the same shape have other values now, or ``buffers`` that weights are computed from."""
    found = changed_parameters(before, now)
    parts = [f"{len(found)} of {len(before.parameters)} parameters"] if found else []
    parts += [f"{len(buffers)} buffers that weights are computed from"] if buffers else []
    if parts:
        warnings.warn(
            f"{' and '.join(parts)} changed since the calibration, the first is {[*found, *buffers][0]}: scales of "
            "weights are those of the weights that are here now, and the ranges of activations are still those of the "
            "former ones; calibrate again if they differ by more than a little",
            stacklevel=5,
        )


def _alike(one: _Print, other: _Print) -> bool:
    if one.checksum is None or other.checksum is None or one.shape != other.shape:
        return True
    if one.dtype == other.dtype:
        return one.checksum == other.checksum
    return abs(one.magnitude - other.magnitude) <= _CAST * max(one.magnitude, other.magnitude)


def _print(value: Tensor) -> _Print:
    shape, dtype = tuple(value.shape), str(value.dtype).removeprefix("torch.")
    if value.is_meta or value.layout is not torch.strided:
        return _Print(shape, dtype, None, 0.0)
    flat = value.cpu().contiguous().flatten()
    sample = flat[:: max(1, len(flat) // _SAMPLE)].abs().double()
    magnitude = float(sample.nan_to_num(0.0, 0.0, 0.0).mean()) if len(flat) else 0.0
    return _Print(shape, dtype, zlib.crc32(flat.view(torch.uint8).numpy().data), magnitude)


def _read(shape: Any, dtype: Any, checksum: Any, magnitude: Any) -> _Print:
    known = checksum is None or isinstance(checksum, int)
    sizes = isinstance(shape, list) and all(isinstance(size, int) for size in shape)
    if not (known and sizes and isinstance(dtype, str) and isinstance(magnitude, int | float)):
        raise TypeError(f"got {[shape, dtype, checksum, magnitude]!r}")
    return _Print(tuple(shape), dtype, checksum, float(magnitude))


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
