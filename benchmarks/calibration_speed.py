"""What a calibration pass costs beside a float pass, ours and others'; entropy's search; memory of many batches.

    python benchmarks/calibration_speed.py [ROUNDS]

MiniLM, 8 x 128, one thread. All passes are interleaved, but for NNCF, whose quantization cannot be had in parts: its
time for a few batches is divided by their number.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import torch
from common import call, heading, minilm, session_as_written
from peers import BatchReader, model_optimizer, nncf_model

from quantizer import Quantizer
from quantizer.engines import interleaved_latency, load_engine
from quantizer.export.exporter import export_onnx
from quantizer.observe.calibrators import make_calibrator
from quantizer.tasks import Batch
from quantizer.utils.child_process import child_environment

_CALIBRATORS = ("max", "percentile", "mse", "entropy")
_NNCF_BATCHES = 8
_BINS = 2048


def observing(model: torch.nn.Module, calibrator: str) -> torch.nn.Module:
    return Quantizer(preset="plain", backend="openvino", activations={"calibrator": calibrator}).calib(model)


def observing_model_optimizer(model: torch.nn.Module, batch: Batch) -> torch.nn.Module:
    from modelopt.torch.quantization.model_calib import enable_stats_collection

    quantized = model_optimizer(model, [batch], matmuls=True)
    enable_stats_collection(quantized)
    return quantized


def onnxruntime_pass(path: Path, folder: Path, batch: Batch, method: str) -> Callable[[], object]:
    """One batch through ONNX Runtime's calibrator of the operands of all matrix products."""
    from onnxruntime.quantization import CalibrationMethod
    from onnxruntime.quantization.calibrate import create_calibrator

    calibrator = create_calibrator(
        path, ["MatMul", "Gemm"], str(folder / f"{method}.onnx"), calibrate_method=CalibrationMethod[method]
    )
    # As it makes its own session, but with one thread.
    calibrator.infer_session = session_as_written(calibrator.augmented_model_path)
    return lambda: calibrator.collect_data(BatchReader([batch]))


def seconds_of(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def entropy_seconds(rounds: int) -> float:
    """The median time of the search over a full histogram."""
    values = torch.arange(1, _BINS + 1).repeat_interleave(3) / _BINS
    times = []
    for _ in range(rounds):
        calibrator = make_calibrator("entropy")
        calibrator.observe(values)
        times.append(seconds_of(calibrator.amax))
    return statistics.median(times)


_MEMORY = """
import resource, sys
import torch
from common import minilm
from quantizer import Quantizer

count, calibrator = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
model, task = minilm()
batches = (task.random_batch(1, 16, seed) for seed in range(count))
quantizer = Quantizer(preset="plain", backend="openvino", activations={"calibrator": calibrator})
quantizer.calibrate(model, batches, progress=False)
quantizer.plan
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def peak_mib(batches: int, calibrator: str) -> float:
    """The peak memory of a fresh process that calibrates on small batches."""
    command = [sys.executable, "-P", "-c", _MEMORY, str(batches), calibrator]
    environment = child_environment()
    environment["PYTHONPATH"] += f"{os.pathsep}{Path(__file__).resolve().parent}"
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout.split()[-1])


def passes(rounds: int) -> None:
    model, task = minilm()
    batch = task.random_batch(8, 128)
    arrays = {name: tensor.numpy() for name, tensor in batch.items()}
    # What the libraries print goes beside the table, not into it.
    with redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = export_onnx(model, folder / "float.onnx", task.example(), opset=20, dtype=torch.float32)
        actions: dict[str, tuple[str, Callable[[], object]]] = {
            "float, torch": ("float, torch", call(model, batch)),
            "float, ONNX Runtime": (
                "float, ONNX Runtime",
                partial(load_engine("onnxruntime", path, threads=1), arrays),
            ),
            "float, OpenVINO": ("float, OpenVINO", partial(load_engine("openvino", path, threads=1), arrays)),
            **{f"ours, {c}": ("float, torch", call(observing(model, c), batch)) for c in _CALIBRATORS},
            "Model Optimizer, max": ("float, torch", call(observing_model_optimizer(model, batch), batch)),
            **{
                f"ONNX Runtime, {method}": ("float, ONNX Runtime", onnxruntime_pass(path, folder, batch, method))
                for method in ("MinMax", "Percentile")
            },
        }
        samples = interleaved_latency({name: action for name, (_, action) in actions.items()}, rounds=rounds)
        seconds = {name: statistics.median(times) for name, times in samples.items()}
        base = {name: base for name, (base, _) in actions.items()}
        batches = [task.random_batch(8, 128, seed) for seed in range(_NNCF_BATCHES)]
        whole = seconds_of(partial(nncf_model, path, batches, matmuls=True))
        seconds["NNCF, whole quantization, a batch"] = whole / _NNCF_BATCHES
        base["NNCF, whole quantization, a batch"] = "float, OpenVINO"
    print("| pass | median ms | to torch's float pass | to its own library's float pass |\n|---|---|---|---|")
    for name, median in seconds.items():
        own = median / seconds[base[name]]
        print(f"| {name} | {median * 1000:.0f} | {median / seconds['float, torch']:.2f} | {own:.2f} |")


def main(rounds: int) -> None:
    # One core for all libraries: NNCF starts as many threads of OpenVINO as there are.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    print(heading("Calibration speed, MiniLM-L6, 8 x 128, one thread"))
    passes(rounds)
    print(f"\nentropy over {_BINS} bins: {1000 * entropy_seconds(rounds):.1f} ms\n")
    print("| calibrator | peak MiB, 10 batches | peak MiB, 1,000 batches |\n|---|---|---|")
    for calibrator in (*_CALIBRATORS, "auto"):
        print(f"| {calibrator} | {peak_mib(10, calibrator):.0f} | {peak_mib(1000, calibrator):.0f} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
