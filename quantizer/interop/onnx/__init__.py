"""Float ONNX files as torch modules: see ``from_onnx``."""

from __future__ import annotations
