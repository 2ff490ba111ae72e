"""Engines: build from an ONNX file, load, run on numpy arrays, measure."""

from __future__ import annotations

from quantizer.common.old_paths import old_names
from quantizer.engines.backends import backend
from quantizer.engines.backends import backends
from quantizer.engines.backends import build_engine
from quantizer.engines.backends import inspect_engine
from quantizer.engines.backends import load_engine
from quantizer.engines.base import Array
from quantizer.engines.base import Backend
from quantizer.engines.base import BuildOptions
from quantizer.engines.base import BuildResult
from quantizer.engines.base import Engine
from quantizer.engines.base import Progress
from quantizer.engines.base import TensorSpec
from quantizer.engines.detect_backend import detect_backend
from quantizer.engines.inspection.check_precision import check_precision
from quantizer.engines.inspection.inspect_engine import inspect_file
from quantizer.engines.inspection.inspect_engine import observe_engine
from quantizer.engines.inspection.inspect_engine import runs_here
from quantizer.engines.inspection.inspection import Inspection
from quantizer.engines.inspection.inspection import Layer
from quantizer.engines.inspection.inspection import PrecisionShare
from quantizer.engines.inspection.onnx_graph import graph_inspection
from quantizer.engines.measure.benchmark import PeakMemory
from quantizer.engines.measure.benchmark import interleaved_latency
from quantizer.engines.measure.benchmark import medians
from quantizer.engines.measure.benchmark import peak_memory_mib
from quantizer.engines.onnxruntime import engine as _onnxruntime
from quantizer.engines.openvino import engine as _openvino
from quantizer.engines.tensorrt import engine as _tensorrt
from quantizer.engines.torch_engine import backend as _torch

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

__getattr__ = old_names(__name__, {"backend_of": "detect_backend"})
