"""A check of the gradients of a step."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def has_gradient(parameters: Iterable[Tensor]) -> bool:
    """Return whether any parameter has a gradient that is not all zeros."""
    return any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in parameters)
