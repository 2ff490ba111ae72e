"""Layers of a TensorRT engine: its inspector's JSON, for engines built with detailed profiling verbosity.

The JSON is not documented as a format; what is not recognized here is ``unknown``, never guessed.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quantizer.engines.inspection.inspection import Layer, convolution_work, matmul_work
from quantizer.errors import EngineError

# Longest first: "FP8" is no part of another word, "Float" is.
_PRECISIONS = (
    ("bfloat16", "bf16"),
    ("bf16", "bf16"),
    ("e4m3", "fp8"),
    ("fp8", "fp8"),
    ("float8", "fp8"),
    ("fp4", "fp4"),
    ("int4", "int4"),
    ("int8", "int8"),
    ("half", "fp16"),
    ("fp16", "fp16"),
    ("float16", "fp16"),
    ("fp32", "fp32"),
    ("tf32", "fp32"),
    ("float", "fp32"),
    ("int32", "index"),
    ("int64", "index"),
    ("bool", "index"),
)
_PRODUCTS = (
    "gemm",
    "matrixmultiply",
    "matrix_multiply",
    "convolution",
    "correlation",
    "fullyconnected",
    "deconvolution",
)
_ROLES = (
    ("reformat", "reformat"),
    ("cast", "cast"),
    ("quantize", "quantizer"),
    ("softmax", "softmax"),
    ("shuffle", "move"),
    ("normalization", "normalization"),
)
_ONNX_LAYER = re.compile(r"\[ONNX Layer: ([^\]]*)\]")


def layers_from_json(text: str, times_us: Mapping[str, float] | None = None) -> list[Layer]:
    """Return the layers in ``EngineInspector.get_engine_information``'s result for ``LayerInformationFormat.JSON``."""
    try:
        entries = json.loads(text)["Layers"]
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(f"the engine's inspector gave no list of layers: {error!r}") from error
    if not all(isinstance(entry, Mapping) for entry in entries):
        raise EngineError(
            "the engine tells the names of its layers only: build it with detailed profiling verbosity, "
            "as this package does"
        )
    return list(_layers(entries, times_us or {}))


def _layers(entries: Sequence[Mapping[str, Any]], times_us: Mapping[str, float]) -> Iterator[Layer]:
    readers = defaultdict(list)
    for entry in entries:
        for tensor in entry.get("Inputs", []):
            readers[tensor.get("Name")].append(entry["Name"])
    for entry in entries:
        inputs = [_tensor(tensor) for tensor in entry.get("Inputs", [])]
        outputs = [_tensor(tensor) for tensor in entry.get("Outputs", [])]
        role = _role(entry)
        yield Layer(
            name=entry["Name"],
            type=str(entry.get("LayerType", "unknown")),
            role=role,
            precision=inputs[0][0] if inputs else "unknown",
            writes=outputs[0][0] if outputs else "unknown",
            nodes=tuple(dict.fromkeys(_ONNX_LAYER.findall(str(entry.get("Metadata", ""))))),
            readers=tuple(
                dict.fromkeys(name for tensor in entry.get("Outputs", []) for name in readers[tensor.get("Name")])
            ),
            multiply_adds=_work(entry, inputs, outputs) if role == "product" else None,
            time_us=times_us.get(entry["Name"]),
        )


def _role(entry: Mapping[str, Any]) -> str:
    kind, name = str(entry.get("LayerType", "")).lower(), str(entry["Name"]).lower()
    tactic = str(entry.get("TacticName", "")).lower()
    if "mha" in name or "mha" in tactic or kind == "attention":
        return "attention"
    if any(word in kind for word in _PRODUCTS) or "gemm" in tactic:
        return "product"
    if kind == "elementwise" and "add" in name:
        return "addition"
    return next((role for word, role in _ROLES if word in kind), "")


def _tensor(entry: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    """Return precision and shape; some releases write type and layout in one field, some in two."""
    words = f"{entry.get('Format/Datatype', '')} {entry.get('Datatype', '')} {entry.get('Format', '')}".lower()
    precision = next((precision for word, precision in _PRECISIONS if word in words), "unknown")
    return precision, tuple(int(size) for size in entry.get("Dimensions", []))


def _work(
    entry: Mapping[str, Any],
    inputs: Sequence[tuple[str, tuple[int, ...]]],
    outputs: Sequence[tuple[str, tuple[int, ...]]],
) -> int | None:
    """Return the multiply-adds at the shapes of the execution context; None without one, where sizes are -1."""
    if not inputs or not outputs or min((*inputs[0][1], *outputs[0][1]), default=-1) < 0:
        return None
    count = entry.get("Weights", {}).get("Count") if isinstance(entry.get("Weights"), Mapping) else None
    if count and len(outputs[0][1]) > 2 and "conv" in str(entry.get("LayerType", "")).lower():
        return convolution_work((int(count),), outputs[0][1][1], outputs[0][1])
    return matmul_work(inputs[0][1], outputs[0][1])
