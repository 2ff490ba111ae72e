"""Time and size of ahead-of-time TensorRT-RTX builds of MiniLM: INT8 with an FP16 rest, against the FP32 graph.

python benchmarks/build_size.py [COMPUTE_CAPABILITY]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from common import calibrated, heading, minilm

from quantizer.engines import BuildOptions, build_engine
from quantizer.export.exporter import export_onnx


def main(capability: str) -> None:
    model, task = minilm()
    quantizer = calibrated(model, task, backend="tensorrt-rtx")
    options = BuildOptions(dynamic={"batch": (1, 8, 32), "sequence": (16, 128, 512)}, compute_capability=capability)
    print(heading(f"TensorRT-RTX for {capability}, MiniLM-L6, dynamic batch and sequence, built without a GPU"))
    print("| graph | ONNX MB | engine MB | seconds |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        paths = {"FP32": Path(folder) / "float.onnx", "INT8 with FP16 rest": Path(folder) / "int8.onnx"}
        export_onnx(model, paths["FP32"], task.example(), opset=20, dtype=torch.float32)
        quantizer.export(quantizer.quantize(model), paths["INT8 with FP16 rest"], task.example())
        for name, path in paths.items():
            built = build_engine("tensorrt-rtx", path, path.with_suffix(".engine"), options)
            print(f"| {name} | {path.stat().st_size / 1e6:.1f} | {built.size_bytes / 1e6:.1f} | {built.seconds:.1f} |")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "sm89")
