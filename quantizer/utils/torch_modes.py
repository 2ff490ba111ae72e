"""Modes of torch that a forward may set: autocast and inference mode.

The autocast state of a call, for computing the call again elsewhere.

Tensors that autograd takes, made within ``torch.inference_mode()`` too.
"""

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
        devices: each kind of device with the type that autocast computes in there; None: it is off there.
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
        """Compute in this state while the block is open."""
        if self == Autocast.now():
            yield
            return
        with ExitStack() as stack:
            for kind, dtype in self.devices:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=dtype is not None))
            yield


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Make no inference tensors in the block; gradients are recorded or not, as outside of it.

    Not for use as a decorator: its frame would be named as the place of the caller's warnings.

    What a quantizer makes outlives the caller's inference mode: scales, factors and codes are read later where
    gradients are recorded, which torch refuses for inference tensors.
    """
    recorded = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(recorded):
        yield


def as_ordinary(values: Any) -> Any:
    """Return values with copies of their inference tensors, into which a model may write outside of inference mode."""
    if not any(isinstance(leaf, Tensor) and leaf.is_inference() for leaf in leaves(values)):
        return values
    return mapped(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf, values)
