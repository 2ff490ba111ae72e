"""Speed of one INT8 file against ONNX Runtime FP32, OpenVINO FP32 and NNCF INT8, interleaved in one run.

python benchmarks/engine_speed.py [ROUNDS]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

import nncf
import numpy as np
import openvino
import torch
from common import calibrated
from common import heading
from common import minilm
from common import stsb

from quantizer.engines import interleaved_latency
from quantizer.engines import load_engine
from quantizer.export import export_onnx

SHAPES = ((1, 32), (1, 128), (8, 128))


def nncf_int8(float_onnx: Path, batches: list[dict[str, torch.Tensor]], target: Path) -> None:
    """NNCF's post-training quantization with its transformer preset, on the same calibration sentences."""
    model = openvino.Core().read_model(float_onnx)
    dataset = nncf.Dataset(batches, lambda batch: {name: tensor.numpy() for name, tensor in batch.items()})
    quantized = nncf.quantize(model, dataset, model_type=nncf.ModelType.TRANSFORMER, subset_size=len(batches))
    openvino.save_model(quantized, target, compress_to_fp16=False)


def openvino_call(path: Path) -> partial[object]:
    compiled = openvino.Core().compile_model(
        path, "CPU", {"INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    )
    return partial(compiled)


def main(rounds: int) -> None:
    torch.set_num_threads(2)
    model, task = minilm()
    batches = task.batches(stsb("train", 64))
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / f"{name}.onnx" for name in ("float", "linears_matmuls", "default", "all")}
        export_onnx(model, paths["float"], task.example(), opset=20, dtype=torch.float32)
        for name, residual in (("linears_matmuls", False), ("default", "auto"), ("all", True)):
            quantizer = calibrated(model, task, backend="openvino", sites={"residual_add": residual})
            quantizer.export(quantizer.quantize(model), paths[name], task.example())
        quantizer = calibrated(model, task, backend="onnxruntime")
        paths["onnxruntime"] = quantizer.export(
            quantizer.quantize(model), Path(folder) / "onnxruntime.onnx", task.example()
        )
        nncf_path = Path(folder) / "nncf.xml"
        nncf_int8(paths["float"], batches, nncf_path)
        engines = {
            "ONNX Runtime FP32": load_engine("onnxruntime", paths["float"], threads=1),
            "OpenVINO FP32": load_engine("openvino", paths["float"], threads=1),
            "OpenVINO, NNCF INT8": openvino_call(nncf_path),
            "ours, linears and matmuls": load_engine("openvino", paths["linears_matmuls"], threads=1),
            "ours, default (residual auto)": load_engine("openvino", paths["default"], threads=1),
            "ours, every site": load_engine("openvino", paths["all"], threads=1),
            "ours, ONNX Runtime": load_engine("onnxruntime", paths["onnxruntime"], threads=1),
        }
        print(heading("Engine speed, MiniLM-L6, one thread"))
        print("ratio of medians to ONNX Runtime FP32 in one interleaved run; in brackets the median in ms\n")
        print("| engine | " + " | ".join(f"{b} x {s}" for b, s in SHAPES) + " |")
        print("|---|" + "---|" * len(SHAPES))
        medians: dict[str, list[float]] = {name: [] for name in engines}
        for batch, sequence in SHAPES:
            arrays = {name: np.asarray(tensor) for name, tensor in task.random_batch(batch, sequence).items()}
            samples = interleaved_latency(
                {name: partial(engine, arrays) for name, engine in engines.items()}, rounds=rounds
            )
            for name, seconds in samples.items():
                medians[name].append(statistics.median(seconds) * 1000)
        for name, row in medians.items():
            base = medians["ONNX Runtime FP32"]
            cells = " | ".join(f"{b / ms:.2f} ({ms:.1f})" for ms, b in zip(row, base, strict=True))
            print(f"| {name} | {cells} |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
