"""Running a model without leaving a trace in it: what a pass writes into its modules is put back.

That is buffers and other tensors, and numbers, texts and booleans that modules keep as attributes. Parameters are not
written by a pass, and what an object of any other kind holds is not looked into.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import nn

from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.proxy.site import Site

__all__ = ["Held", "unmoved"]

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class _Copy:
    """A tensor, and what was in it."""

    tensor: Tensor
    values: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> _Copy:
        return cls(tensor, tensor.detach().clone())

    def put_back(self) -> Tensor:
        """Return the tensor with the values that it had."""
        if self.tensor.is_meta or self.tensor.layout is not torch.strided:
            return self.tensor
        if self.tensor.is_inference():
            # Nothing counts its changes, and outside of inference mode it cannot be written.
            return self.values.clone()
        # Not by its version: a normalization in training changes its statistics without telling torch.
        if not torch.equal(self.tensor, self.values):
            with torch.no_grad():
                self.tensor.copy_(self.values)
        return self.tensor


class Held:
    """The state of a model's modules at one time."""

    def __init__(self, model: nn.Module) -> None:
        # The sites are ours, and who runs a pass sets them.
        own = [module for module in model.modules() if not isinstance(module, Site | OperandQuantizer)]
        self._held = [(holder, _held(holder)) for module in own for holder in (module._buffers, vars(module))]

    def put_back(self) -> None:
        """Let them hold it again."""
        for holder, held in self._held:
            for name in _held_names(holder) - held.keys():
                del holder[name]
            holder.update(
                {name: value.put_back() if isinstance(value, _Copy) else value for name, value in held.items()}
            )


@contextmanager
def unmoved(model: nn.Module) -> Iterator[None]:
    """Put back what passes inside the block write into the modules of a model."""
    held = Held(model)
    try:
        yield
    finally:
        held.put_back()


def _held(holder: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _Copy.of(value) if isinstance(value := holder[name], Tensor) else value for name in _held_names(holder)
    }


def _held_names(holder: dict[str, Any]) -> set[str]:
    return {
        name
        for name, value in holder.items()
        if isinstance(value, _PLAIN) or (isinstance(value, Tensor) and not isinstance(value, nn.Parameter))
    }
