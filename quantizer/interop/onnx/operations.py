"""The modules of an imported graph that torch has none for: a product and a sum of two tensors that it computes.

They are sites as those of any other model: their source is rewritten.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch import nn

__all__ = ["Add", "MatMul"]


class MatMul(nn.Module):
    """The matrix product of [..., M, K] and [..., K, N]."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the product [..., M, N]."""
        return torch.matmul(left, right)


class Add(nn.Module):
    """The sum of two tensors, whose shapes are broadcast."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the sum."""
        return left + right
