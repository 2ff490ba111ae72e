"""TensorRT-RTX: the rules of TensorRT, and engines built ahead of time without a GPU."""

from __future__ import annotations

from dataclasses import replace

from quantizer.targets.base import profiles
from quantizer.targets.tensorrt import TENSORRT

RTX_MAGIC = b"vtrt"
"""The first bytes of its engines."""

# Its parser (1.7.1) read an opset beyond TensorRT's documented range, and the engine was built.
_SEVERITIES = {**TENSORRT.graph_rules.severities, "opset-range": "warning"}

TENSORRT_RTX = profiles.add("tensorrt-rtx")(
    replace(
        TENSORRT,
        name="tensorrt-rtx",
        capabilities=frozenset({75, 80, 86, 89, 120, 121}),
        graph_rules=replace(TENSORRT.graph_rules, severities=_SEVERITIES),
        packages=("tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu13-libs"),
        file_magic=RTX_MAGIC,
        ahead_of_time=None,
        # Triton runs engines of TensorRT alone, which are built of the same ONNX file.
        triton=None if TENSORRT.triton is None else replace(TENSORRT.triton, takes=None, gpu_tool="tensorrt_rtx"),
    )
)
