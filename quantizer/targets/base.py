"""What a backend wants from a quantized graph, as data: a profile decides nothing by code path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["FloatDtype", "SiteKind", "TargetProfile"]

FloatDtype = Literal["float16", "bfloat16", "float32"]
SiteKind = Literal["linear", "conv", "matmul", "residual_add", "embedding"]


@dataclass(frozen=True, kw_only=True)
class TargetProfile:
    """The wishes and limits of one backend.

    Attributes:
        name: the backend, as a configuration names it.
        float_dtype: the type of everything that is not quantized, scales included.
        site_kinds: the kinds of site that are worth quantizing there.
        activation_dtypes: the formats in which it computes with activations.
        weight_dtypes: those that it takes weights in.
        min_gemm_dim: a product of [M, K] and [K, N] stays float where K or N is smaller; None: no limit.
        opset: the ONNX opset to write.
        unsigned_activations: where the same INT8 values are stored as UINT8 with zero point 128: nowhere, where they
            feed a product with a weight, or everywhere.
    """

    name: str
    float_dtype: FloatDtype
    site_kinds: frozenset[SiteKind]
    activation_dtypes: frozenset[str] = frozenset({"int8"})
    weight_dtypes: frozenset[str] = frozenset({"int8"})
    min_gemm_dim: int | None = None
    opset: int = 20
    unsigned_activations: Literal["none", "weighted", "all"] = "none"

    def gemm_reason(self, k: int, n: int) -> str | None:
        """Why a product of [M, k] and [k, n] stays float on this target; None where it may be quantized."""
        if self.min_gemm_dim is None or min(k, n) >= self.min_gemm_dim:
            return None
        axis, size = ("K", k) if k < self.min_gemm_dim else ("N", n)
        return f"{axis} = {size} is below {self.min_gemm_dim}: slower quantized than float on {self.name}"
