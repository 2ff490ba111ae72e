"""The modules of an imported graph that torch has none for: a product and a sum of two tensors, and an LSTM of ONNX.

They are sites as those of any other model: their source is rewritten. Modules made by ``from_onnx`` name another file
as theirs, so that the rewriter tells the two sources apart.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


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


class Lstm(nn.LSTM):
    """A recurrent layer whose states are arguments and results of their own, as in a graph."""

    def forward(  # type: ignore[override]
        self, x: Tensor, hidden: Tensor, cell: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs [T, B, D H] and both states [D, B, H] of x [T, B, I] and the states before."""
        outputs, (hidden, cell) = super().forward(x, (hidden, cell))
        return outputs, hidden, cell
