"""Linear layers of 8-bit operands as one kernel: product, scales, bias, activation, residual, and 8 bits or floats.

Legend: a [M, K] and w [N, K] the quantized activation and weight, both INT8 or both FP8; s the scale of a; t
[N] the scales of w; b [N] the bias; r [M, N] the residual.

    y = f(s t (a w^T) + b) + r

Sums of INT8 are exact in 32 bits; those of FP8, and everything behind the product, are in float32. y is written in
half precision, or quantized with the scale of the next operand. Products that read the same a, such as q, k and v,
are one product with several results: their weights are stacked, and result p has rows p N / P to (p + 1) N / P of w.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantizer.numerics.triton_kernels.arithmetic import KINDS, activated, quantized
from quantizer.numerics.triton_kernels.tiles import Tile


@dataclass(frozen=True, kw_only=True)
class Epilogue:
    """The operations after a product in the same kernel.

    Attributes:
        activation: ``none``, ``relu``, ``gelu``, ``gelu_tanh`` or ``silu``.
        dtype: the type of the result: float16, bfloat16, int8 or float8_e4m3fn.
        parts: the number of results.
    """

    activation: str = "none"
    dtype: torch.dtype = torch.float16
    parts: int = 1

    @property
    def kind(self) -> str:
        """``int8``, ``fp8`` or ``float``."""
        return KINDS.get(self.dtype, "float")


@triton.jit
def _finish(
    value,
    rows,
    columns,
    y_ptr,
    b_ptr,
    r_ptr,
    next_ptr,
    zero_point,
    M,
    N,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    KIND: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Apply bias, activation and residual to scaled sums, and write a tile of y."""
    if HAS_BIAS:
        value += tl.load(b_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    value = activated(value, ACTIVATION)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    if HAS_RESIDUAL:
        r_at = r_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
        value += tl.load(r_at, mask=inside, other=0.0).to(tl.float32)
    width = N // PARTS
    part = columns // width
    y_at = y_ptr + (part * M).to(tl.int64)[None, :] * width + rows.to(tl.int64)[:, None] * width
    y_at += (columns - part * width)[None, :]
    if KIND == "float":
        tl.store(y_at, value.to(y_ptr.dtype.element_ty), mask=inside)
    else:
        next_scale = tl.load(next_ptr + (columns if BY_COLUMN else part), mask=columns < N, other=1.0)
        tl.store(y_at, quantized(value, next_scale[None, :], zero_point, KIND), mask=inside)


@triton.jit
def product_kernel(
    a_ptr,
    w_ptr,
    y_ptr,
    t_ptr,
    b_ptr,
    r_ptr,
    next_ptr,
    zero_point,
    s,
    M,
    N,
    K,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    KIND: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    PARTS: tl.constexpr,
    INTEGERS: tl.constexpr,
    EVEN_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute one tile [ROWS, COLUMNS] of y; ``next_ptr`` has the scales of a quantized y."""
    # Neighbouring programs take tiles of GROUP rows of tiles, whose operands then stay in the cache.
    program = tl.program_id(0)
    down, across = tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS)
    first = program // (GROUP * across) * GROUP
    height = min(down - first, GROUP)
    row_tile = first + program % (GROUP * across) % height
    column_tile = program % (GROUP * across) // height

    rows = row_tile * ROWS + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    # Rows and columns beyond the end read others, whose results are not written.
    a_at = a_ptr + (rows % M).to(tl.int64)[:, None] * K + depth[None, :]
    w_at = w_ptr + (columns % N).to(tl.int64)[None, :] * K + depth[:, None]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.int32 if INTEGERS else tl.float32)
    for start in range(0, K, DEPTH):
        if EVEN_K:
            a, w = tl.load(a_at), tl.load(w_at)
        else:
            inside = depth < K - start
            a = tl.load(a_at, mask=inside[None, :], other=0.0)
            w = tl.load(w_at, mask=inside[:, None], other=0.0)
        total = tl.dot(a, w, total, out_dtype=tl.int32 if INTEGERS else tl.float32)
        a_at += DEPTH
        w_at += DEPTH

    scales = tl.load(t_ptr + columns, mask=columns < N, other=0.0) * s
    _finish(
        *(total.to(tl.float32) * scales[None, :], rows, columns, y_ptr, b_ptr, r_ptr, next_ptr, zero_point, M, N),
        *(HAS_BIAS, HAS_RESIDUAL, ACTIVATION, KIND, BY_COLUMN, PARTS),
    )


@triton.jit
def epilogue_kernel(
    x_ptr,
    y_ptr,
    t_ptr,
    b_ptr,
    r_ptr,
    next_ptr,
    zero_point,
    s,
    M,
    N,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    KIND: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute one tile [ROWS, COLUMNS] of y from the sums x [M, N] of a product of another library."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    total = tl.load(x_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :], mask=inside, other=0)
    scales = tl.load(t_ptr + columns, mask=columns < N, other=0.0) * s
    _finish(
        *(total.to(tl.float32) * scales[None, :], rows, columns, y_ptr, b_ptr, r_ptr, next_ptr, zero_point, M, N),
        *(HAS_BIAS, HAS_RESIDUAL, ACTIVATION, KIND, BY_COLUMN, PARTS),
    )


def linear(
    a: Tensor,
    w: Tensor,
    scale: float,
    scales: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    next_scale: Tensor | None,
    epilogue: Epilogue,
    tile: Tile,
    *,
    zero_point: int = 0,
) -> Tensor:
    """Return y [P, M, N / P], or [M, N] for one part.

    Args:
        a: quantized values [M, K], int8 or float8_e4m3fn.
        w: quantized values [N, K] of the same type.
        scale: the scale of a.
        scales: the scales of w, float32 [N].
        bias: [N] or None.
        residual: [M, N] in half precision, for one part; None: there is none.
        next_scale: one scale per part or per column of a quantized result: float32 [P] or [N].
        epilogue: the operations after the product.
        tile: the shape of a program's share.
        zero_point: the zero point of an INT8 result, for all parts.
    """
    (m, k), n = a.shape, len(w)
    y = _result(m, n, epilogue, a.device)
    grid = (triton.cdiv(m, tile.rows) * triton.cdiv(n, tile.columns),)
    kernel: Any = product_kernel
    kernel[grid](
        *(a, w, y, scales, bias, residual, next_scale, float(zero_point), scale, m, n, k),
        **_options(bias, residual, next_scale, epilogue, n),
        INTEGERS=a.dtype == torch.int8,
        EVEN_K=k % tile.depth == 0,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        GROUP=tile.group,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y[0] if epilogue.parts == 1 else y


def _result(m: int, n: int, epilogue: Epilogue, device: torch.device) -> Tensor:
    return torch.empty((epilogue.parts, m, n // epilogue.parts), dtype=epilogue.dtype, device=device)


def _options(
    bias: Tensor | None, residual: Tensor | None, next_scale: Tensor | None, epilogue: Epilogue, n: int
) -> dict[str, Any]:
    """Return the compile-time options of an epilogue."""
    return {
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "ACTIVATION": epilogue.activation,
        "KIND": epilogue.kind,
        "BY_COLUMN": next_scale is not None and next_scale.numel() == n,
        "PARTS": epilogue.parts,
    }


EPILOGUE_ROWS, EPILOGUE_COLUMNS = 4, 256
"""The tile of a program of ``epilogue_kernel``: eight values for each of 128 threads."""


def finished(
    x: Tensor,
    scale: float,
    scales: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    next_scale: Tensor | None,
    epilogue: Epilogue,
    *,
    zero_point: int = 0,
) -> Tensor:
    """Return y of ``linear`` for the sums of its product, in one elementwise kernel.

    Args:
        x: a w^T [M, N], int32, float32 or in half precision, contiguous.
        scale: the scale of a.
        scales: the scales of w, float32 [N].
        bias: [N] or None.
        residual: [M, N] in half precision, for one part; None: there is none.
        next_scale: one scale per part or per column of a quantized result: float32 [P] or [N].
        epilogue: the operations after the product.
        zero_point: the zero point of an INT8 result, for all parts.
    """
    m, n = x.shape
    y = _result(m, n, epilogue, x.device)
    kernel: Any = epilogue_kernel
    kernel[(triton.cdiv(m, EPILOGUE_ROWS), triton.cdiv(n, EPILOGUE_COLUMNS))](
        *(x, y, scales, bias, residual, next_scale, float(zero_point), scale, m, n),
        **_options(bias, residual, next_scale, epilogue, n),
        ROWS=EPILOGUE_ROWS,
        COLUMNS=EPILOGUE_COLUMNS,
    )
    return y[0] if epilogue.parts == 1 else y
