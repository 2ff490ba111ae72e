"""Optional arguments of a module, such as masks: tensors that stand for calls without them.

An engine has an input for each argument of its calibration batches. A call without such an argument passes a constant
tensor with which the model computes the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.errors import CalibrationError
from quantizer.proxy.restored_state import untouched
from quantizer.tasks import Batch, rows_at
from quantizer.utils.signatures import signature_of
from quantizer.utils.sizes import BATCH, DataSizes
from quantizer.utils.structure import flattened

_FILLS = (0, 1)
"""Values that leave an argument without effect: masks of padding and additive masks are 0, masks of tokens 1."""
_TOLERANCE = 1e-4
"""The norm of the difference between both outputs, relative to the norm of the output."""


@dataclass(frozen=True)
class Omitted:
    """A constant tensor in place of an argument that a call omits.

    Attributes:
        fill: the value of each element.
        dtype: the name of its torch type.
        shape: the size of each axis: a number, or the input and axis that have the same size.
    """

    fill: int
    dtype: str
    shape: tuple[int | tuple[str, int], ...]

    def __post_init__(self) -> None:
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"{self.dtype!r} is not a torch type")

    def tensor(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the tensor for a batch of the other inputs."""
        sizes = [size if isinstance(size, int) else batch[size[0]].shape[size[1]] for size in self.shape]
        return torch.full(sizes, self.fill, dtype=getattr(torch, self.dtype))


def omitted_arguments(model: nn.Module, batches: Sequence[Batch]) -> dict[str, Omitted]:
    """Return the optional arguments of batches that a constant tensor can replace, with this tensor."""
    parameters = signature_of(model.forward).parameters
    optional = [name for name, value in parameters.items() if value.default is not inspect.Parameter.empty]
    having = {name: [batch for batch in batches if name in batch] for name in optional}
    fills = {name: _fill(model, name, some[0]) for name, some in having.items() if some}
    fills = {name: fill for name, fill in fills.items() if fill is not None}
    omitted = {}
    for name, fill in fills.items():
        shape = _shape(name, batches, set(fills))
        if fill is not None and shape is not None:
            dtype = str(having[name][0][name].dtype).removeprefix("torch.")
            tensor = Omitted(fill, dtype, shape)
            without = next((batch for batch in batches if name not in batch), None)
            if without is None or _is_equal(
                _outputs(model, without | {name: tensor.tensor(without)}), _outputs(model, without) or []
            ):
                omitted[name] = tensor
    return omitted


def completed_batches(model: nn.Module, batches: Sequence[Batch], omitted: Mapping[str, Omitted]) -> list[Batch]:
    """Return batches with equal arguments, in the order of the signature.

    Raises:
        CalibrationError: a batch omits an argument that another one has, and no constant tensor replaces it.
    """
    passed = {name: number for number, batch in reversed(list(enumerate(batches))) for name in batch}
    if all(batch.keys() == passed.keys() for batch in batches):
        return list(batches)
    order = [name for name in signature_of(model.forward).parameters if name in passed]
    order += [name for name in passed if name not in order]
    result = []
    for number, batch in enumerate(batches):
        missing = [name for name in order if name not in batch and name not in omitted]
        if missing:
            raise CalibrationError(
                f"batch {number} omits {missing[0]!r}, which batch {passed[missing[0]]} passes, and no tensor of zeros "
                f"or ones in its place gives the same output of {type(model).__name__}: pass it in every batch, or in "
                "none"
            )
        full = batch | {name: omitted[name].tensor(batch) for name in order if name not in batch}
        result.append({name: full[name] for name in order})
    return result


def _fill(model: nn.Module, name: str, batch: Batch) -> int | None:
    """Return the value with which an argument gives the output of a batch without it; None without one.

    Two samples show it, unless the model mixes samples.
    """
    two = rows_at(batch, range(min(2, len(next(iter(batch.values()))))))
    found = _fill_of(model, name, two)
    return _fill_of(model, name, batch) if found is None else found


def _fill_of(model: nn.Module, name: str, batch: Batch) -> int | None:
    expected = _outputs(model, {key: value for key, value in batch.items() if key != name})
    filled = ((fill, {**batch, name: torch.full_like(batch[name], fill)}) for fill in _FILLS)
    return next((fill for fill, other in filled if expected and _is_equal(_outputs(model, other), expected)), None)


def _shape(name: str, batches: Sequence[Batch], omissible: Collection[str]) -> tuple[int | tuple[str, int], ...] | None:
    """Return the shape of an argument as ``Omitted`` has it; None if it is unknown.

    An axis follows an axis of another input that varies in all batches, and has its size in those with the argument.
    """
    sources = DataSizes.of([{key: value for key, value in one.items() if key not in omissible} for one in batches]).axes
    having = [batch for batch in batches if name in batch]
    shape: list[int | tuple[str, int]] = []
    for axis, size in enumerate(having[0][name].shape):
        sizes = [batch[name].shape[axis] for batch in having]
        alike = {
            dimension: (key, place)
            for key, opened in sources.items()
            for place, dimension in opened.items()
            if [batch[key].shape[place] for batch in having] == sizes
        }
        if axis == 0 and BATCH in alike:
            shape.append(alike[BATCH])
            continue
        alike.pop(BATCH, None)
        if len(alike) > 1 or (not alike and len(set(sizes)) > 1):
            return None
        shape.append(next(iter(alike.values()), int(size)))
    return tuple(shape)


def _outputs(model: nn.Module, batch: Batch) -> list[Any] | None:
    """Return the leaves of the output of a model; None if it does not accept the batch."""
    try:
        with torch.no_grad(), untouched(model):
            return flattened(model(**batch))[0]
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError):
        # The model needs the argument after all, or does not accept this value.
        return None


def _is_equal(found: list[Any] | None, expected: list[Any]) -> bool:
    """Return whether the tensors of two outputs are equal up to the rounding of sums."""
    if found is None or len(found) != len(expected):
        return False
    return all(
        one.shape == other.shape and bool((one - other).norm() <= _TOLERANCE * other.norm())
        for one, other in zip(_doubles(found), _doubles(expected), strict=True)
    )


def _doubles(values: list[Any]) -> list[Tensor]:
    return [value.double() for value in values if isinstance(value, Tensor)]
