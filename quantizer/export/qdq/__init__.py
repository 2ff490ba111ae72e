"""Read-only queries of Q/DQ graphs in ``onnx_ir``, and readers of ONNX files."""

from __future__ import annotations
