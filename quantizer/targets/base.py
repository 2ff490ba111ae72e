"""What a backend wants from a quantized graph, as data: a profile decides nothing by code path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["FloatDtype", "SiteKind", "TargetProfile"]

FloatDtype = Literal["float16", "bfloat16", "float32"]
SiteKind = Literal["linear", "conv", "matmul", "residual_add"]


@dataclass(frozen=True, kw_only=True)
class TargetProfile:
    """The wishes and limits of one backend.

    Attributes:
        name: the backend, as a configuration names it.
        float_dtype: the type of everything that is not quantized, scales included.
        symmetric: whether zero points must be zero (signed integers, range from -amax to amax). A backend that takes
            asymmetric activations wants unsigned ones with a zero point.
        weight_granularity: ``per_channel`` (one scale per output channel) or ``per_tensor``.
        site_kinds: the kinds of site that are worth quantizing there.
        min_gemm_dim: a product of [M, K] and [K, N] stays float where K or N is smaller; None: no limit.
        opset: the ONNX opset to write.
        min_opset: the smallest opset that can hold this target's scales.
    """

    name: str
    float_dtype: FloatDtype
    site_kinds: frozenset[SiteKind]
    symmetric: bool = True
    weight_granularity: Literal["per_channel", "per_tensor"] = "per_channel"
    min_gemm_dim: int | None = None
    opset: int = 20
    min_opset: int = 13

    def gemm_reason(self, k: int, n: int) -> str | None:
        """Why a product of [M, k] and [k, n] stays float on this target; None where it may be quantized."""
        if self.min_gemm_dim is None or min(k, n) >= self.min_gemm_dim:
            return None
        axis, size = ("K", k) if k < self.min_gemm_dim else ("N", n)
        return f"{axis} = {size} is below {self.min_gemm_dim}: slower quantized than float on {self.name}"
