"""Accuracy before and after a training with rounded operands: SST-2, the default recipe, three seeds.

    python benchmarks/training_accuracy.py [int8|int4] [SEEDS]

Trained on rows of train with the float model's outputs (no labels), the state chosen on other samples of train,
scored on dev, which is used for nothing else. Every kind of site, nothing kept in float.

The exported file is scored twice: node by node, in float, as it is written, and as OpenVINO's engine, whose sums of
bytes may saturate where the CPU has no VNNI.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
from common import heading, minilm_sst2, session_as_written, sst2
from torch import nn

from quantizer import Quantizer
from quantizer.config import QatConfig
from quantizer.engines import Engine, load_engine
from quantizer.engines.onnxruntime import ONNXRuntimeEngine
from quantizer.pipeline.context import as_predictor
from quantizer.pipeline.train import Training
from quantizer.tasks import Example, Predictions, Task

CALIBRATION, TRAINING, TUNING = slice(128), slice(128, 6120), slice(6120, 6920)
BLOCKS = {"kinds": ["linear"], "activations": "int8", "weights": "int4", "block_size": 32}
CASES = {"int8": ("INT8", ()), "int4": ("INT4 weights in blocks of 32, INT8 activations", (BLOCKS,))}
BACKEND = "openvino"


class Bench:
    """A model with its rows."""

    def __init__(self) -> None:
        self.model, self.task = minilm_sst2()
        self.train: list[Example] = sst2("train")
        self.dev: list[Example] = sst2("dev")
        self.base = self.predict(self.model)

    def predict(self, model: nn.Module | Engine) -> Predictions:
        """On dev."""
        return self.task.predict(as_predictor(model), self.dev)

    def row(self, name: str, model: nn.Module | Engine, seconds: float | None = None) -> float:
        """Print a row of the table; the score in it."""
        task: Task = self.task
        found = self.predict(model)
        paired, score = task.paired(self.base, found), task.score(found, self.dev)
        took = "" if seconds is None else f"{seconds:.0f} s"
        points = 100 * (score - task.score(self.base, self.dev))
        figures = f"{100 * paired['label_flips']:.2f}% | {paired['kl_divergence']:.4f} | {took}"
        print(f"| {name} | {score:.4f} | {points:+.2f} | {figures} |", flush=True)
        return score

    def tuned(self, model: nn.Module) -> float:
        """The score on the tuning samples."""
        rows = self.train[TUNING]
        return self.task.score(self.task.predict(as_predictor(model), rows), rows)

    def engines(self, quantizer: Quantizer, frozen: nn.Module, folder: Path) -> dict[str, Engine]:
        """The exported file, as it is written and as OpenVINO runs it."""
        onnx = quantizer.export(frozen, folder / "model.onnx", self.task.example())
        quantizer.build(onnx, folder / "model.engine")
        as_written = ONNXRuntimeEngine(session_as_written(onnx))
        return {"file, node by node": as_written, "OpenVINO": load_engine(BACKEND, folder / "model.engine")}

    def untrained(self, formats: tuple[object, ...], name: str) -> None:
        """What comes of calibration alone, by the default preset, and with weights rounded by the outputs of blocks."""
        for rounding in ("nearest", "reconstruct"):
            quantizer = Quantizer(
                backend=BACKEND, sites={"residual_add": True}, formats=formats, weights={"rounding": rounding}
            )
            start = time.perf_counter()
            quantizer.calibrate(self.model, self.task.batches(self.train[CALIBRATION]), progress=False)
            frozen = quantizer.quantize(self.model)
            self.row(f"{name}: PTQ, balanced, weights by {rounding}", frozen, time.perf_counter() - start)

    def trained(self, formats: tuple[object, ...], seed: int, name: str) -> dict[str, float]:
        """One training, and the scores that came of it."""
        quantizer = Quantizer(preset="plain", backend=BACKEND, sites={"residual_add": True}, formats=formats)
        quantizer.calibrate(self.model, self.task.batches(self.train[CALIBRATION]), progress=False)
        if seed == 0:
            self.row(f"{name}: PTQ, fast", quantizer.quantize(self.model))
        with tempfile.TemporaryDirectory() as folder:
            training = Training(
                QatConfig(seed=seed),
                self.task,
                self.train[TRAINING],
                self.tuned,
                higher_is_better=True,
                folder=Path(folder),
                identity="",
                tell=lambda line: print(f"  {line}", file=sys.stderr),
            )
            start = time.perf_counter()
            training.run(self.model, quantizer.qat(self.model, scales="learned", copy=True))
            seconds = time.perf_counter() - start
            frozen = quantizer.quantize(self.model)
            scores = {"proxy": self.row(f"{name}: QAT, seed {seed}", frozen, seconds)}
            for which, engine in self.engines(quantizer, frozen, Path(folder)).items():
                scores[which] = self.row(f"{name}: QAT, seed {seed}, {which}", engine)
            return scores


def main(case: str, seeds: int) -> None:
    torch.set_num_threads(1)
    bench = Bench()
    print(heading("Training with rounded operands: SST-2 dev, 872 rows"))
    print("| model | accuracy | points to float | label flips | KL | training |\n|---|---|---|---|---|---|")
    base = bench.row("float", bench.model)
    name, formats = CASES[case]
    bench.untrained(formats, name)
    scores = [bench.trained(formats, seed, name) for seed in range(seeds)]
    for which in scores[0]:
        mean = sum(found[which] for found in scores) / len(scores)
        print(f"\nmean of {seeds} seeds, {which}: {mean:.4f}, {100 * (mean - base):+.2f} points to float")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "int8", int(sys.argv[2]) if len(sys.argv) > 2 else 3)
