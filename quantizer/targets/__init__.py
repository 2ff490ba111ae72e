"""Target profiles: which types, granularity, opset and site kinds each backend wants, and its limits."""

from __future__ import annotations

from importlib import import_module

from quantizer.targets.base import AttentionLimits
from quantizer.targets.base import FloatDtype
from quantizer.targets.base import SiteKind
from quantizer.targets.base import TargetProfile
from quantizer.targets.graph_rules import GraphRules
from quantizer.targets.profiles import profile
from quantizer.targets.profiles import profiles

__all__ = ["AttentionLimits", "FloatDtype", "GraphRules", "SiteKind", "TargetProfile", "profile", "profiles"]

# Importing a profile's file registers it; messages list the names in this order.
for _file in ("tensorrt", "tensorrt_rtx", "openvino", "onnxruntime"):
    import_module(f"{__name__}.{_file}")
