"""The floating tensors of a model's output, of whatever structure."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantizer.errors import SensitivityError
from quantizer.observe.padding import output_without_padding

__all__ = ["flat_output", "floats"]


def floats(output: Any) -> list[Tensor]:
    """Return the floating-point tensors of an output, in the order of its structure."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def flat_output(output: Any, mask: Tensor | None) -> Tensor:
    """Return all floating tensors of an output as one float64 vector without padding.

    Raises:
        SensitivityError: the output has no floating-point tensor.
    """
    tensors = floats(output)
    if not tensors:
        raise SensitivityError(f"the model's output ({type(output).__name__}) holds no floating-point tensor")
    return torch.cat([output_without_padding(tensor.detach(), mask).double().flatten() for tensor in tensors])
