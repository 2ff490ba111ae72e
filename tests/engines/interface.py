"""What this package calls of TensorRT's Python API, and what bindings have of it.

``python tests/engines/interface.py PATH/TO/tensorrt.so`` prints the interface of bindings as JSON, one of the entries
of ``tensorrt_interface.json``. The bindings of TensorRT itself link libraries that come from the vendor's own server;
to read signatures they may be empty ones. With the nine functions that the bindings import (``nm -D`` lists them, all
plain C) in a file stub.c:

    for name in nvinfer nvonnxparser nvinfer_plugin; do gcc -shared -fPIC -o lib$name.so.10 stub.c; done
    LD_LIBRARY_PATH=. python tests/engines/interface.py tensorrt_bindings/tensorrt.so
"""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

CALLED = {
    "Builder": (
        "__init__",
        "build_serialized_network",
        "create_builder_config",
        "create_network",
        "create_optimization_profile",
    ),
    "BuilderFlag": ("REFIT_IDENTICAL", "STRIP_PLAN"),
    "DataType": ("FLOAT", "HALF", "INT8", "FP8"),
    "EngineInspector": ("execution_context", "get_engine_information"),
    "IBuilderConfig": ("add_optimization_profile", "profiling_verbosity", "progress_monitor", "set_flag"),
    "ICudaEngine": (
        "create_engine_inspector",
        "create_execution_context",
        "get_tensor_dtype",
        "get_tensor_mode",
        "get_tensor_name",
        "get_tensor_shape",
        "num_io_tensors",
        "refittable",
    ),
    "IExecutionContext": ("execute_async_v3", "get_tensor_shape", "profiler", "set_input_shape", "set_tensor_address"),
    "ILayer": ("get_output", "name", "num_outputs"),
    "ILogger": ("ERROR", "WARNING", "log"),
    "INetworkDefinition": ("get_input", "get_layer", "num_inputs", "num_layers"),
    "IOptimizationProfile": ("set_shape",),
    "IProfiler": ("__init__", "report_layer_time"),
    "IProgressMonitor": ("phase_finish", "phase_start", "step_complete"),
    "ITensor": ("dtype", "get_dimension_name", "name", "shape"),
    "LayerInformationFormat": ("JSON",),
    "NetworkDefinitionCreationFlag": ("STRONGLY_TYPED",),
    "OnnxParser": ("__init__", "get_error", "num_errors", "parse_from_file"),
    "OnnxParserRefitter": ("__init__", "get_error", "num_errors", "refit_from_file"),
    "ParserError": ("desc", "node_name", "node_operator"),
    "ProfilingVerbosity": ("DETAILED",),
    "Refitter": ("__init__", "get_missing_weights", "refit_cuda_engine"),
    "Runtime": ("__init__", "deserialize_cuda_engine"),
    "TensorIOMode": ("INPUT",),
}
"""Classes and their members, of all modules of the family."""

TIMED = {
    "IBuilderConfig": ("create_timing_cache", "get_timing_cache", "set_timing_cache"),
    "ITimingCache": ("serialize",),
}
"""Called of TensorRT only."""

AHEAD = {"ComputeCapability": ("SM89",), "IBuilderConfig": ("num_compute_capabilities", "set_compute_capability")}
"""Called of TensorRT-RTX only."""


def interface(module: Any, called: dict[str, tuple[str, ...]]) -> dict[str, list[str]]:
    """The parameters of each member that there is, self left out; an empty list for what is no method."""
    found = {}
    for owner, members in called.items():
        for member in members:
            if hasattr(getattr(module, owner, None), member):
                found[f"{owner}.{member}"] = _parameters(getattr(getattr(module, owner), member), member)
    return found


def _parameters(value: Any, member: str) -> list[str]:
    """From the first signature in a docstring: the bindings have no other description of themselves."""
    lines = (getattr(value, "__doc__", None) or "").splitlines()
    line = next((line for line in lines if f"{member}(self" in line), "")
    inside = line.partition("(self")[2].rpartition(") ->")[0]
    return [part.partition(":")[0].strip() for part in inside.split(",")[1:] if ":" in part]


def load(path: str) -> Any:
    """Bindings from their shared library, without their package."""
    spec = importlib.util.spec_from_file_location("tensorrt", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    bindings = load(sys.argv[1])
    print(json.dumps({**interface(bindings, CALLED), **interface(bindings, TIMED)}, indent=1))
