"""Labels of batches: loaders for training give (inputs, label), and a model takes the inputs alone.

Whether the last part of a batch is a label is told by the signature of ``forward`` and by shapes: what ``forward`` has
no place for is none of its inputs, and one number for each row is a label more often than an input. Where both may be,
an error says how to write what is meant: a label that enters as a mask would spoil every range without a word.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from quantizer.errors import CalibrationError

_LABELS = frozenset({"label", "labels", "target", "targets", "y"})
"""Names of arguments that take a label."""


@dataclass(frozen=True, kw_only=True)
class Forward:
    """The arguments of a model's ``forward``.

    Attributes:
        owner: the name of the model's class.
        names: those that can be given by position.
        required: how many of these have no default.
        most: how many can be given by position; infinite with ``*args``.
        keywords: the names that can be given by keyword; None: any.
    """

    owner: str
    names: tuple[str, ...]
    required: int
    most: float
    keywords: frozenset[str] | None

    @classmethod
    def of(cls, model: nn.Module) -> Forward:
        """Return the arguments of a model's ``forward``; any, where it does not tell them."""
        owner = type(model).__name__
        try:
            parameters = inspect.signature(model.forward).parameters.values()
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
        """Return whether the model names all of these arguments."""
        return set(keys) <= {*self.names, *(self.keywords or ())}


def without_label(forward: Forward, batch: Any, number: int) -> Any:
    """Return a batch without its label; one that has none as it is."""
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
            f"batch {number} of the calibration data is {_described(batch)}, which is one row and not a batch: give "
            f"torch.utils.data.DataLoader(data, batch_size=32), or tensors whose first axis are rows"
        )
    if surplus == 1 and (len(inputs) == 1 or _one_a_row(last, inputs[0])) and not _one_a_row(inputs[0], last):
        return tuple(inputs)
    if surplus > 0:
        raise CalibrationError(
            f"batch {number} of the calibration data is {_described(batch)}, and {forward.owner}.forward takes "
            f"{_count(forward)}: which of them are its inputs cannot be told. {_cure(forward, len(batch))}"
        )
    name = forward.names[len(inputs)] if len(inputs) < len(forward.names) else None
    if len(batch) > forward.required and name not in _LABELS and _one_a_row(last, inputs[0]):
        place = "one more input" if name is None else f"the input {name!r}"
        raise CalibrationError(
            f"batch {number} of the calibration data is {_described(batch)}: whether the last is a label or {place} of "
            f"{forward.owner}.forward cannot be told. {_cure(forward, len(batch))}"
        )
    return batch


def _mapping_without_label(forward: Forward, batch: Any) -> Any:
    if forward.keywords is None:
        return batch
    inputs = {key: batch[key] for key in batch if key in forward.keywords or key not in ("label", "labels")}
    return inputs if inputs and len(inputs) < len(batch) else batch


def _one_a_row(value: Any, inputs: Any) -> bool:
    """Return whether a value has one number for each row, and the inputs have more."""
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


def _cure(forward: Forward, parts: int) -> str:
    """Return how to write batches without a label, and with all parts as inputs."""
    kept = max(1, min(forward.required, parts - 1))
    names = [(*forward.names, *"abcdefgh")[place] for place in range(kept)]
    rest = ["_"] if parts - kept == 1 else ["*_"]
    inputs = names[0] if kept == 1 else f"({', '.join(names)})"
    without = f"Without the label:  [{inputs} for {', '.join([*names, *rest])} in loader]"
    if parts > len(forward.names):
        return without
    every = forward.names[:parts]
    named = ", ".join(f'"{name}": {name}' for name in every)
    return f"{without}  With all of them as inputs:  [{{{named}}} for {', '.join(every)} in loader]"
