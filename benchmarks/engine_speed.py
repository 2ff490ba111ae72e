"""Speed and accuracy of INT8 files beside ONNX Runtime, its dynamic quantization and NNCF, interleaved in one run.

    python benchmarks/engine_speed.py [ROUNDS]

MiniLM, one thread, twelve shapes; each shape has ROUNDS rounds, fewer where a round takes seconds. ONNX Runtime's own
files run in its sessions as it makes them; that of its dynamic quantization also as one of our engines. Then where the
time of OpenVINO's engines goes, by its own counters, and what each file scores on all of STS-B dev, paired with float.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import openvino
import torch
from common import calibrated, heading, minilm, stsb
from peers import nncf_model

from quantizer.engines import BuildOptions, build_engine, interleaved_latency, load_engine
from quantizer.engines.openvino.inspect import observed_layers
from quantizer.export.exporter import export_onnx
from quantizer.tasks import Run, Task

SHAPES = tuple((batch, sequence) for batch in (1, 8, 32) for sequence in (16, 64, 128, 512))
COUNTED = ((8, 128), (32, 512))
"""The shapes at which time is told by kind of layer."""
BASE, DYNAMIC, NNCF = "ONNX Runtime FP32", "ONNX Runtime, quantize_dynamic", "OpenVINO, NNCF INT8"
OURS, EVERY, OURS_ORT = "ours, OpenVINO", "ours, OpenVINO, every site", "ours, ONNX Runtime"
REBUILT = "ONNX Runtime, quantize_dynamic, our engine"
PAIRS = ((OURS, BASE), (OURS, NNCF), (EVERY, NNCF), (OURS_ORT, BASE), (OURS_ORT, DYNAMIC), (OURS_ORT, REBUILT))
_TOKENS = 2048
"""Tokens up to which a shape gets all rounds."""

Engine = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]


def dynamic_file(path: Path, target: Path) -> Path:
    """ONNX Runtime's dynamic quantization: weights per channel, ranges of activations at run time."""
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(path, target, per_channel=True)
    return target


def compiled(path: Path, **settings: object) -> openvino.CompiledModel:
    """A file in OpenVINO with the settings of our engines."""
    shared = {"INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    return openvino.Core().compile_model(path, "CPU", shared | settings)


def openvino_engine(path: Path, **settings: object) -> Engine:
    """Ours takes no .xml."""
    model = compiled(path, **settings)
    names = [port.get_any_name() for port in model.inputs]
    outputs = [port.get_any_name() for port in model.outputs]
    request = model.create_infer_request()

    def run(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        results = request.infer({name: arrays[name] for name in names}, share_inputs=True)
        return {name: np.asarray(results[place]) for place, name in enumerate(outputs)}

    return run


def files(model: torch.nn.Module, task: Task, folder: Path) -> dict[str, Path]:
    """The file of each engine, all calibrated on the same sentences."""
    quantizers = {
        EVERY: {"backend": "openvino", "sites": {"residual_add": True}},
        OURS: {"backend": "openvino"},
        OURS_ORT: {"backend": "onnxruntime"},
    }
    paths = {BASE: export_onnx(model, folder / "float.onnx", task.example(), opset=20, dtype=torch.float32)}
    paths[DYNAMIC] = dynamic_file(paths[BASE], folder / "dynamic.onnx")
    paths[NNCF] = folder / "nncf.xml"
    openvino.save_model(
        nncf_model(paths[BASE], task.batches(stsb("train", 64)), matmuls=True), paths[NNCF], compress_to_fp16=False
    )
    for place, (name, config) in enumerate(quantizers.items()):
        quantizer = calibrated(model, task, **config)
        paths[name] = quantizer.export(quantizer.quantize(model), folder / f"ours{place}.onnx", task.example())
    return paths


def plain_session(path: Path) -> Engine:
    """ONNX Runtime as its manual runs a file, on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names, outputs = [given.name for given in session.get_inputs()], [made.name for made in session.get_outputs()]
    return lambda arrays: dict(zip(outputs, session.run(outputs, {name: arrays[name] for name in names}), strict=True))


def loaded(paths: dict[str, Path]) -> dict[str, Engine]:
    """All of them on one thread."""

    def built(name: str) -> Engine:
        engine = build_engine("onnxruntime", paths[name], paths[name].with_suffix(".engine"), BuildOptions()).path
        return load_engine("onnxruntime", engine, threads=1)

    return {
        BASE: plain_session(paths[BASE]),
        "OpenVINO FP32": load_engine("openvino", paths[BASE], threads=1),
        DYNAMIC: plain_session(paths[DYNAMIC]),
        REBUILT: built(DYNAMIC),
        NNCF: openvino_engine(paths[NNCF]),
        EVERY: load_engine("openvino", paths[EVERY], threads=1),
        OURS: load_engine("openvino", paths[OURS], threads=1),
        OURS_ORT: built(OURS_ORT),
    }


def speed(engines: dict[str, Engine], task: Task, rounds: int) -> None:
    """A line an engine, and then how the pairs stand over all shapes."""
    print("Speed-up over ONNX Runtime FP32, of medians of one interleaved run; its own time in ms.\n")
    medians: dict[str, list[float]] = {name: [] for name in engines}
    for batch, sequence in SHAPES:
        arrays = {name: np.asarray(tensor) for name, tensor in task.random_batch(batch, sequence).items()}
        calls = {name: partial(engine, arrays) for name, engine in engines.items()}
        fewer = max(5, rounds * _TOKENS // (batch * sequence))
        for name, seconds in interleaved_latency(calls, rounds=min(rounds, fewer), warmup=2).items():
            medians[name].append(statistics.median(seconds) * 1000)
    print("| engine | " + " | ".join(f"{b} x {s}" for b, s in SHAPES) + " |")
    print("|---|" + "---|" * len(SHAPES))
    print(f"| {BASE}, ms | " + " | ".join(f"{ms:.1f}" for ms in medians[BASE]) + " |")
    for name in [name for name in engines if name != BASE]:
        ratios = _ratios(medians, BASE, name)
        print(f"| {name} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    print("\n| pair | median over the shapes | least | most |\n|---|---|---|---|")
    for one, other in PAIRS:
        ratios = _ratios(medians, other, one)
        least, most = (f"{ratio:.3f} ({b} x {s})" for ratio, (b, s) in (_end(ratios, min), _end(ratios, max)))
        print(f"| {one} / {other} | {statistics.median(ratios):.3f} | {least} | {most} |", flush=True)


def _ratios(medians: dict[str, list[float]], slow: str, fast: str) -> list[float]:
    return [a / b for a, b in zip(medians[slow], medians[fast], strict=True)]


def _end(ratios: list[float], choose: Callable[[list[float]], float]) -> tuple[float, tuple[int, int]]:
    return choose(ratios), SHAPES[ratios.index(choose(ratios))]


def counters(paths: dict[str, Path], task: Task, batch: int, sequence: int) -> None:
    """Time by kind of layer and precision, as OpenVINO counts it."""
    arrays = {name: np.asarray(tensor) for name, tensor in task.random_batch(batch, sequence).items()}
    columns: dict[str, dict[str, float]] = {}
    for name in (NNCF, OURS, EVERY):
        model = compiled(paths[name], PERF_COUNT=True)
        given = {port.get_any_name(): arrays[port.get_any_name()] for port in model.inputs}
        columns[name] = defaultdict(float)
        for layer in observed_layers(model, given):
            columns[name][f"{layer.type}, {layer.precision}, writes {layer.writes}"] += (layer.time_us or 0.0) / 1000
    print(f"\n{batch} x {sequence}, ms by kind of layer, as OpenVINO counts them\n")
    print("| layer | " + " | ".join(columns) + " |\n|---|" + "---|" * len(columns))
    kinds = {
        kind: max(column.get(kind, 0.0) for column in columns.values()) for found in columns.values() for kind in found
    }
    for kind in sorted((kind for kind, most in kinds.items() if most >= 0.05), key=lambda kind: -kinds[kind]):
        print(f"| {kind} | " + " | ".join(f"{column.get(kind, 0.0):.1f}" for column in columns.values()) + " |")
    print("| all | " + " | ".join(f"{sum(column.values()):.1f}" for column in columns.values()) + " |", flush=True)


def accuracy(engines: dict[str, Engine], task: Task) -> None:
    """Spearman's correlation on dev, and its difference to float with a paired interval."""
    rows = stsb("dev")

    def runs(engine: Engine) -> Run:
        return lambda batch: engine({name: np.asarray(tensor) for name, tensor in batch.items()})

    base = task.predict(runs(engines[BASE]), rows)
    print(f"\nSTS-B dev, float {task.score(base, rows):.4f}\n\n| engine | to float | 95% | paired |\n|---|---|---|---|")
    for name in (DYNAMIC, NNCF, OURS, EVERY, OURS_ORT):
        found = task.predict(runs(engines[name]), rows)
        low, high = task.difference_interval(base, found, rows, 1000)
        paired = ", ".join(f"{key} {value:.4f}" for key, value in task.paired(base, found).items())
        lost = task.score(found, rows) - task.score(base, rows)
        print(f"| {name} | {lost:+.4f} | [{low:+.4f}, {high:+.4f}] | {paired} |", flush=True)


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    model, task = minilm()
    print(heading("Engine speed, MiniLM-L6, one thread"))
    with tempfile.TemporaryDirectory() as folder:
        paths = files(model, task, Path(folder))
        engines = loaded(paths)
        speed(engines, task, rounds)
        for batch, sequence in COUNTED:
            counters(paths, task, batch, sequence)
        accuracy(engines, task)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
