"""Export of a frozen proxy as Q/DQ ONNX: torch's exporter, our translations, then graph passes."""

from __future__ import annotations

from quantizer.export.exporter import export_onnx, least_opset, require_exporter

__all__ = ["export_onnx", "least_opset", "require_exporter"]
