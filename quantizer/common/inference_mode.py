"""Tensors that autograd takes, made within ``torch.inference_mode()`` too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from quantizer.common.structure import leaves, mapped


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
