"""Read-only queries of a graph with Q/DQ nodes, in terms of ``onnx_ir``."""

from __future__ import annotations
