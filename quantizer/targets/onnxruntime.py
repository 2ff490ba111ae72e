"""ONNX Runtime on a CPU: unsigned activations, and float attention."""

from __future__ import annotations

from quantizer.targets.base import TargetProfile
from quantizer.targets.registry import profiles

__all__ = ["ONNXRUNTIME"]

ONNXRUNTIME = profiles.add("onnxruntime")(
    TargetProfile(
        name="onnxruntime",
        float_dtype="float32",
        # Its fused integer kernels take U8 activations; with S8 half of the products stay behind a DequantizeLinear.
        unsigned_activations="all",
        activation_dtypes=frozenset({"int8", "uint8"}),
        weight_dtypes=frozenset({"int8", "int4"}),
        # Quantized attention matmuls and adds gained nothing there.
        site_kinds=frozenset({"linear", "conv", "embedding"}),
    )
)
