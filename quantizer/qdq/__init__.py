"""Read-only questions about a graph with Q/DQ nodes, in the words of ``onnx_ir``."""

from __future__ import annotations
