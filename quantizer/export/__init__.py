"""Q/DQ ONNX from a frozen proxy: torch's exporter, our translations, then graph passes."""

from __future__ import annotations

from quantizer.export.onnx_file import export_onnx

__all__ = ["export_onnx"]
