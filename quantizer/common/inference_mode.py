"""Tensors that autograd takes, made within ``torch.inference_mode()`` too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["ordinary_tensors"]


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Make no inference tensors in the block or decorated function; gradients are recorded or not, as outside of it.

    What a quantizer makes outlives the caller's inference mode: scales, factors and codes are read later where
    gradients are recorded, which torch refuses for inference tensors.
    """
    recorded = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(recorded):
        yield
