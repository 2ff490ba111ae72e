"""Autocast and inference mode of torch: stored to repeat a call, or left so that autograd accepts the tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from quantizer.utils.structure import leaves, mapped


@dataclass(frozen=True, slots=True)
class Autocast:
    """The state of ``torch.autocast`` at one time.

    Attributes:
        devices: each device type with its autocast type; None: autocast is off there.
    """

    devices: tuple[tuple[str, torch.dtype | None], ...]

    @classmethod
    def now(cls) -> Self:
        """Return the current state."""
        accelerator = torch.accelerator.current_accelerator()
        kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
        return cls(
            tuple((kind, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None) for kind in kinds)
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Set this state inside the block."""
        if self == Autocast.now():
            yield
            return
        with ExitStack() as stack:
            for kind, dtype in self.devices:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=dtype is not None))
            yield


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Leave inference mode inside the block, without a change of the gradient mode.

    Scales, factors and integer weights are used later where gradients are recorded, and torch refuses inference tensors
    there. Do not use this as a decorator: warnings would name its frame as the user's line.
    """
    recorded = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(recorded):
        yield


def as_ordinary(values: Any) -> Any:
    """Return values with copies of their inference tensors, which a model may modify outside of inference mode."""
    if not any(isinstance(leaf, Tensor) and leaf.is_inference() for leaf in leaves(values)):
        return values
    return mapped(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf, values)
