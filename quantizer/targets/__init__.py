"""Target profiles: which types, granularity, opset and site kinds each backend wants, and its limits."""

from __future__ import annotations

from quantizer.targets import onnxruntime as _onnxruntime
from quantizer.targets import openvino as _openvino
from quantizer.targets import tensorrt as _tensorrt
from quantizer.targets import tensorrt_rtx as _tensorrt_rtx
from quantizer.targets.base import AttentionLimits
from quantizer.targets.base import FloatDtype
from quantizer.targets.base import SiteKind
from quantizer.targets.base import TargetProfile
from quantizer.targets.registry import profile
from quantizer.targets.registry import profiles

__all__ = ["AttentionLimits", "FloatDtype", "SiteKind", "TargetProfile", "profile", "profiles"]

# Importing a profile's file registers it.
del _onnxruntime, _openvino, _tensorrt, _tensorrt_rtx
