"""Attention that skips the blocks of keys that a mask excludes, as one kernel.

Legend: q [B, H, Q, D], k and v [B, H, K, D] in half precision; m [B, H, 1, K] the mask, which is added to the scores.

    y = softmax(scale q k^T + m) v

A program computes BLOCK_Q rows of y for one sample and head. It first reads the mask of its sample, and then visits
the keys from the first to the last block with a real key, so that padding costs no time and the host does not wait for
lengths. Masked keys between real ones are computed, with the weight 0.

A key is real if m is above -10,000, which some models add for padding. The weight of another key is 0, unless scores
differ by nearly 10,000. Where the lowest number of its type is added, or -inf, a key has the same low score for each
query. If no key of a sample is real, all keys are visited: y is then the mean of v for masks of these numbers, as in a
float32 model that adds its lowest number.

Sums are in float32; the weights of v are rounded to the type of v. y is written in the type of q, or quantized with the
scale of the next operand.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantizer.numerics.triton_kernels.arithmetic import KINDS, dot_in_float32, quantized
from quantizer.numerics.triton_kernels.tiles import AttentionTile

_LEAST_REAL = tl.constexpr(-1e4)
"""The mask of padding is at most this."""

_EXCLUDED = tl.constexpr(-1e30)
"""What is added for the lowest number: the sum of it and any score of half precision is itself."""

_LOG2_E = tl.constexpr(1.4426950408889634)

_CHUNK = tl.constexpr(256)
"""Values of the mask that are read at once to find the real keys."""


@triton.jit
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    m_ptr,
    y_ptr,
    next_ptr,
    zero_point,
    scale,
    lowest,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    m_batch,
    m_head,
    HEADS,
    Q,
    K,
    D: tl.constexpr,
    KIND: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute rows of y [B, Q, H, D] for one head; q_batch to m_head are strides, and those of D and K are 1."""
    blocks = tl.cdiv(Q, BLOCK_Q)
    block, pair = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch, head = (pair // HEADS).to(tl.int64), (pair % HEADS).to(tl.int64)
    m_at = m_ptr + batch * m_batch + head * m_head

    first, last = K, 0
    for start in range(0, K, _CHUNK):
        keys = start + tl.arange(0, _CHUNK)
        m = tl.load(m_at + keys, mask=keys < K, other=float("-inf")).to(tl.float32)
        # NaN is real, so that the result is NaN.
        padding = m <= _LEAST_REAL
        first = tl.minimum(first, tl.min(tl.where(padding, K, keys), 0))
        last = tl.maximum(last, tl.max(tl.where(padding, 0, keys + 1), 0))
    first = tl.where(last == 0, 0, first // BLOCK_K * BLOCK_K)
    last = tl.where(last == 0, K, last)

    rows = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    depth = tl.arange(0, BLOCK_D)
    q_at = q_ptr + batch * q_batch + head * q_head + rows.to(tl.int64)[:, None] * q_row + depth[None, :]
    inside_q = (rows < Q)[:, None] & (depth < D)[None, :]
    q = tl.load(q_at, mask=inside_q, other=0.0)
    k_head_at = k_ptr + batch * k_batch + head * k_head
    v_head_at = v_ptr + batch * v_batch + head * v_head

    highest = tl.full((BLOCK_Q,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((BLOCK_Q,), dtype=tl.float32)
    total = tl.zeros((BLOCK_Q, BLOCK_D), dtype=tl.float32)
    for start in range(first, last, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        exists = keys < K
        k_at = k_head_at + keys.to(tl.int64)[None, :] * k_row + depth[:, None]
        k = tl.load(k_at, mask=exists[None, :] & (depth < D)[:, None], other=0.0)
        m = tl.load(m_at + keys, mask=exists, other=0.0).to(tl.float32)
        m = tl.where(m <= lowest, _EXCLUDED, m) * _LOG2_E
        products = dot_in_float32(q, k, tl.zeros((BLOCK_Q, BLOCK_K), dtype=tl.float32))
        scores = tl.where(exists[None, :], products * (scale * _LOG2_E) + m[None, :], float("-inf"))
        above = tl.maximum(highest, tl.max(scores, 1))
        p = tl.exp2(scores - above[:, None])
        shrink = tl.exp2(highest - above)
        weight = weight * shrink + tl.sum(p, 1)
        v_at = v_head_at + keys.to(tl.int64)[:, None] * v_row + depth[None, :]
        v = tl.load(v_at, mask=exists[:, None] & (depth < D)[None, :], other=0.0)
        total = dot_in_float32(p.to(v.dtype), v, total * shrink[:, None])
        highest = above

    y_at = y_ptr + ((batch * Q + rows.to(tl.int64)[:, None]) * HEADS + head) * D + depth[None, :]
    y = total / weight[:, None]
    if KIND == "float":
        tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=inside_q)
    else:
        next_scale = tl.load(next_ptr + (head * D + depth if BY_COLUMN else 0 * depth), mask=depth < D, other=1.0)
        tl.store(y_at, quantized(y, next_scale[None, :], zero_point, KIND), mask=inside_q)


def lowest_mask(dtype: torch.dtype) -> float:
    """Return the largest mask that excludes a key whatever its score is; what is lower overflows when it is scaled."""
    return max(torch.finfo(dtype).min, -5e29)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    tile: AttentionTile,
    *,
    quantized_as: torch.dtype | None = None,
    next_scale: Tensor | None = None,
    zero_point: int = 0,
) -> Tensor:
    """Return y [B, H, Q, D], whose memory is that of [B, Q, H, D].

    Args:
        q: [B, H, Q, D] in half precision, values of D next to each other in memory, as in k and v.
        k: [B, H, K, D].
        v: [B, H, K, D].
        mask: m, any shape of floats that broadcasts to [B, H, 1, K].
        scale: the factor of the scores.
        tile: the shape of a program's share.
        quantized_as: int8 or float8_e4m3fn; None: y is in the type of q.
        next_scale: the scale of quantized values, or one scale per head and index of D: float32 [1] or [H D].
        zero_point: the zero point of INT8 values.
    """
    (batch, heads, queries, width), keys = q.shape, k.shape[2]
    m = mask.expand(batch, heads, 1, keys)
    if m.stride(3) != 1:
        m = m.contiguous()
    q, k, v = (each if each.stride(3) == 1 else each.contiguous() for each in (q, k, v))
    y = torch.empty((batch, queries, heads, width), dtype=quantized_as or q.dtype, device=q.device)
    kernel: Any = attention_kernel
    kernel[(triton.cdiv(queries, tile.queries) * batch * heads,)](
        *(q, k, v, m, y, next_scale, float(zero_point), scale, lowest_mask(m.dtype)),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *m.stride()[:2]),
        *(heads, queries, keys),
        D=width,
        KIND="float" if quantized_as is None else KINDS[quantized_as],
        BY_COLUMN=next_scale is not None and next_scale.numel() == heads * width,
        BLOCK_Q=tile.queries,
        BLOCK_K=tile.keys,
        BLOCK_D=max(16, triton.next_power_of_2(width)),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y.transpose(1, 2)
