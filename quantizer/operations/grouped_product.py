"""``quantizer::grouped_mm``, a grouped product as torch operator: one matrix product for each expert.

Legend: S rows that are sorted by expert; E experts; K and N as of a matrix product.

    result[s] = rows[s] @ weight[e]    for offs[e - 1] <= s < offs[e]

torch's own ``grouped_mm`` takes bfloat16 alone where a graph is traced, and has no translation to ONNX.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_MATRIX, _EXPERTS = 2, 3  # axes of the rows, and of the weights


@torch.library.custom_op("quantizer::grouped_mm", mutates_args=())
def grouped_mm(rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Return the products [S, N] of rows [S, K] and weight [E, K, N]; rows behind the last of ``offs`` [E] are 0."""
    result = rows.new_zeros(rows.shape[0], weight.shape[2])
    start = 0
    for matrix, end in zip(weight.unbind(), offs.tolist(), strict=True):
        result[start:end] = rows[start:end] @ matrix
        start = end
    return result


@grouped_mm.register_fake
def _(rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


def as_in_graphs(mat_a: Tensor, mat_b: Tensor, offs: Tensor | None = None, **others: Any) -> Tensor:
    """Return ``F.grouped_mm`` of the arguments as a graph holds it: in any float type, and by our operator."""
    plain = all(value is None for value in others.values())
    if offs is None or not plain or mat_a.dim() != _MATRIX or mat_b.dim() != _EXPERTS:
        return F.grouped_mm(mat_a, mat_b, offs=offs, **others)
    made: Tensor = torch.ops.quantizer.grouped_mm(mat_a.to(mat_b.dtype), mat_b, offs)
    return made


def group_sizes(offs: Tensor) -> list[int]:
    """Return how many rows each expert has, of the ends ``offs`` [E]."""
    ends: list[int] = offs.tolist()
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
