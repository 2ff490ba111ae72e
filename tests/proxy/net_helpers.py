"""Functions that the nets of ``nets.py`` import."""

from __future__ import annotations

import torch
from torch import Tensor


def scores(query: Tensor, key: Tensor, *, scale: float = 1.0) -> Tensor:
    """A product, without a module to hold its site."""
    return torch.matmul(query, key.transpose(-1, -2)) * scale


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A product of its own and that of another helper."""
    return scores(query, key, scale=0.1).softmax(-1) @ value
