"""Checksums of tensors and of model weights.

Formats of tensor files do not detect flipped bits, so saved tensors get a SHA-256. Ranges of activations are valid only
for the weights of the calibration, so a ``Fingerprint`` detects changed weights. A version counter would miss writes
through ``.data``.

A ``TensorStamp`` shows whether a tensor changed since an earlier time. It combines torch's count of in-place operations
with a checksum of all values, which must be fast: the range of a weight takes two passes at memory speed, and CRC-32
takes longer. So the checksum is the CRC-32 of sums of 8-byte words.

Legend: w_i the words of 8 bytes of a part of P Q words, P and Q primes. One set of sums adds all w_i with equal i mod
P, the other all w_i with equal i mod Q. No two words share both sums, so exchanged words change the sums for any width
of the matrix.
"""

from __future__ import annotations

import hashlib
import warnings
import zlib
from collections import defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from quantizer.errors import CalibrationError, QuantizerError
from quantizer.utils import devices


def tensors_digest(tensors: Mapping[str, Tensor], text: str = "") -> str:
    """Return the SHA-256 (hexadecimal) of the name, type, shape and values of every tensor, and of ``text``."""
    digest = hashlib.sha256(text.encode())
    values = _bytes_of(tensors)
    for name in sorted(tensors):
        digest.update(f"\0{name}\0{tensors[name].dtype}\0{list(tensors[name].shape)}\0".encode())
        digest.update(values[name].numpy().data)
    return digest.hexdigest()


_SMALL = 2**20
"""The most bytes of a tensor that is copied from a GPU together with others."""


def _bytes_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the values as uint8 [*] on the CPU.

    All small tensors of a device are copied at once, because each copy waits for the device.
    """
    values = {name: tensor.detach().contiguous().flatten().view(torch.uint8) for name, tensor in tensors.items()}
    small: dict[torch.device, list[str]] = defaultdict(list)
    for name, value in values.items():
        if devices.is_apart(value.device) and len(value) <= _SMALL:
            small[value.device].append(name)
    for names in small.values():
        sizes = [len(values[name]) for name in names]
        copied = torch.split(torch.cat([values[name] for name in names]).cpu(), sizes)
        values.update(zip(names, copied, strict=True))
    return {name: value.cpu() for name, value in values.items()}


_SAMPLE = 1024
"""Approximate number of values for the mean magnitude, which distinguishes a cast from other changes."""

_CAST = 0.02
"""Largest relative change of the mean magnitude by a cast; bfloat16 has 8 significant bits."""


@dataclass(frozen=True, slots=True)
class _ParameterPrint:
    """Fingerprint of one parameter; the checksum is None if the values cannot be read, as on the meta device."""

    shape: tuple[int, ...]
    dtype: str
    checksum: int | None
    magnitude: float


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Fingerprints of a model's parameters, by path.

    Attributes:
        parameters: the fingerprint of each parameter.
        stamps: the stamp of each parameter, to skip unchanged ones; empty if loaded from a file.
    """

    parameters: Mapping[str, _ParameterPrint]
    stamps: Mapping[str, TensorStamp] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, model: nn.Module, known: Fingerprint | None = None) -> Fingerprint:
        """Return the fingerprint of a model, in one pass over the parameters at about 5 GB/s."""
        before = {} if known is None else known.stamps
        prints, stamps = {}, {}
        for path, parameter in model.named_parameters():
            stamp = stamps[path] = TensorStamp.of(parameter)
            same = known is not None and before.get(path) == stamp
            prints[path] = known.parameters[path] if known is not None and same else _known_print(parameter, stamp)
        return cls(prints, stamps)

    def plain(self) -> dict[str, list[Any]]:
        """Return the fingerprint as plain values, for a file."""
        return {
            path: [list(entry.shape), entry.dtype, entry.checksum, entry.magnitude]
            for path, entry in self.parameters.items()
        }

    @classmethod
    def from_plain(cls, values: Mapping[str, Any] | None) -> Fingerprint | None:
        """Return the fingerprint from the values of ``plain()``; None for None."""
        if values is None:
            return None
        try:
            return cls({str(path): _read(*entry) for path, entry in values.items()})
        except (AttributeError, OverflowError, TypeError, ValueError) as error:
            raise QuantizerError(f"the fingerprint of the weights is damaged: {error!r}") from error


def refuse_other_shapes(before: Fingerprint, now: Fingerprint) -> None:
    """Raise if parameters have other shapes than in the calibrated model."""
    pairs = ((path, entry.shape, now.parameters.get(path)) for path, entry in before.parameters.items())
    changed = [(path, shape, other.shape) for path, shape, other in pairs if other is not None and other.shape != shape]
    if changed:
        path, was, is_now = changed[0]
        raise CalibrationError(
            f"the calibration belongs to another model: the shape of {path} was {list(was)} and is {list(is_now)} here "
            f"({len(changed)} parameters differ); calibrate this model with its own Quantizer"
        )


def changed_parameters(before: Fingerprint, now: Fingerprint) -> list[str]:
    """Return the paths of parameters with other values; a cast to another float type is not a change."""
    pairs = ((path, entry, now.parameters.get(path)) for path, entry in before.parameters.items())
    return [path for path, entry, other in pairs if other is not None and not _alike(entry, other)]


def changed_types(before: Fingerprint, now: Fingerprint) -> dict[torch.dtype, torch.dtype]:
    """Return the former float types of cast parameters, mapped to the current types."""
    current_types: dict[str, str] = {}
    first: dict[str, str] = {}
    for path, entry in before.parameters.items():
        other = now.parameters.get(path)
        if other is None:
            continue
        if current_types.setdefault(entry.dtype, other.dtype) != other.dtype:
            raise CalibrationError(
                f"parts of the model were cast since the calibration: {first[entry.dtype]} is "
                f"{current_types[entry.dtype]} and {path} is {other.dtype}, and both were {entry.dtype}; calibrate the "
                "model again"
            )
        first.setdefault(entry.dtype, path)
    kinds = ((getattr(torch, was), getattr(torch, now)) for was, now in current_types.items() if was != now)
    return {was: now for was, now in kinds if was.is_floating_point and now.is_floating_point}


def warn_of_other_weights(before: Fingerprint, now: Fingerprint, buffers: Sequence[str] = ()) -> None:
    """Warn if parameters of the same shape, or ``buffers`` that weights are computed from, have other values."""
    changed = changed_parameters(before, now)
    parts = [f"{len(changed)} of {len(before.parameters)} parameters"] if changed else []
    parts += [f"{len(buffers)} buffers that weights are computed from"] if buffers else []
    if parts:
        warnings.warn(
            f"{' and '.join(parts)} changed since the calibration, the first is {[*changed, *buffers][0]}: the scales "
            "of weights follow the current weights, but the ranges of activations belong to the former ones; "
            "calibrate again unless the change is small",
            stacklevel=5,
        )


def _alike(entry: _ParameterPrint, other: _ParameterPrint) -> bool:
    if entry.checksum is None or other.checksum is None or entry.shape != other.shape:
        return True
    if entry.dtype == other.dtype:
        return entry.checksum == other.checksum
    return abs(entry.magnitude - other.magnitude) <= _CAST * max(entry.magnitude, other.magnitude)


_PRINTS: MutableMapping[Tensor, tuple[TensorStamp, _ParameterPrint]] = WeakTensorKeyDictionary()
"""The last fingerprint of each parameter, with the stamp for which it holds, for as long as the parameter exists."""


def _known_print(parameter: Tensor, stamp: TensorStamp) -> _ParameterPrint:
    """Return the fingerprint of a parameter; if its stamp is the last one, without a copy of its values to the CPU."""
    last = _PRINTS.get(parameter)
    if last is None or last[0] != stamp:
        last = _PRINTS[parameter] = stamp, _print(parameter.detach())
    return last[1]


def _print(value: Tensor) -> _ParameterPrint:
    shape, dtype = tuple(value.shape), str(value.dtype).removeprefix("torch.")
    if value.is_meta or value.layout is not torch.strided:
        return _ParameterPrint(shape, dtype, None, 0.0)
    flat = value.cpu().contiguous().flatten()
    sample = flat[:: max(1, len(flat) // _SAMPLE)].abs().double()
    magnitude = float(sample.nan_to_num(0.0, 0.0, 0.0).mean()) if len(flat) else 0.0
    return _ParameterPrint(shape, dtype, zlib.crc32(flat.view(torch.uint8).numpy().data), magnitude)


def _read(shape: Any, dtype: Any, checksum: Any, magnitude: Any) -> _ParameterPrint:
    known = checksum is None or isinstance(checksum, int)
    sizes = isinstance(shape, list) and all(isinstance(size, int) for size in shape)
    if not (known and sizes and isinstance(dtype, str) and isinstance(magnitude, int | float)):
        raise TypeError(f"got {[shape, dtype, checksum, magnitude]!r}")
    return _ParameterPrint(tuple(shape), dtype, checksum, float(magnitude))


_P, _Q = 503, 509
"""P and Q: odd, so that flipping all signs changes the sums, and small enough that a part fits in the cache."""


def tensor_version(tensor: Tensor) -> int:
    """Return torch's count of in-place changes, which omits those through ``.data``; 0 for an inference tensor."""
    return 0 if tensor.is_inference() else tensor._version


@dataclass(frozen=True, slots=True)
class TensorStamp:
    """State of a tensor at one time; two stamps are equal if nothing modified the tensor in between.

    Attributes:
        version: torch's count of in-place changes.
        place: its memory: address, device, type, shape and strides.
        values: the checksum of its values; None on the meta device. An object that equals no other if the values cannot
            be read.
    """

    version: int
    place: tuple[Any, ...]
    values: object

    @classmethod
    def of(cls, tensor: Tensor) -> TensorStamp:
        """Return the current stamp of a tensor, in one pass over the values."""
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return cls(0, (), object())
        place = tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride()
        return cls(tensor_version(tensor), place, None if tensor.is_meta else _checksum(tensor.detach()))


def _checksum(tensor: Tensor) -> int:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    summed_bytes = len(flat) // (8 * _P * _Q) * (8 * _P * _Q)
    if not devices.is_apart(flat.device):
        checksum = zlib.crc32(flat[summed_bytes:].numpy().tobytes())
        # numpy adds along columns three times as fast as torch. The second sum reads the part from the cache.
        for part in flat[:summed_bytes].numpy().view(np.uint64).reshape(-1, _P * _Q):
            checksum = zlib.crc32(np.add.reduce(part.reshape(_P, _Q), axis=0), checksum)
            checksum = zlib.crc32(np.add.reduce(part.reshape(_Q, _P), axis=0), checksum)
        return checksum
    aligned = flat[:summed_bytes] if flat.storage_offset() % 8 == 0 else flat[:summed_bytes].clone()
    words = aligned.view(torch.int64)
    sums = [words.reshape(-1, rows, columns).sum(1).flatten() for rows, columns in ((_P, _Q), (_Q, _P))]
    # One copy, because each copy waits for the device.
    parts = [flat[summed_bytes:], *(each.view(torch.uint8) for each in sums)]
    return zlib.crc32(torch.cat(parts).cpu().numpy().tobytes())
