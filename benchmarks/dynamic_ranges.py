"""Ranges at run time beside ranges of calibration: what they lose and how fast they are, in both engines of CPUs.

    python benchmarks/dynamic_ranges.py [ROUNDS]

MiniLM, one thread. Every INT8 file has the same kinds of weights, per channel. ONNX Runtime's own dynamic quantization
(``quantize_dynamic``) is built as one of our engines; the exporter's shapes are taken out of its input first, because
it fails on them. SQNR and Spearman are of STS-B dev; latencies are ratios of one interleaved run for each library.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch
from common import calibrated, heading, minilm, stsb

from quantizer.engines import BuildOptions, Engine, build_engine, interleaved_latency, load_engine
from quantizer.export.exporter import export_onnx
from quantizer.tasks import Predictions, Task

SHAPES = ((1, 16), (1, 128), (8, 128))
DYNAMIC = {"ranges": "dynamic"}
CONFIGS: dict[str, dict[str, object]] = {
    "static": {},
    "dynamic, plain": {"preset": "plain", "activations": DYNAMIC},
    "dynamic": {"activations": DYNAMIC},
}
FLOAT, THEIRS = "float", "quantize_dynamic"


def their_file(path: Path, target: Path) -> Path:
    """ONNX Runtime's dynamic quantization of the same sites."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(path)
    del model.graph.value_info[:]
    options = {"op_types_to_quantize": ["MatMul", "Gemm"], "weight_type": QuantType.QInt8}
    quantize_dynamic(model, target, per_channel=True, **options)
    return target


def engines(backend: str, model: torch.nn.Module, task: Task, folder: Path) -> tuple[dict[str, Engine], dict[str, str]]:
    """The engines of one library, and how far each plan's proxy is from its engine, in dB."""
    paths = {FLOAT: export_onnx(model, folder / "float.onnx", task.example(), opset=20, dtype=torch.float32)}
    if backend == "onnxruntime":
        paths[THEIRS] = their_file(paths[FLOAT], folder / "theirs.onnx")
    rows, agreement = stsb("dev", 200), {}
    found: dict[str, Engine] = {}
    for name, config in CONFIGS.items():
        quantizer = calibrated(model, task, backend=backend, **config)
        frozen = quantizer.quantize(model)
        paths[name] = quantizer.export(frozen, folder / f"{name.replace(', ', '-')}.onnx", task.example())
        found[name] = _built(backend, paths[name])
        expected = task.predict(lambda batch, frozen=frozen: frozen(**batch), rows)
        agreement[name] = f"{task.paired(expected, predicted(found[name], task, rows))['sqnr_db']:.1f}"
    others = {name: _built(backend, path) for name, path in paths.items() if name not in found}
    return {**others, **found}, agreement


def _built(backend: str, path: Path) -> Engine:
    return load_engine(
        backend, build_engine(backend, path, path.with_suffix(".engine"), BuildOptions()).path, threads=1
    )


def predicted(engine: Engine, task: Task, rows: list[object]) -> Predictions:
    """What an engine says of rows."""
    return task.predict(lambda batch: engine({name: np.asarray(value) for name, value in batch.items()}), rows)


def speed_ups(found: dict[str, Engine], task: Task, rounds: int) -> dict[str, list[str]]:
    """The median of the ratios of the float engine's time to each engine's, at each shape."""
    ratios: dict[str, list[str]] = {name: [] for name in found}
    for batch, sequence in SHAPES:
        arrays = {name: np.asarray(value) for name, value in task.random_batch(batch, sequence).items()}
        calls = {name: partial(engine, arrays) for name, engine in found.items()}
        times = interleaved_latency(calls, rounds=max(10, rounds // batch), warmup=2)
        for name, seconds in times.items():
            ratio = statistics.median(slow / fast for slow, fast in zip(times[FLOAT], seconds, strict=True))
            ratios[name].append(f"{ratio:.2f}")
    return ratios


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    model, task = minilm()
    rows = stsb("dev")
    base = task.predict(lambda batch: model(**batch), rows)
    shapes = " | ".join(f"{batch} x {sequence}" for batch, sequence in SHAPES)
    print(heading("Ranges at run time, MiniLM-L6, one thread"))
    for backend in ("onnxruntime", "openvino"):
        with tempfile.TemporaryDirectory() as folder:
            found, agreement = engines(backend, model, task, Path(folder))
            ratios = speed_ups(found, task, rounds)
            print(f"{backend}, speed-up over its FP32; Spearman of the float model {task.score(base, rows):.4f}\n")
            print(f"| file | {shapes} | SQNR, dB | Spearman, to float | proxy to engine, dB |\n|---|" + "---|" * 6)
            for name, engine in found.items():
                given = predicted(engine, task, rows)
                lost = task.score(given, rows) - task.score(base, rows)
                facts = [*ratios[name], f"{task.paired(base, given)['sqnr_db']:.1f}", f"{lost:+.4f}"]
                print(f"| {name} | " + " | ".join([*facts, agreement.get(name, "-")]) + " |", flush=True)
        print()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
