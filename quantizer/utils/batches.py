"""Batches of data and how they run through a model.

A batch is a mapping (keyword arguments), a tuple or list (positional arguments), or one tensor. Arrays become tensors,
and tensors are moved to the device of the model. A label after the inputs is dropped, as loaders for training yield
(inputs, label). The signature of ``forward`` and the shapes determine whether the last part is a label; if both
readings fit, an error explains how to write the batch.

The file also copies inputs, because a forward may write into them, reads batches from files of arrays (``.npz``,
``.safetensors``), and warns about suspicious calibration data. A warning needs certain evidence: the mode of the model,
few samples, pixels from 0 to 255, or uncorrelated neighbouring pixels.
"""

from __future__ import annotations

import copy
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from quantizer.errors import CalibrationError, CalibrationWarning, QuantizerError, is_out_of_memory
from quantizer.utils.fingerprint import tensor_version
from quantizer.utils.paths import regular_file
from quantizer.utils.progress import counted
from quantizer.utils.signatures import signature_of
from quantizer.utils.structure import flattened
from quantizer.utils.torch_modes import as_ordinary


def run_batches(
    proxy: nn.Module,
    data: Any,
    progress: bool | None = None,
    *,
    samples: int | None = None,
    doubt: bool = False,
    is_mine: Callable[[Any], bool] = lambda batch: True,
) -> int:
    """Run calibration data through a proxy without gradients, and return the number of batches."""
    count = 0
    batches, total = batches_of(proxy, data, samples), length_of(data, samples)
    with torch.no_grad(), counted(batches, "calibration", unit="batch", total=total, show=progress) as steps:
        for batch in steps:
            if is_mine(batch):
                with _naming_batch(proxy, batch, count):
                    args, keywords = arguments(as_ordinary(batch))
                    proxy(*args, **keywords)
            if doubt and count == 0:
                warn_user(doubts_of_batch(batch))
            count += 1
    return count


def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of a batch."""
    if hasattr(batch, "keys"):
        return (), {key: batch[key] for key in batch.keys()}  # noqa: SIM118 - duck-typed
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}


@contextmanager
def _naming_batch(proxy: nn.Module, batch: Any, number: int) -> Iterator[None]:
    """Add the number of the batch to errors of its forward pass."""
    try:
        yield
    except QuantizerError:
        raise
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise _batch_error(proxy, batch, number, error) from error
        raise CalibrationError(
            f"there is too little memory for batch {number} of the calibration data: use smaller batches or shorter "
            f"texts ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        ) from error
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise _batch_error(proxy, batch, number, error) from error


def _batch_error(proxy: nn.Module, batch: Any, number: int, error: Exception) -> CalibrationError:
    keys = f"inputs {sorted(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
    return CalibrationError(
        f"batch {number} of the calibration data ({keys}) does not run through {type(proxy).__name__}.forward: {error}"
    )


def own(value: Any) -> Any:
    """Return a structure with copies of its leaves, without gradients; a shared leaf stays shared."""
    leaf_values, rebuild = flattened(value)
    memo: dict[int, Any] = {}
    for leaf in leaf_values:
        if isinstance(leaf, Tensor) and id(leaf) not in memo:
            memo[id(leaf)] = leaf.detach().clone()
    return rebuild([copy.deepcopy(leaf, memo) for leaf in leaf_values])


def own_tensors(value: Any) -> Any:
    """Return a structure with copies of its tensors, through which gradients reach the originals.

    Other objects, such as caches that a model fills, are not copied.
    """
    leaf_values, rebuild = flattened(value)
    copies = {id(leaf): leaf.clone() for leaf in leaf_values if isinstance(leaf, Tensor)}
    return rebuild([copies.get(id(leaf), leaf) for leaf in leaf_values])


def on_own_tensors(run: partial[Any]) -> partial[Any]:
    """Return the module call ``run(module, *args, **keywords)`` with copies of its input tensors."""
    args, keywords = own_tensors((run.args[1:], run.keywords))
    return partial(run.func, run.args[0], *args, **keywords)


def written_by(run: partial[Any]) -> list[str]:
    """Return the names of the inputs that a call of ``on_own_tensors`` modified in place."""
    named = {**{f"argument {place}": value for place, value in enumerate(run.args[1:])}, **run.keywords}

    def is_written(leaf: Any) -> bool:
        # A fresh copy has version 0.
        return isinstance(leaf, Tensor) and tensor_version(leaf) > 0

    return [name for name, value in named.items() if any(map(is_written, flattened(value)[0]))]


@contextmanager
def given_copies(model: nn.Module) -> Iterator[None]:
    """Call a model with copies of its input tensors inside the block, because its forward may write into them."""
    handle = model.register_forward_pre_hook(_copy_inputs, prepend=True, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _copy_inputs(model: nn.Module, args: Any, keywords: Any) -> Any:
    return own_tensors((args, keywords))


def copied(args: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return a copy of the inputs: a loader may reuse the tensors, and a model may write into them."""
    copies: tuple[tuple[Any, ...], Mapping[str, Any]] = own((args, dict(keywords)))
    return copies


Row = TypeVar("Row")
Batch = TypeVar("Batch")

_SPLIT_COUNT = 4

WITHOUT_VALUES = "a tensor on the device meta, which has no values: pass a tensor on a real device, such as the CPU"
"""Description of a meta tensor in errors, with the fix."""

BATCH_ROWS = 32
"""Number of samples per batch of a tensor, an array or a ``Dataset``."""

MOST_ROWS = 4096
"""Number of samples that are read from data without a length, unless ``samples`` is given."""


def in_several(make: Callable[[Sequence[Row]], list[Batch]], samples: Sequence[Row]) -> list[Batch]:
    """Return the batches that ``make`` makes of samples to calibrate on, but four instead of a single one.

    Algorithms check a choice on other batches than those that it was made on, so they need several.
    """
    batches = make(samples)
    if len(batches) != 1:
        return batches
    size = math.ceil(len(samples) / _SPLIT_COUNT)
    return [batch for start in range(0, len(samples), size) for batch in make(samples[start : start + size])]


def batches_of(model: nn.Module, data: Any, samples: int | None = None) -> Iterator[Any]:
    """Yield batches without labels, with tensors instead of arrays, on the device of the model."""
    if samples is not None and samples < 1:
        raise CalibrationError(f"samples={samples}: expected the number of samples to read, 1 or more")
    return _read(Forward.of(model), _dtype(model), _device(model), _iterable(data, samples), samples)


def length_of(data: Any, samples: int | None = None) -> int | None:
    """Return the number of batches that ``batches_of`` yields; None if unknown in advance."""
    if samples is not None and not isinstance(data, Tensor | np.ndarray | Dataset):
        return None
    try:
        return len(_iterable(data, samples))  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def row_count(batch: Any) -> int:
    """Return the number of samples in a batch, which is axis 0 of its first tensor; 1 without a tensor."""
    values = batch.values() if hasattr(batch, "keys") else batch if isinstance(batch, tuple | list) else [batch]
    for value in values:
        if isinstance(value, Tensor):
            return value.shape[0] if value.dim() else 1
        if hasattr(value, "keys") or isinstance(value, tuple | list):
            return row_count(value)
    return 1


def _read(
    forward: Forward, dtype: torch.dtype, device: torch.device | None, data: Iterable[Any], most: int | None
) -> Iterator[Any]:
    limit = MOST_ROWS if most is None and length_of(data) is None else most
    number, read = 0, 0
    loader = iter(data)
    while most is None or read < most:
        try:
            item = next(loader)
        except StopIteration:
            return
        except QuantizerError:
            raise
        except Exception as error:
            raise CalibrationError(
                f"the calibration data failed after {number} {'batch' if number == 1 else 'batches'}, with "
                f"{type(error).__name__}: {error}"
            ) from error
        if limit is not None and read >= limit:
            message = f"the calibration data has no length; reading stopped after {read} samples"
            warn_user([f"{message}: pass samples=... to read more or fewer"])
            return
        batch = without_label(forward, _with_tensors(item, dtype, number), number)
        yield batch if device is None else beside(device, batch)
        number, read = number + 1, read + max(row_count(batch), 1)


def _iterable(data: Any, samples: int | None) -> Iterable[Any]:
    """Return an iterable of batches; tensors, arrays and map-style data sets yield only ``samples`` samples."""
    if isinstance(data, Tensor | np.ndarray):
        if data.ndim == 0:
            raise CalibrationError("the calibration data is a single number: pass an array or tensor of samples")
        places = _sample_indices(len(data), samples)
        return [data[chunk] for chunk in np.split(places, range(BATCH_ROWS, len(places), BATCH_ROWS)) if len(chunk)]
    if isinstance(data, Dataset):
        if not isinstance(data, IterableDataset):
            data = Subset(data, _sample_indices(len(data), samples).tolist())  # type: ignore[arg-type]
        # A loader draws a random number. Its own generator keeps the user's random numbers unchanged.
        return DataLoader(data, batch_size=BATCH_ROWS, generator=torch.Generator())
    if isinstance(data, str | bytes | Mapping) or not isinstance(data, Iterable):
        raise CalibrationError(
            f"the calibration data is a {type(data).__name__}; pass an iterable of batches, each a mapping, a tuple "
            "or list, or one tensor (a single batch is [batch]); or a DataLoader, a Dataset, a tensor or an array of "
            "samples"
        )
    return data


def _sample_indices(length: int, samples: int | None) -> npt.NDArray[np.int64]:
    """Return ``samples`` equally spaced indices; all indices if there are not more."""
    if samples is None or samples >= length:
        return np.arange(length)
    return np.arange(samples) * length // samples


def _dtype(model: nn.Module) -> torch.dtype:
    """Return the float type of the model's parameters, to which float arrays are cast, as NumPy makes doubles."""
    floats = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return next(floats, torch.float32)


def _device(model: nn.Module) -> torch.device | None:
    """Return the device of the model; None if it spans several devices or the meta device."""
    places = {tensor.device for tensor in chain(model.parameters(), model.buffers())}
    return next(iter(places)) if len(places) == 1 and torch.device("meta") not in places else None


def beside(place: nn.Module | torch.device, batch: Any) -> Any:
    """Return a batch with its tensors on a device, or on the device of a model.

    A batch with a tensor on that device stays as it is, and so does a batch for a model on several devices: its tensors
    are already placed.
    """
    device = place if isinstance(place, torch.device) else _device(place)
    devices = {tensor.device for tensor in _tensors(batch)}
    meta = torch.device("meta")
    if device not in (None, meta) and meta in devices:
        raise CalibrationError(f"a batch contains {WITHOUT_VALUES}")
    return batch if device is None or device in devices or not devices else _moved(batch, device)


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif hasattr(batch, "keys") or isinstance(batch, tuple | list):
        for value in (batch[key] for key in batch.keys()) if hasattr(batch, "keys") else batch:  # noqa: SIM118
            yield from _tensors(value)


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if hasattr(batch, "keys"):
        return {key: _moved(batch[key], device) for key in batch.keys()}  # noqa: SIM118 - duck-typed
    if isinstance(batch, tuple) and hasattr(batch, "to"):
        return batch.to(device)  # a PackedSequence, whose sizes stay on the CPU
    if isinstance(batch, tuple | list):
        parts = [_moved(value, device) for value in batch]
        named = isinstance(batch, tuple) and hasattr(batch, "_fields")
        return type(batch)(*parts) if named else type(batch)(parts)
    return batch


def _with_tensors(batch: Any, dtype: torch.dtype, number: int) -> Any:
    """Return a batch with tensors in place of arrays; a batch without arrays is not copied."""
    if isinstance(batch, np.ndarray):
        return _tensor(batch, dtype, number)
    if hasattr(batch, "keys"):
        if not any(isinstance(value, np.ndarray) for value in batch.values()):
            return batch
        return {key: _with_tensors(batch[key], dtype, number) for key in batch.keys()}  # noqa: SIM118 - duck-typed
    if isinstance(batch, tuple | list) and any(
        isinstance(value, np.ndarray) or hasattr(value, "keys") for value in batch
    ):
        return [_with_tensors(value, dtype, number) for value in batch]
    return batch


def _tensor(array: npt.NDArray[Any], dtype: torch.dtype, number: int) -> Tensor:
    try:
        tensor = torch.tensor(array)
    except TypeError as error:
        raise CalibrationError(
            f"batch {number} of the calibration data has an array of {array.dtype}, which torch cannot convert: {error}"
        ) from error
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


FEWEST_SAMPLES = 32
"""With fewer samples, ranges depend on the choice of samples."""

_PASSED = ("quantizer", "tqdm")
"""Packages whose frames lie between a user's line and a warning."""

_IMAGE = 4  # axes of a batch of images: [B, C, H, W]
_BYTE = 255
_BRIGHT = 128
"""Photographs have pixels of at least this value in any batch; counts and flags rarely do."""
_FEWEST_PAIRS = 4096
_NOISE_CORRELATION = 0.05
"""Least correlation of neighbouring pixels: 99.9% of noise with 4,096 pairs has less, photographs have 0.8 or more."""


def doubts_of_calibration(model: nn.Module, samples: int) -> Iterator[str]:
    """Yield warnings about a calibration: the model is in train mode, or there are few samples."""
    changing = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)
    if any(module.training and isinstance(module, changing) for module in model.modules()):
        yield (
            f"the {type(model).__name__} is in train mode, but calibration and engines compute in eval mode, so its "
            "current outputs differ from theirs; call model.eval()"
        )
    if samples < FEWEST_SAMPLES:
        yield (
            f"calibrated on {samples} {'sample' if samples == 1 else 'samples'}: ranges of fewer than "
            f"{FEWEST_SAMPLES} samples depend on "
            "their choice; use 128 or more that resemble the inputs of the model in use"
        )


def doubts_of_batch(batch: Any) -> Iterator[str]:
    """Yield warnings about float images [B, C, H, W] in a batch that contain bytes or noise."""
    values = batch.values() if hasattr(batch, "keys") else batch if isinstance(batch, tuple | list) else [batch]
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == _IMAGE and value.numel():
            yield from _doubts_of_images(value.detach().float())


def _doubts_of_images(images: Tensor) -> Iterator[str]:
    low, high = images.aminmax()
    if low >= 0 and _BRIGHT <= high <= _BYTE and torch.equal(images, images.round()):
        yield (
            f"images of the calibration data are whole numbers from {low:.0f} to {high:.0f}, like pixels before "
            "normalization: if the model is used on normalized images, calibrate it on normalized images"
        )
    first_pixels, second_pixels = images[..., :-1].flatten(), images[..., 1:].flatten()
    if first_pixels.numel() < _FEWEST_PAIRS or low == high:
        return
    correlation = float(torch.corrcoef(torch.stack([first_pixels, second_pixels]))[0, 1])
    if abs(correlation) < _NOISE_CORRELATION:
        yield (
            f"images of the calibration data look like noise (correlation of neighbouring pixels {correlation:.2f}): "
            "calibrate on real images, because ranges and scores of synthetic ones do not apply to them"
        )


def warn_user(doubts: Iterable[str]) -> None:
    """Warn of each doubt at the user's line that called this package."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).split(".")[0] in _PASSED:
        level, frame = level + 1, frame.f_back
    for doubt in doubts:
        warnings.warn(doubt, CalibrationWarning, stacklevel=level)


ARRAY_FILES = (".npz", ".safetensors")


def array_batches(path: Path, batch_rows: int, samples: int | None = None) -> list[dict[str, Tensor]]:
    """Return the batches of a file or of a folder of files: tensors by name, with samples along axis 0.

    Args:
        path: a file, whose arrays are cut into batches; or a folder, in which each file is one batch, so that shapes
            may differ between batches.
        batch_rows: the number of samples per batch of a file.
        samples: the largest number of samples to read; None: all. A folder yields the batches that begin before it.

    Raises:
        CalibrationError: there are no such files, a file is damaged, or its arrays differ in length.
    """
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in ARRAY_FILES)
        if not files:
            raise CalibrationError(f"the folder {path} contains no {' or '.join(ARRAY_FILES)} files")
        batches, read = [], 0
        for file in files:
            if samples is None or read < samples:
                batches.append(_arrays(file))
                read += len(next(iter(batches[-1].values())))
        return batches
    arrays = _arrays(path)
    count = len(next(iter(arrays.values())))
    count = count if samples is None else min(samples, count)
    return [
        {name: tensor[start : min(start + batch_rows, count)] for name, tensor in arrays.items()}
        for start in range(0, count, batch_rows)
    ]


def _arrays(path: Path) -> dict[str, Tensor]:
    if path.suffix.lower() not in ARRAY_FILES or not path.is_file():
        raise CalibrationError(
            f"{path} is not an existing {' or '.join(ARRAY_FILES)} file; expected one with an array for each input of "
            "the model, by name"
        )
    arrays = _of_numpy(path) if path.suffix.lower() == ".npz" else _of_safetensors(path)
    lengths = {name: len(tensor) if tensor.dim() else 0 for name, tensor in arrays.items()}
    if not lengths or 0 in lengths.values() or len(set(lengths.values())) > 1:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in arrays.items()) or "none"
        raise CalibrationError(
            f"{path}: the arrays differ in the number of samples (axis 0), or have none: {shapes}; give each input "
            f"the same number of samples, 1 or more"
        )
    return arrays


def _of_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        regular_file(path)
    except OSError as error:
        raise CalibrationError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CalibrationError(f"{path} is damaged or not a .safetensors file: {error}") from error


def _of_numpy(path: Path) -> dict[str, Tensor]:
    try:
        # Objects in such a file are pickled, and are not read.
        with np.load(path, allow_pickle=False) as arrays:
            if not isinstance(arrays, Mapping):
                raise CalibrationError(f"{path} contains one array without a name; save it with np.savez and its name")
            return {name: torch.from_numpy(arrays[name]) for name in arrays}
    except (OSError, ValueError, EOFError, TypeError, KeyError) as error:
        raise CalibrationError(f"{path} is damaged or contains an array without numbers: {error}") from error


_LABELS = frozenset({"label", "labels", "target", "targets", "y"})
"""Names of arguments that take a label."""


@dataclass(frozen=True, kw_only=True)
class Forward:
    """The arguments of a model's ``forward``.

    Attributes:
        owner: the name of the model's class.
        names: the positional arguments.
        required: the number of positional arguments without a default.
        most: the largest number of positional arguments; infinite with ``*args``.
        keywords: the keyword arguments; None: any.
    """

    owner: str
    names: tuple[str, ...]
    required: int
    most: float
    keywords: frozenset[str] | None

    @classmethod
    def of(cls, model: nn.Module) -> Forward:
        """Return the arguments of a model's ``forward``; without a signature, any arguments."""
        owner = type(model).__name__
        try:
            parameters = signature_of(model.forward).parameters.values()
        except (TypeError, ValueError):
            # A scripted module has none.
            return cls(owner=owner, names=(), required=0, most=math.inf, keywords=None)
        kinds = {parameter.kind for parameter in parameters}
        placed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        named = frozenset(p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))
        return cls(
            owner=owner,
            names=tuple(parameter.name for parameter in placed),
            required=sum(parameter.default is parameter.empty for parameter in placed),
            most=math.inf if inspect.Parameter.VAR_POSITIONAL in kinds else len(placed),
            keywords=None if inspect.Parameter.VAR_KEYWORD in kinds else named,
        )

    def takes(self, keys: Sequence[str]) -> bool:
        """Return whether the model has arguments with all of these names."""
        return set(keys) <= {*self.names, *(self.keywords or ())}


def without_label(forward: Forward, batch: Any, number: int) -> Any:
    """Return a batch without its label, if any."""
    if hasattr(batch, "keys"):
        return _mapping_without_label(forward, batch)
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        return batch
    *inputs, last = batch
    if len(inputs) == 1 and hasattr(inputs[0], "keys") and forward.takes(list(inputs[0])):
        return _mapping_without_label(forward, inputs[0])
    surplus = len(batch) - forward.most
    if surplus == 1 and isinstance(last, int | float | str):
        raise CalibrationError(
            f"batch {number} of the calibration data is {_described(batch)}, which is one sample, not a batch: pass "
            f"torch.utils.data.DataLoader(data, batch_size=32), or tensors with samples along axis 0"
        )
    if surplus == 1 and (len(inputs) == 1 or _is_per_sample(last, inputs[0])) and not _is_per_sample(inputs[0], last):
        return tuple(inputs)
    if surplus > 0:
        raise CalibrationError(
            f"batch {number} of the calibration data is {_described(batch)}, and {forward.owner}.forward takes "
            f"{_count(forward)}: it is unclear which parts are inputs. {_how_to_write(forward, len(batch))}"
        )
    name = forward.names[len(inputs)] if len(inputs) < len(forward.names) else None
    if len(batch) > forward.required and name not in _LABELS and _is_per_sample(last, inputs[0]):
        place = "one more input" if name is None else f"the input {name!r}"
        raise CalibrationError(
            f"batch {number} of the calibration data is {_described(batch)}: it is unclear whether the last part is a "
            f"label or {place} of {forward.owner}.forward. {_how_to_write(forward, len(batch))}"
        )
    return batch


def _mapping_without_label(forward: Forward, batch: Any) -> Any:
    if forward.keywords is None:
        return batch
    inputs = {key: batch[key] for key in batch if key in forward.keywords or key not in ("label", "labels")}
    return inputs if inputs and len(inputs) < len(batch) else batch


def _is_per_sample(value: Any, inputs: Any) -> bool:
    """Return whether a tensor has one number per sample, while the inputs have several."""
    if not isinstance(value, Tensor) or not isinstance(inputs, Tensor) or not value.dim() or not inputs.dim():
        return False
    return value.numel() == value.shape[0] == inputs.shape[0] and inputs.dim() > value.dim()


def _described(batch: Sequence[Any]) -> str:
    return f"({', '.join(map(_part, batch))})"


def _part(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"{type(value).__name__} {value!r}" if isinstance(value, int | float) else type(value).__name__


def _count(forward: Forward) -> str:
    most = int(forward.most)
    return f"{'one input' if most == 1 else f'{most} inputs'} ({', '.join(forward.names)})"


def _how_to_write(forward: Forward, parts: int) -> str:
    """Return how to write batches without a label, and with all parts as inputs."""
    input_count = max(1, min(forward.required, parts - 1))
    names = [(*forward.names, *"abcdefgh")[place] for place in range(input_count)]
    ignored = ["_"] if parts - input_count == 1 else ["*_"]
    inputs = names[0] if input_count == 1 else f"({', '.join(names)})"
    without = f"Without the label:  [{inputs} for {', '.join([*names, *ignored])} in loader]"
    if parts > len(forward.names):
        return without
    all_names = forward.names[:parts]
    named = ", ".join(f'"{name}": {name}' for name in all_names)
    return f"{without}  With all of them as inputs:  [{{{named}}} for {', '.join(all_names)} in loader]"
