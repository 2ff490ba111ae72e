"""Sums of embeddings in a file: of a matrix of indices they are a Gather and a reduction.

torch writes ``embedding_bag`` as a Loop over sequences, which no engine here takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from quantizer.errors import ExportError

_MATRIX = 2  # axes


@contextmanager
def bags_as_reductions() -> Iterator[None]:
    """Let ``torch.nn.functional.embedding_bag`` compute by ``reduced_bag`` inside the block."""
    own: Any = F.embedding_bag
    F.embedding_bag = reduced_bag
    try:
        yield
    finally:
        F.embedding_bag = own


def reduced_bag(
    input: Tensor,  # noqa: A002 - the name in torch
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Return the sum, mean or maximum [B, D] of embeddings [N, D] by a matrix of indices [B, L].

    The arguments are those of ``torch.nn.functional.embedding_bag``; those about gradients do not matter.

    Raises:
        ExportError: the indices are a list with offsets, or ``max_norm`` is given.
    """
    if input.dim() != _MATRIX or max_norm is not None:
        what = "with max_norm" if max_norm is not None else "of a list of indices with offsets"
        raise ExportError(
            f"embedding_bag {what} cannot be written to a file: engines take a matrix of indices [B, L], one row for "
            "each bag, without max_norm; fill shorter bags with padding_idx"
        )
    found = F.embedding(input, weight)
    if per_sample_weights is not None:
        found = found * per_sample_weights.unsqueeze(-1)
    if padding_idx is None:
        return found.amax(1) if mode == "max" else found.mean(1) if mode == "mean" else found.sum(1)
    kept = (input != padding_idx % weight.shape[0]).unsqueeze(-1)
    if mode == "max":
        largest = found.masked_fill(~kept, torch.finfo(found.dtype).min).amax(1)
        return torch.where(kept.any(1), largest, torch.zeros_like(largest))
    total = found.masked_fill(~kept, 0.0).sum(1)
    return total / kept.sum(1).clamp(min=1).to(total.dtype) if mode == "mean" else total
