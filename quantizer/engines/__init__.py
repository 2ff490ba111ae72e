"""Engines: build from an ONNX file, load, run on arrays or tensors, inspect and measure."""

from __future__ import annotations

from quantizer.engines import onnxruntime as _onnxruntime
from quantizer.engines import tensorrt as _tensorrt
from quantizer.engines.backends import (
    backend,
    backends,
    build_engine,
    check_precision,
    detect_backend,
    inspect_engine,
    inspect_file,
    load_engine,
    observe_engine,
    runs_here,
)
from quantizer.engines.base import Array, Backend, BuildOptions, BuildResult, Engine, GraphWriter, InputSizes, Progress
from quantizer.engines.measure import PeakMemory, interleaved_latency, medians, peak_memory_mib
from quantizer.engines.onnx_graph import graph_inspection
from quantizer.engines.openvino import engine as _openvino
from quantizer.engines.torch_engine import backend as _torch
from quantizer.export.qdq.onnx_file import TensorSpec
from quantizer.utils.records import Inspection, Layer, PrecisionShare

__all__ = [
    "Array",
    "Backend",
    "BuildOptions",
    "BuildResult",
    "Engine",
    "GraphWriter",
    "InputSizes",
    "Inspection",
    "Layer",
    "PeakMemory",
    "PrecisionShare",
    "Progress",
    "TensorSpec",
    "backend",
    "detect_backend",
    "backends",
    "build_engine",
    "check_precision",
    "graph_inspection",
    "inspect_engine",
    "inspect_file",
    "interleaved_latency",
    "load_engine",
    "medians",
    "observe_engine",
    "peak_memory_mib",
    "runs_here",
]

# Importing a backend's file registers it.
del _onnxruntime, _openvino, _tensorrt, _torch
