"""LayerNorm and RMSNorm with the residual add before and the quantization behind, each as one kernel.

Legend: x [M, W] the rows; r [M, W] the residual; g, b [W] the weight and the bias of the norm.

    h = x + r        y = (h - mean(h)) / sqrt(var(h) + eps) g + b
    RMSNorm:         y = h / sqrt(mean(h^2) + eps) g

One program computes one row, in float32. It writes h, which the next residual add reads, y in half precision, and
the quantized values of y for the next layer; each only on request. The embedding kernel sums rows of tables as h.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantizer.numerics.triton_kernels.arithmetic import KINDS, quantized


class Normed(NamedTuple):
    """The results of a norm: the sum h, the norm y in half precision, and y quantized; None for each unread one."""

    total: Tensor | None
    value: Tensor | None
    quantized: Tensor | None


@triton.jit
def _normed(
    h,
    inside,
    at,
    g_ptr,
    b_ptr,
    h_ptr,
    y_ptr,
    q_ptr,
    next_scale_ptr,
    zero_point,
    eps,
    W,
    RMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WRITES_TOTAL: tl.constexpr,
    WRITES_VALUE: tl.constexpr,
    KIND: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Norm one row h, zeros beyond its end, and write the requested results."""
    column = tl.arange(0, BLOCK)
    if WRITES_TOTAL:
        tl.store(h_ptr + at, h.to(h_ptr.dtype.element_ty), mask=inside)
    if not RMS:
        h = tl.where(inside, h - tl.sum(h, 0) / W, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(h * h, 0) / W + eps)
    y = h * scale * tl.load(g_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(b_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if WRITES_VALUE:
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)
    if KIND != "none":
        next_scale = tl.load(next_scale_ptr + (column if BY_COLUMN else 0 * column), mask=inside, other=1.0)
        tl.store(q_ptr + at, quantized(y, next_scale, zero_point, KIND), mask=inside)


@triton.jit
def norm_kernel(
    x_ptr,
    r_ptr,
    g_ptr,
    b_ptr,
    h_ptr,
    y_ptr,
    q_ptr,
    next_scale_ptr,
    zero_point,
    eps,
    W,
    HAS_RESIDUAL: tl.constexpr,
    RMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WRITES_TOTAL: tl.constexpr,
    WRITES_VALUE: tl.constexpr,
    KIND: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the residual to one row and norm it."""
    column = tl.arange(0, BLOCK)
    inside = column < W
    at = tl.program_id(0).to(tl.int64) * W + column
    h = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        h += tl.load(r_ptr + at, mask=inside, other=0.0).to(tl.float32)
    _normed(
        h,
        inside,
        at,
        g_ptr,
        b_ptr,
        h_ptr,
        y_ptr,
        q_ptr,
        next_scale_ptr,
        zero_point,
        eps,
        W,
        RMS,
        HAS_BIAS,
        WRITES_TOTAL,
        WRITES_VALUE,
        KIND,
        BY_COLUMN,
        BLOCK,
    )


@triton.jit
def _embedding(table_ptr, length, index_ptr, row, column, inside, W):
    """Load the row of a table for one token, zeros beyond its end; NaN if the table lacks the index."""
    index = tl.load(index_ptr + row).to(tl.int64)
    loaded = tl.where((index >= 0) & (index < length), W, 0)
    value = tl.load(table_ptr + index * W + column, mask=column < loaded, other=float("nan"))
    return tl.where(inside, value.to(tl.float32), 0.0)


@triton.jit
def embedding_kernel(
    ids_ptr,
    positions_ptr,
    types_ptr,
    words_ptr,
    places_ptr,
    kinds_ptr,
    g_ptr,
    b_ptr,
    h_ptr,
    y_ptr,
    q_ptr,
    next_scale_ptr,
    zero_point,
    eps,
    W,
    WORDS,
    PLACES,
    KINDS,
    HAS_TYPES: tl.constexpr,
    RMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WRITES_TOTAL: tl.constexpr,
    WRITES_VALUE: tl.constexpr,
    KIND: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the rows of the tables for one token and norm the sum."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < W
    h = _embedding(words_ptr, WORDS, ids_ptr, row, column, inside, W)
    if HAS_TYPES:
        h += _embedding(kinds_ptr, KINDS, types_ptr, row, column, inside, W)
    h += _embedding(places_ptr, PLACES, positions_ptr, row, column, inside, W)
    _normed(
        h,
        inside,
        row * W + column,
        g_ptr,
        b_ptr,
        h_ptr,
        y_ptr,
        q_ptr,
        next_scale_ptr,
        zero_point,
        eps,
        W,
        RMS,
        HAS_BIAS,
        WRITES_TOTAL,
        WRITES_VALUE,
        KIND,
        BY_COLUMN,
        BLOCK,
    )


def norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    rms: bool = False,
    total: bool = False,
    value: bool = True,
    quantized_as: torch.dtype | None = None,
    next_scale: Tensor | None = None,
    zero_point: int = 0,
) -> Normed:
    """Norm the rows of x.

    Args:
        x: [M, W] in half precision or float32.
        residual: [M, W], which is added to x first; None: nothing.
        weight: g [W].
        bias: b [W] or None.
        eps: the number under the root.
        rms: RMSNorm instead of LayerNorm.
        total: whether h is written.
        value: whether y is written.
        quantized_as: the type of the quantized values of y, int8 or float8_e4m3fn; None: they are not written.
        next_scale: the scale of the quantized values, or one scale per column: float32 [1] or [W].
        zero_point: the zero point of INT8 values.
    """
    results, options = _results(
        x, bias, x.dtype, rms=rms, total=total, value=value, quantized_as=quantized_as, next_scale=next_scale
    )
    kernel: Any = norm_kernel
    kernel[(len(x),)](
        *(x, residual, weight, bias, *results, next_scale, float(zero_point), eps, x.shape[1]),
        HAS_RESIDUAL=residual is not None,
        **options,
    )
    return Normed(*results)


def embedding_norm(
    ids: Tensor,
    positions: Tensor,
    types: Tensor | None,
    words: Tensor,
    places: Tensor,
    kinds: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    rms: bool = False,
    total: bool = False,
    value: bool = True,
    quantized_as: torch.dtype | None = None,
    next_scale: Tensor | None = None,
    zero_point: int = 0,
) -> Normed:
    """Norm the sums of the embeddings of M tokens.

    The results of a token are NaN if a table lacks its index; INT8 has no NaN, so that its quantized values are zeros.

    Args:
        ids: the words [M], int32 or int64.
        positions: the positions [M].
        types: the token types [M]; None: the model has no token types.
        words: the table of words [V, W].
        places: the table of positions [P, W].
        kinds: the table of token types [T, W]; None as ``types``.
        weight: g [W].
        bias: b [W] or None.
        eps: the number under the root.
        rms: as for ``norm``.
        total: as for ``norm``.
        value: as for ``norm``.
        quantized_as: as for ``norm``.
        next_scale: as for ``norm``.
        zero_point: as for ``norm``.
    """
    rows = words.new_empty((len(ids), words.shape[1]))
    results, options = _results(
        rows, bias, words.dtype, rms=rms, total=total, value=value, quantized_as=quantized_as, next_scale=next_scale
    )
    kernel: Any = embedding_kernel
    kernel[(len(ids),)](
        *(
            ids,
            positions,
            types,
            words,
            places,
            kinds,
            weight,
            bias,
            *results,
            next_scale,
            float(zero_point),
            eps,
            words.shape[1],
            len(words),
            len(places),
            0 if kinds is None else len(kinds),
        ),
        HAS_TYPES=kinds is not None,
        **options,
    )
    return Normed(*results)


_FOUR_WARPS = 1024
"""The values of a row for which four warps are enough."""


def _results(
    rows: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    rms: bool,
    total: bool,
    value: bool,
    quantized_as: torch.dtype | None,
    next_scale: Tensor | None,
) -> tuple[list[Tensor | None], dict[str, Any]]:
    """Return tensors for the results that are written, and the options of a kernel."""
    results = [torch.empty_like(rows, dtype=dtype) if written else None for written in (total, value)]
    results.append(None if quantized_as is None else torch.empty_like(rows, dtype=quantized_as))
    block = triton.next_power_of_2(rows.shape[1])
    return results, {
        "RMS": rms,
        "HAS_BIAS": bias is not None,
        "WRITES_TOTAL": total,
        "WRITES_VALUE": value,
        "KIND": "none" if quantized_as is None else KINDS[quantized_as],
        "BY_COLUMN": next_scale is not None and next_scale.numel() == rows.shape[1],
        "BLOCK": block,
        "num_warps": 4 if block <= _FOUR_WARPS else 8,
    }
