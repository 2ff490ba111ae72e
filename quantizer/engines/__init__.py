"""Engines: build from an ONNX file, load, run on numpy arrays, measure."""

from __future__ import annotations

from quantizer.engines.backends import backend, backends, build_engine, inspect_engine, load_engine
from quantizer.engines.base import Array, Backend, BuildOptions, BuildResult, Engine, Progress, TensorSpec
from quantizer.engines.detect_backend import detect_backend
from quantizer.engines.inspection.inspect_engine import check_precision, inspect_file, observe_engine, runs_here
from quantizer.engines.inspection.inspection import Inspection, Layer, PrecisionShare
from quantizer.engines.inspection.onnx_graph import graph_inspection
from quantizer.engines.measure.benchmark import PeakMemory, interleaved_latency, medians, peak_memory_mib
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
