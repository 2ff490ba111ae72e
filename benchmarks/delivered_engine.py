"""What ``quantize_model`` delivers with all defaults, called as users call it, beside other tools.

    python benchmarks/delivered_engine.py [--threads N] [--neighbor] [speed | grid | plans N]...

MiniLM, calibrated on 128 sentences in batches of 16. ``speed`` is the latency at four sizes over ONNX Runtime FP32 and
the SQNR on other sentences, ``grid`` the speed-up over our fastest float engine at sizes that nobody asked for, and
``plans N`` the decisions of N calls, each in a process of its own. All latencies are of one interleaved run.
``--neighbor`` keeps one core busy meanwhile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import torch
from common import heading, minilm, stsb
from engine_speed import dynamic_file
from peers import nncf_by_default

from quantizer import quantize_model
from quantizer.engines import interleaved_latency, medians
from quantizer.export.exporter import export_onnx
from quantizer.tasks.metrics import sqnr_db
from quantizer.utils.cpu import saturates

Call = Callable[[Mapping[str, torch.Tensor]], Any]
SIZES = ((1, 16), (1, 128), (8, 128), (32, 128))
GRID_BATCHES, GRID_TOKENS = (1, 4, 16, 64), (16, 64, 256)
BASE = "ONNX Runtime FP32"
_TOKENS, _MOST = 2**16, 200
"""The number of tokens and of rounds for each size, so that small ones get more rounds."""


def _data() -> tuple[torch.nn.Module, Any, list[Any]]:
    model, task = minilm()
    return model, task, task.batches(stsb("train", 64))


def _arrays(batch: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in batch.items()}


def _session(path: Path, threads: int) -> Call:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    return lambda batch: session.run(None, {name: batch[name].numpy() for name in names})[0]


def _openvino(path: Path, threads: int, precision: str) -> Call:
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": precision}
    model = openvino.Core().compile_model(path, "CPU", settings)
    request, names = model.create_infer_request(), [port.get_any_name() for port in model.inputs]
    return lambda batch: request.infer({name: batch[name].numpy() for name in names}, share_inputs=True)[0]


def _first(result: Any) -> np.ndarray:
    """Return the first output of any engine."""
    if hasattr(result, "shape"):
        return np.asarray(result)
    return np.asarray(next(iter(result.values())) if isinstance(result, Mapping) else result[0])


def _engines(threads: int, folder: Path) -> tuple[dict[str, Call], str]:
    """Return the engines by name, and a sentence on what was chosen."""
    model, task, batches = _data()
    plain = export_onnx(model, folder / "float.onnx", task.example(), opset=20, dtype=torch.float32)
    nncf = folder / "nncf.xml"
    quantized = nncf_by_default(plain, [_arrays(batch) for batch in batches], transformer=True)
    openvino.save_model(quantized, nncf, compress_to_fp16=False)
    ours = quantize_model(model, batches, threads=threads, progress=False)
    ort_backend = "onnxruntime-avx2" if saturates() else "onnxruntime"
    ort = quantize_model(model, batches, threads=threads, backend=ort_backend, progress=False)
    assert ours.record.choice is not None
    chosen = ours.record.choice.candidates[0].name
    found = {
        BASE: _session(plain, threads),
        "ONNX Runtime `quantize_dynamic`": _session(dynamic_file(plain, folder / "dynamic.onnx"), threads),
        "NNCF, rest in FP32": _openvino(nncf, threads, "f32"),
        "NNCF, rest in BF16": _openvino(nncf, threads, "bf16"),
        f"ours, `result.engine(...)`: {chosen}": lambda batch: ours.engine(**batch),
        f'ours, `backend="{ort_backend}"`': lambda batch: ort.engine(**batch),
        "our file in plain OpenVINO, rest in FP32": _openvino(ours.folder / "model.onnx", threads, "f32"),
    }
    return found, ours.record.choice.headline


def _timed(calls: Mapping[str, Call], batch: Mapping[str, torch.Tensor]) -> dict[str, float]:
    tokens = batch["input_ids"].numel()
    rounds = max(7, min(_MOST, _TOKENS // tokens))
    return medians(interleaved_latency({n: partial(call, batch) for n, call in calls.items()}, rounds=rounds, warmup=2))


def _sqnr(call: Call, model: torch.nn.Module, task: Any) -> float:
    """Return the SQNR in dB on sentences that did not calibrate."""
    found, expected = [], []
    for batch in task.batches(stsb("dev", 64)):
        # Not of padding.
        real = batch["attention_mask"].numpy().astype(bool)
        with torch.no_grad():
            expected.append(_first(model(**batch))[real].ravel())
        found.append(_first(call(batch))[real].ravel())
    return sqnr_db(np.concatenate(expected), np.concatenate(found))


def speed(threads: int) -> None:
    """Print the latency at four sizes, as speed-ups over ONNX Runtime FP32, and the SQNR."""
    model, task, _ = _data()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        engines, headline = _engines(threads, Path(folder))
        rows: dict[str, list[float]] = {name: [] for name in engines}
        for batch, tokens in SIZES:
            for name, seconds in _timed(engines, task.random_batch(batch, tokens)).items():
                rows[name].append(seconds)
        print(f"| | {' | '.join(f'{batch} x {tokens}' for batch, tokens in SIZES)} | SQNR, dB |")
        print("|---|" + "---|" * (len(SIZES) + 1))
        print(f"| {BASE}, ms | {' | '.join(f'{1000 * seconds:.2f}' for seconds in rows[BASE])} | |")
        for name, seconds in list(rows.items())[1:]:
            cells = [f"{base / own:.2f}" for base, own in zip(rows[BASE], seconds, strict=True)]
            print(f"| {name} | {' | '.join(cells)} | {_sqnr(engines[name], model, task):.1f} |")
        print(f"\n{headline}\n", flush=True)


def grid(threads: int) -> None:
    """Print the speed-up of the delivered engine over the float engine beside it, at sizes that nobody asked for."""
    model, task, batches = _data()
    with torch.no_grad():
        result = quantize_model(model, batches, threads=threads, progress=False)
        calls = {"float": lambda batch: result.float_engine(**batch), "int8": lambda batch: result.engine(**batch)}
        print("| samples | 16 tokens | 64 tokens | 256 tokens |\n|---|---|---|---|")
        for batch in GRID_BATCHES:
            seconds = [_timed(calls, task.random_batch(batch, tokens)) for tokens in GRID_TOKENS]
            row = " | ".join(f"{one['float'] / one['int8']:.2f}x" for one in seconds)
            print(f"| {batch} | {row} |", flush=True)
        print(flush=True)


def decide(threads: int) -> None:
    """Print the decisions of one call as JSON."""
    model, _, batches = _data()
    result = quantize_model(model, batches, threads=threads, progress=False)
    chosen, choice = result.quantizer.chosen_fallback, result.record.choice
    assert choice is not None
    groups = [] if chosen is None else sorted(chosen.reasons())
    print(json.dumps([choice.candidates[0].name, groups]))


def plans(count: int, threads: int) -> None:
    """Print how many of several calls decide alike: the engine, and the groups kept in float."""
    seen: Counter[str] = Counter()
    for _ in range(count):
        command = [sys.executable, __file__, "--threads", str(threads), "decide"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        decision = done.stdout.strip().splitlines()[-1]
        print(decision, file=sys.stderr, flush=True)
        seen[decision] += 1
    print("| calls | engine, groups kept in float |\n|---|---|")
    for decision, times in seen.most_common():
        print(f"| {times} | {decision} |")
    print(flush=True)


def _work() -> None:
    values = np.ones((512, 512), np.float32)
    while True:
        values @ values


@contextmanager
def neighbor(busy: bool) -> Iterator[None]:
    """Keep one core busy in the block."""
    words = [sys.executable, __file__, "work"]
    process = subprocess.Popen(words) if busy else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()


def main() -> None:
    """Print the requested tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--neighbor", action="store_true")
    parser.add_argument("what", nargs="*", default=["speed"])
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.what == ["work"]:
        _work()
    if given.what == ["decide"]:
        decide(given.threads)
        return
    beside = ", beside a busy process" if given.neighbor else ""
    print(heading(f"The delivered engine, threads: {given.threads}{beside}"))
    with neighbor(given.neighbor):
        words = iter(given.what)
        for word in words:
            if word == "plans":
                plans(int(next(words)), given.threads)
            else:
                {"speed": speed, "grid": grid}[word](given.threads)


if __name__ == "__main__":
    main()
