"""Restoration of a model's state after a pass that wrote into its modules.

The state is buffers and other tensors, and numbers, strings, booleans and None that modules keep as attributes. A pass
does not write parameters, and the contents of objects of any other kind are not restored.
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
    """A tensor, and a copy of its values."""

    tensor: Tensor
    values: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> _Copy:
        return cls(tensor, tensor.detach().clone())

    def put_back(self) -> Tensor:
        """Restore the values and return the tensor, or the copy if it is an inference tensor."""
        if self.tensor.is_meta or self.tensor.layout is not torch.strided:
            return self.tensor
        if self.tensor.is_inference():
            # An inference tensor has no version, and cannot be written outside of inference mode.
            return self.values.clone()
        # Compare values, not versions: a normalization in training changes its statistics without a new version.
        if not torch.equal(self.tensor, self.values):
            with torch.no_grad():
                self.tensor.copy_(self.values)
        return self.tensor


class Held:
    """A copy of the state of a model's modules at one time."""

    def __init__(self, model: nn.Module) -> None:
        # Not the sites: the caller of a pass sets their state.
        own = [module for module in model.modules() if not isinstance(module, Site | OperandQuantizer)]
        self._held = [(holder, _held(holder)) for module in own for holder in (module._buffers, vars(module))]

    def put_back(self) -> None:
        """Restore the state."""
        for holder, held in self._held:
            for name in _held_names(holder) - held.keys():
                del holder[name]
            for name, value in held.items():
                before = value.put_back() if isinstance(value, _Copy) else value
                # Entry by entry, and only those that moved: the dictionaries of scripted modules take nothing else.
                if name not in holder or holder[name] is not before:
                    holder[name] = before


@contextmanager
def unmoved(model: nn.Module) -> Iterator[None]:
    """Restore the state of a model's modules at the end of the block."""
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
