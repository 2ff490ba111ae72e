"""Batches of data, in any of the usual forms, and how they run through a model.

Copies of what a model is given: a forward may write into its inputs, and the data is the user's.

A batch is what ``call`` runs: a mapping (keyword arguments), a tuple or list (positional), or one tensor. Arrays in it
become tensors, a label behind the inputs is dropped, and tensors are moved to the device of the model.

Doubts about calibration data and about the model's mode: possible, and more often a mistake. Each is a warning.

A doubt is raised on what can be told for certain: the mode of the model, the number of rows, whole numbers from 0 to
255 in an image, and neighbouring pixels that have nothing to do with each other.
"""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from quantizer.errors import CalibrationError, CalibrationWarning, QuantizerError
from quantizer.utils.fingerprint import tensor_version
from quantizer.utils.labels import Forward, without_label
from quantizer.utils.out_of_memory import is_out_of_memory
from quantizer.utils.progress import counted
from quantizer.utils.structure import flattened
from quantizer.utils.torch_modes import as_ordinary


def run_batches(
    proxy: nn.Module,
    data: Any,
    progress: bool | None = None,
    *,
    rows: int | None = None,
    doubt: bool = False,
    is_mine: Callable[[Any], bool] = lambda batch: True,
) -> int:
    """Run calibration data through a proxy, without gradients, and return the number of batches that there are."""
    count = 0
    batches, total = batches_of(proxy, data, rows), length_of(data, rows)
    with torch.no_grad(), counted(batches, "calibration", unit="batch", total=total, show=progress) as steps:
        for batch in steps:
            if is_mine(batch):
                with _errors_of(proxy, batch, count):
                    args, keywords = arguments(as_ordinary(batch))
                    proxy(*args, **keywords)
            if doubt and count == 0:
                warn_user(doubts_of_batch(batch))
            count += 1
    return count


def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with a batch: a mapping of keywords, a tuple or list, or one tensor."""
    if hasattr(batch, "keys"):
        return (), {key: batch[key] for key in batch.keys()}  # noqa: SIM118 - duck-typed
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}


@contextmanager
def _errors_of(proxy: nn.Module, batch: Any, number: int) -> Iterator[None]:
    """Name the batch in errors of its pass."""
    try:
        yield
    except QuantizerError:
        raise
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise _refused(proxy, batch, number, error) from error
        raise CalibrationError(
            f"there is too little memory for batch {number} of the calibration data: give smaller batches, or shorter "
            f"texts ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        ) from error
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise _refused(proxy, batch, number, error) from error


def _refused(proxy: nn.Module, batch: Any, number: int, error: Exception) -> CalibrationError:
    keys = f"inputs {sorted(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
    return CalibrationError(
        f"batch {number} of the calibration data ({keys}) does not run through {type(proxy).__name__}.forward: {error}"
    )


def own(value: Any) -> Any:
    """Return a structure with copies of its leaves, without their gradients; one leaf in two places stays one."""
    found, rebuilt = flattened(value)
    memo: dict[int, Any] = {}
    for leaf in found:
        if isinstance(leaf, Tensor) and id(leaf) not in memo:
            memo[id(leaf)] = leaf.detach().clone()
    return rebuilt([copy.deepcopy(leaf, memo) for leaf in found])


def own_tensors(value: Any) -> Any:
    """Return a structure with copies of its tensors, of which gradients reach the originals.

    Objects that a model is given to be filled, such as caches, are the same ones.
    """
    found, rebuilt = flattened(value)
    copies = {id(leaf): leaf.clone() for leaf in found if isinstance(leaf, Tensor)}
    return rebuilt([copies.get(id(leaf), leaf) for leaf in found])


def on_own_tensors(run: partial[Any]) -> partial[Any]:
    """Return the call of a module, ``run(module, *args, **keywords)``, with copies of the tensors among its inputs."""
    args, keywords = own_tensors((run.args[1:], run.keywords))
    return partial(run.func, run.args[0], *args, **keywords)


def written_by(run: partial[Any]) -> list[str]:
    """Return the names of the inputs that a call which ``on_own_tensors`` returned has written into."""
    named = {**{f"argument {place}": value for place, value in enumerate(run.args[1:])}, **run.keywords}

    def is_written(leaf: Any) -> bool:
        # A copy is of version 0.
        return isinstance(leaf, Tensor) and tensor_version(leaf) > 0

    return [name for name, value in named.items() if any(map(is_written, flattened(value)[0]))]


@contextmanager
def given_copies(model: nn.Module) -> Iterator[None]:
    """Give a model copies of the tensors that it is called with in the block: its forward may write into them."""
    handle = model.register_forward_pre_hook(_copy_inputs, prepend=True, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _copy_inputs(model: nn.Module, args: Any, keywords: Any) -> Any:
    return own_tensors((args, keywords))


def copied(args: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return a copy of the inputs: a loader may reuse the tensors, and a model may write into them."""
    made: tuple[tuple[Any, ...], Mapping[str, Any]] = own((args, dict(keywords)))
    return made


Row = TypeVar("Row")
Batch = TypeVar("Batch")

_SEVERAL = 4

WITHOUT_VALUES = "a tensor on the device meta, which has no values: give one with values, as on the CPU"
"""What is wrong with such a tensor, and what to do."""

BATCH_ROWS = 32
"""How many rows of a tensor, an array or a ``Dataset`` are one batch."""

MOST_ROWS = 4096
"""How many rows are read of data that states no length, and may have no end, unless ``rows`` says how many."""


def in_several(make: Callable[[Sequence[Row]], list[Batch]], rows: Sequence[Row]) -> list[Batch]:
    """Return the batches that ``make`` gives for rows to calibrate on, and four in place of a single one.

    Of one batch nothing is chosen: what is chosen on some batches is checked on others.
    """
    batches = make(rows)
    if len(batches) != 1:
        return batches
    size = math.ceil(len(rows) / _SEVERAL)
    return [batch for start in range(0, len(rows), size) for batch in make(rows[start : start + size])]


def batches_of(model: nn.Module, data: Any, rows: int | None = None) -> Iterator[Any]:
    """Yield batches without their labels, with tensors in the place of arrays, and where the model is."""
    if rows is not None and rows < 1:
        raise CalibrationError(f"rows: got {rows}; expected the number of rows to read, from 1")
    return _read(Forward.of(model), _dtype(model), _device(model), _iterable(data, rows), rows)


def length_of(data: Any, rows: int | None = None) -> int | None:
    """Return how many batches ``batches_of`` yields, if that is known before; None: it is not."""
    if rows is not None and not isinstance(data, Tensor | np.ndarray | Dataset):
        return None
    try:
        return len(_iterable(data, rows))  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def row_count(batch: Any) -> int:
    """Return how many rows a batch has: the first size of its first tensor; 1 if it has none."""
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
            given = next(loader)
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
            told = f"the calibration data states no length and goes on after {read} rows, where it was stopped"
            warn_user([f"{told}: rows=... says how many to take, more or fewer"])
            return
        batch = without_label(forward, _with_tensors(given, dtype, number), number)
        yield batch if device is None else beside(device, batch)
        number, read = number + 1, read + max(row_count(batch), 1)


def _iterable(data: Any, rows: int | None) -> Iterable[Any]:
    """Return an iterable of batches; of a tensor, an array or a map-style data set only the rows that are asked for."""
    if isinstance(data, Tensor | np.ndarray):
        if data.ndim == 0:
            raise CalibrationError("the calibration data is a single number: give an array or tensor of rows")
        places = _places(len(data), rows)
        return [data[chunk] for chunk in np.split(places, range(BATCH_ROWS, len(places), BATCH_ROWS)) if len(chunk)]
    if isinstance(data, Dataset):
        if not isinstance(data, IterableDataset):
            data = Subset(data, _places(len(data), rows).tolist())  # type: ignore[arg-type]
        # A loader draws a number; drawn from a generator of its own, the user's random numbers stay the same.
        return DataLoader(data, batch_size=BATCH_ROWS, generator=torch.Generator())
    if isinstance(data, str | bytes | Mapping) or not isinstance(data, Iterable):
        raise CalibrationError(
            f"the calibration data is a {type(data).__name__}; give an iterable of batches, each a mapping, a tuple "
            "or list, or one tensor: a list of one is [batch]; or a DataLoader, a Dataset, a tensor or an array of rows"
        )
    return data


def _places(length: int, rows: int | None) -> npt.NDArray[np.int64]:
    """Return the places of ``rows`` rows at equal distances; of all if there are no more."""
    if rows is None or rows >= length:
        return np.arange(length)
    return np.arange(rows) * length // rows


def _dtype(model: nn.Module) -> torch.dtype:
    """Return the type of the model's parameters, which the floats of arrays get: NumPy makes doubles unasked."""
    floats = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return next(floats, torch.float32)


def _device(model: nn.Module) -> torch.device | None:
    """Return where the model is; None if its parts are in several places, or without values."""
    places = {tensor.device for tensor in chain(model.parameters(), model.buffers())}
    return next(iter(places)) if len(places) == 1 and torch.device("meta") not in places else None


def beside(place: nn.Module | torch.device, batch: Any) -> Any:
    """Return a batch with its tensors on a device, or where a model is, as a loader makes them on the CPU.

    One that has a tensor there stays as it is, and so does one for a model that is in several places: somebody has put
    its parts where they belong.
    """
    device = place if isinstance(place, torch.device) else _device(place)
    found = {tensor.device for tensor in _tensors(batch)}
    nowhere = torch.device("meta")
    if device not in (None, nowhere) and nowhere in found:
        raise CalibrationError(f"a batch holds {WITHOUT_VALUES}")
    return batch if device is None or device in found or not found else _moved(batch, device)


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
    """Return a batch with tensors in the place of arrays; one without arrays as it is."""
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
            f"batch {number} of the calibration data holds an array of {array.dtype}, which is no tensor: {error}"
        ) from error
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


FEWEST_ROWS = 32
"""With fewer rows than that ranges depend on which rows they are."""

_PASSED = ("quantizer", "tqdm")
"""Packages whose frames lie between a user's line and a warning."""

_IMAGE = 4  # axes of a batch of images: [B, C, H, W]
_BYTE = 255
_BRIGHT = 128
"""Pixels of photographs reach this value in any batch; counts and flags of another kind of input rarely do."""
_FEWEST_PAIRS = 4096
_RELATED = 0.05
"""Correlation of neighbouring pixels: noise of 4,096 pairs has less in 99.9% of cases; photographs have 0.8 or more."""


def doubts_of_calibration(model: nn.Module, rows: int) -> Iterator[str]:
    """Yield the doubts about a calibration: the model computes otherwise in the mode that it is in, or rows are few."""
    changing = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)
    if any(module.training and isinstance(module, changing) for module in model.modules()):
        yield (
            f"the {type(model).__name__} is in train mode: calibration, and every engine, computes in eval mode, so "
            "what it returns now is no measure for them; call model.eval()"
        )
    if rows < FEWEST_ROWS:
        yield (
            f"calibrated on {rows} {'row' if rows == 1 else 'rows'}: ranges of fewer than {FEWEST_ROWS} depend on "
            "which rows they are; give 128 or more, like those that the model will see"
        )


def doubts_of_batch(batch: Any) -> Iterator[str]:
    """Yield the doubts about images [B, C, H, W] of floats in a batch: bytes, or noise."""
    values = batch.values() if hasattr(batch, "keys") else batch if isinstance(batch, tuple | list) else [batch]
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == _IMAGE and value.numel():
            yield from _doubts_of_images(value.detach().float())


def _doubts_of_images(images: Tensor) -> Iterator[str]:
    low, high = images.aminmax()
    if low >= 0 and _BRIGHT <= high <= _BYTE and torch.equal(images, images.round()):
        yield (
            f"images of the calibration data are whole numbers from {low:.0f} to {high:.0f}, as pixels are before they "
            "are normalized: if the model is used on normalized images, calibrate it on such"
        )
    left, right = images[..., :-1].flatten(), images[..., 1:].flatten()
    if left.numel() < _FEWEST_PAIRS or low == high:
        return
    related = float(torch.corrcoef(torch.stack([left, right]))[0, 1])
    if abs(related) < _RELATED:
        yield (
            f"images of the calibration data look like noise (neighbouring pixels correlate by {related:.2f}): ranges "
            "and scores of made-up images say nothing of real ones"
        )


def warn_user(doubts: Iterable[str]) -> None:
    """Warn of each doubt, at the line outside of this package that led to it."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).split(".")[0] in _PASSED:
        level, frame = level + 1, frame.f_back
    for doubt in doubts:
        warnings.warn(doubt, CalibrationWarning, stacklevel=level)
