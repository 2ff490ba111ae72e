"""A tiny classifier, quantized in each way that the format of compressed-tensors describes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from helpers import batch, tiny
from torch import nn

from quantizer import Quantizer, QuantizerConfig

_LINEAR = {"matmul": False, "residual_add": False, "embedding": False}
_QUERY_IN_4_BITS = [{"sites": ["**.query.**"], "activations": "float", "weights": "int4", "block_size": 16}]

KINDS: Mapping[str, dict[str, Any]] = {
    "symmetric": {"backend": "openvino"},
    "zero points": {"backend": "onnxruntime", "activations": {"zero_point": True}, "bias_correction": True},
    "one scale": {"backend": "torch", "weights": {"granularity": "per_tensor"}},
    "fp8": {"backend": "tensorrt", "dtype": "fp8"},
    "dynamic": {"backend": "onnxruntime", "activations": {"ranges": "dynamic"}},
    "int8 weights": {"backend": "openvino", "formats": [{"sites": ["**"], "activations": "float", "weights": "int8"}]},
    "fp8 weights": {"backend": "tensorrt", "formats": [{"sites": ["**"], "activations": "float", "weights": "fp8"}]},
    "mixed": {"backend": "openvino", "formats": _QUERY_IN_4_BITS, "exclude": {"names": ["classifier"]}},
}
"""Configurations by kind, with the linear layers alone, so that the format can express all sites."""


def inputs() -> dict[str, Any]:
    """A batch of padded texts."""
    return batch("bert-classification", padded=True)


@cache
def quantized(kind: str) -> tuple[nn.Module, nn.Module, Quantizer]:
    """A model, its frozen proxy and the quantizer, made once per process."""
    model = tiny("bert-classification")
    quantizer = Quantizer(QuantizerConfig(**{"preset": "plain", "sites": _LINEAR, **KINDS[kind]}))
    quantizer.calibrate(model, [inputs(), batch("bert-classification", seed=1)], progress=False)
    return model, quantizer.quantize(model), quantizer
