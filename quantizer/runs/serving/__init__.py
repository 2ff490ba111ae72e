"""Files with which others serve an engine, beside it in its folder.

triton/NAME/        a model repository of NVIDIA's Triton: config.pbtxt, and 1/ with the file that it loads
run_on_gpu.sh       the check and the timing of a TensorRT engine with trtexec alone
gpu/                what it reads: inputs and expected outputs
"""

from __future__ import annotations

from quantizer.runs.serving.deliver import model_name, write_serving_files, write_triton_model
from quantizer.runs.serving.gpu_check import Expected
from quantizer.runs.serving.model_config import ServedEngine

__all__ = [
    "Expected",
    "ServedEngine",
    "model_name",
    "write_serving_files",
    "write_triton_model",
]
