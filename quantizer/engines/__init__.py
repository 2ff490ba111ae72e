"""Engines: build one from an ONNX file, load it, run it on numpy arrays, time it."""

from __future__ import annotations

from quantizer.engines import onnxruntime as _onnxruntime
from quantizer.engines import openvino as _openvino
from quantizer.engines import tensorrt as _tensorrt
from quantizer.engines.base import Array
from quantizer.engines.base import Backend
from quantizer.engines.base import BuildOptions
from quantizer.engines.base import BuildResult
from quantizer.engines.base import Engine
from quantizer.engines.base import Progress
from quantizer.engines.base import TensorSpec
from quantizer.engines.benchmark import PeakMemory
from quantizer.engines.benchmark import interleaved_latency
from quantizer.engines.benchmark import medians
from quantizer.engines.benchmark import peak_memory_mib
from quantizer.engines.inspection import Inspection
from quantizer.engines.inspection import Layer
from quantizer.engines.inspection import PrecisionShare
from quantizer.engines.kind import backend_of
from quantizer.engines.observation import inspect_file
from quantizer.engines.observation import observe_engine
from quantizer.engines.observation import runs_here
from quantizer.engines.onnx_graph import graph_inspection
from quantizer.engines.registry import backend
from quantizer.engines.registry import backends
from quantizer.engines.registry import build_engine
from quantizer.engines.registry import inspect_engine
from quantizer.engines.registry import load_engine
from quantizer.engines.requirement import check_precision

__all__ = [
    "Array",
    "Backend",
    "BuildOptions",
    "BuildResult",
    "Engine",
    "Inspection",
    "Layer",
    "PeakMemory",
    "PrecisionShare",
    "Progress",
    "TensorSpec",
    "backend",
    "backend_of",
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
del _onnxruntime, _openvino, _tensorrt
