"""TensorRT-RTX: TensorRT's rules, and engines that are built ahead of time without a GPU."""

from __future__ import annotations

from dataclasses import replace

from quantizer.targets.profiles import profiles
from quantizer.targets.tensorrt import TENSORRT

__all__ = ["RTX_MAGIC", "TENSORRT_RTX"]

RTX_MAGIC = b"vtrt"
"""How its engines begin."""

# Its parser (1.7.1) read an opset that TensorRT is not documented for, and the engine was built.
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
    )
)
