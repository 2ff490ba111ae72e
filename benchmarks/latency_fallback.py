"""Plans by measured time: everything in INT8 beside the most accurate plan that is as fast, and predicted times.

    python benchmarks/latency_fallback.py [efficientnet | dinov2 | minilm]... [BACKEND]

One thread; every kind of site is forced on, ranges by ``preset: plain``. Each group is timed in INT8 and in float in
the engine; the plan "as fast" is the one of ``fallback(min_speedup=...)`` with the speed that everything in INT8 is
predicted to have. Further plans lie between it and the float model. Each is built, run on rows that nothing was
chosen on, and timed in interleaved rounds with the others: the last column is the predicted time of the plan over the
measured one.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from chosen_engine import CASES, Case, Run, Shape
from common import heading, stsb
from data import imagenet_sample

from quantizer import Quantizer, measure_latency_costs
from quantizer.algorithms.sensitivity.latency_costs import frontier
from quantizer.engines import BuildOptions, build_engine, interleaved_latency, load_engine, medians
from quantizer.export.exporter import export_onnx

SHARES = (0.85, 0.7, 0.5)
"""Speeds of further plans, between the float model's and that of everything in INT8."""
ROUNDS = 40


def held_out(name: str, case: Case) -> list[dict[str, np.ndarray]]:
    """Inputs that neither ranges nor plans were chosen on."""
    if name == "minilm":
        rows = stsb("dev", 64)
        from common import minilm

        return [{key: value.numpy() for key, value in batch.items()} for batch in minilm()[1].batches(rows)]
    key = next(iter(case.inputs(1, None)))
    images, _, tuned = imagenet_sample()
    return [{key: part.numpy()} for part in images[~tuned][-128:].split(16)]


def outputs(run: Run, batches: Sequence[dict[str, np.ndarray]]) -> np.ndarray:
    """The first output of an engine, over all batches."""
    found = []
    for batch in batches:
        values = np.asarray(next(iter(run(batch).values())))  # type: ignore[attr-defined]
        found.append(values.reshape(len(values), -1) if len(batch) == 1 else values[:, 0])
    return np.concatenate(found)


def built(backend: str, path: Path, shape: Shape) -> Run:
    """The engine of an ONNX file, for a usual shape."""
    usual = {"batch": (shape[0],) * 3, "sequence": (shape[1] or 1,) * 3}
    options = BuildOptions(dynamic=usual)
    return load_engine(backend, build_engine(backend, path, path.with_suffix(".engine"), options).path, threads=1)


def report(name: str, backend: str) -> None:
    """Print the plans of one model: accuracy, time, and how far predictions were off."""
    case = CASES[name]()
    example, batches = case.calibration[0], held_out(name, case)
    size, sequence = case.shapes[-2] if name != "minilm" else (8, 128)
    quantizer = Quantizer(backend=backend, preset="plain", sites={"residual_add": True})
    quantizer.calibrate(case.model, case.calibration, progress=False)
    latency_costs = measure_latency_costs(quantizer, case.model, example, batch=size, sequence=sequence or 128)
    amp = quantizer.amp(case.model)
    for batch in case.calibration[:2]:
        amp(**batch) if isinstance(batch, dict) else amp(batch)
    whole = latency_costs.speedup(())
    wanted = {"everything in INT8": None, "as fast, by latency cost": whole}
    wanted |= {f"{share:.0%} of its gain, by latency cost": 1 + share * (whole - 1) for share in SHARES}
    engines: dict[str, Run] = {}
    told: dict[str, tuple[int, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        plain = export_onnx(case.model, Path(folder) / "float.onnx", example, opset=20, dtype=torch.float32)
        engines["float"] = built(backend, plain, (size, sequence))
        told["float"] = (len(latency_costs.groups), latency_costs.float_us)
        for place, (label, speedup) in enumerate(wanted.items()):
            quantizer.clear_fallback()
            back: set[str] = set()
            if speedup is not None:
                chosen = quantizer.fallback(amp, min_speedup=speedup, latency_costs=latency_costs)
                back = set(chosen.reasons())
            frozen = quantizer.quantize(case.model)
            path = quantizer.export(frozen, Path(folder) / f"plan{place}.onnx", example)
            engines[label] = built(backend, path, (size, sequence))
            told[label] = (len(back), latency_costs.time_us(back))
        reference = outputs(engines["float"], batches)
        given = case.inputs(size, sequence)
        calls = {label: partial(run, given) for label, run in engines.items()}
        times = medians(interleaved_latency(calls, rounds=ROUNDS))
    shape = f"{size} x {sequence}" if sequence else f"batch {size}"
    plans = len(frontier_of(quantizer, latency_costs))
    print(f"### {name}, {backend}, {shape}: {len(latency_costs.groups)} groups, {plans} plans\n")
    print("| plan | groups in float | ms | SQNR, dB | other label | predicted / measured |\n|---|---|---|---|---|---|")
    for label, run in engines.items():
        found = outputs(run, batches)
        error = float(np.square(found - reference).sum())
        sqnr = "-" if label == "float" else f"{10 * np.log10(float(np.square(reference).sum()) / error):.2f}"
        flips = f"{float((found.argmax(1) != reference.argmax(1)).mean()):.1%}" if name == "efficientnet" else "-"
        groups, predicted = told[label]
        off = predicted / (1e6 * times[label])
        print(f"| {label} | {groups} | {1000 * times[label]:.2f} | {sqnr} | {flips} | {off:.2f} |")
    print(flush=True)


def frontier_of(quantizer: Quantizer, latency_costs: object) -> Sequence[object]:
    """The points of the frontier that a report draws."""
    return frontier(quantizer.sensitivity.rows, latency_costs)  # type: ignore[arg-type]


def main(words: Sequence[str]) -> None:
    """Report on the models that are named, or on all, in one backend."""
    torch.set_num_threads(1)
    print(heading("Plans by measured time, one thread"))
    backend = next((word for word in words if word not in CASES), "openvino")
    for name in [word for word in words if word in CASES] or ["efficientnet", "dinov2", "minilm"]:
        report(name, backend)


if __name__ == "__main__":
    main(sys.argv[1:])
