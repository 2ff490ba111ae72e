"""Target profiles: the types, granularity, opset, kinds of site and limits of each backend."""

from __future__ import annotations

from importlib import import_module

from quantizer.plan.targets.base import (
    AUTO,
    AttentionLimits,
    FloatDtype,
    GraphRules,
    SiteKind,
    TargetProfile,
    profile,
    profiles,
)

__all__ = ["AUTO", "AttentionLimits", "FloatDtype", "GraphRules", "SiteKind", "TargetProfile", "profile", "profiles"]

# Importing the file of a profile registers it; messages list the names in this order.
for _module in ("tensorrt", "openvino", "onnxruntime", "torch"):
    import_module(f"{__name__}.{_module}")
