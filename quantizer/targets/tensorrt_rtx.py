"""TensorRT-RTX: TensorRT's rules, and engines that are built ahead of time without a GPU."""

from __future__ import annotations

from dataclasses import replace

from quantizer.targets.registry import profiles
from quantizer.targets.tensorrt import TENSORRT

__all__ = ["TENSORRT_RTX"]

TENSORRT_RTX = profiles.add("tensorrt-rtx")(
    replace(TENSORRT, name="tensorrt-rtx", capabilities=frozenset({75, 80, 86, 89, 120, 121}))
)
