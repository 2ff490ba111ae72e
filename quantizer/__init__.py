"""INT8 for PyTorch models on TensorRT and CPU engines: calibrated, measured, explained."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from quantizer.errors import require_supported

if TYPE_CHECKING:
    from quantizer import functional
    from quantizer.config import QuantizerConfig
    from quantizer.errors import QuantizerError
    from quantizer.integrations.hub import push_to_hub
    from quantizer.integrations.in_place import QATCalibrate
    from quantizer.pipeline.load import load, load_converted
    from quantizer.pipeline.quantize_model import QuantizedModel, quantize_model
    from quantizer.pipeline.task_pipeline import load_pipeline
    from quantizer.pipeline.time_groups import measure_latency_costs
    from quantizer.plan.compressed_tensors import write_compressed_tensors
    from quantizer.quantizer import Quantizer
    from quantizer.report.compare_shown import compare_runs
    from quantizer.tasks.from_onnx import from_onnx

__all__ = [
    "QATCalibrate",
    "QuantizedModel",
    "Quantizer",
    "QuantizerConfig",
    "QuantizerError",
    "compare_runs",
    "from_onnx",
    "functional",
    "load",
    "load_converted",
    "load_pipeline",
    "measure_latency_costs",
    "push_to_hub",
    "quantize_model",
    "write_compressed_tensors",
]

__version__ = "0.1.0"

_MODULE_OF = {
    "QATCalibrate": "quantizer.integrations.in_place",
    "QuantizedModel": "quantizer.pipeline.quantize_model",
    "Quantizer": "quantizer.quantizer",
    "QuantizerConfig": "quantizer.config",
    "QuantizerError": "quantizer.errors",
    "compare_runs": "quantizer.report.compare_shown",
    "from_onnx": "quantizer.tasks.from_onnx",
    "load": "quantizer.pipeline.load",
    "load_converted": "quantizer.pipeline.load",
    "load_pipeline": "quantizer.pipeline.task_pipeline",
    "measure_latency_costs": "quantizer.pipeline.time_groups",
    "push_to_hub": "quantizer.integrations.hub",
    "quantize_model": "quantizer.pipeline.quantize_model",
    "write_compressed_tensors": "quantizer.plan.compressed_tensors",
}

_RENAMED = {"measured_prices": "measure_latency_costs"}

# The check reads the metadata and does not import torch.
require_supported("torch")

if "torch" in sys.modules:
    # torch.jit can load a saved frozen model only if the operators of this package are registered.
    import_module("quantizer.numerics.torch_operators")


def __getattr__(name: str) -> Any:
    """Import a public name at its first use.

    Importing torch takes seconds, and ``quantizer --help`` and errors of a configuration do not need it.
    """
    if name == "functional":
        return import_module("quantizer.functional")
    if name not in _MODULE_OF:
        renamed = f"; it is {_RENAMED[name]} now" if name in _RENAMED else ""
        raise AttributeError(f"module 'quantizer' has no attribute {name!r}{renamed}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
