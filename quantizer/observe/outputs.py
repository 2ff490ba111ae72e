"""The floating tensors of a model's output, of whatever structure."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantizer.common.structure import leaves
from quantizer.errors import SensitivityError
from quantizer.observe.padding import output_without_padding

_MASK = 1e18
"""The magnitude from which on a value is a mask, such as that of logits that must not be chosen; its square is finite
in float32."""


def floats(output: Any) -> list[Tensor]:
    """Return the floating-point tensors of an output, in the order of its structure."""
    return [leaf for leaf in leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def is_no_mask(values: Tensor) -> Tensor:
    """Return which values, bool [*], are results, and no infinities or numbers next to them."""
    return values.abs() < _MASK


def flat_output(output: Any, mask: Tensor | None) -> Tensor:
    """Return all floating tensors of an output as one float64 vector without padding.

    Raises:
        SensitivityError: the output has no floating-point tensor.
    """
    tensors = floats(output)
    if not tensors:
        raise SensitivityError(f"the model's output ({type(output).__name__}) holds no floating-point tensor")
    parts = [output_without_padding(tensor.detach(), mask).double().flatten() for tensor in tensors]
    # Not copied twice; an output of float64 was not copied once.
    return parts[0] if len(parts) == 1 and tensors[0].dtype != torch.float64 else torch.cat(parts)
