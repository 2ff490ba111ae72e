"""What INT8 costs on real tasks: proxy and OpenVINO engine against float, paired, on rows not used for calibration.

    python benchmarks/accuracy.py

STS-B: calibrated on the first 64 pairs (128 sentences) of train, scored on all of dev. SST-2: calibrated on the first
128 rows of train, scored on all of dev.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from common import calibrated, heading, minilm, minilm_sst2, sst2, stsb

from quantizer import Quantizer
from quantizer.engines import load_engine
from quantizer.tasks import Predictions, Task


class Scores:
    """Prints one line a model: score, difference to float with its interval, paired figures."""

    def __init__(self, task: Task, rows: Sequence[object], model: torch.nn.Module) -> None:
        self.task = task
        self.rows = rows
        self.base = task.predict(lambda batch: model(**batch), rows)
        print("| model | score | to float | 95% | paired |\n|---|---|---|---|---|")
        print(f"| float | {task.score(self.base, rows):.4f} | | | |")

    def add(self, name: str, predictions: Predictions) -> None:
        value = self.task.score(predictions, self.rows)
        low, high = self.task.difference_interval(self.base, predictions, self.rows)
        paired = ", ".join(f"{k} {v:.4f}" for k, v in self.task.paired(self.base, predictions).items())
        difference = value - self.task.score(self.base, self.rows)
        print(f"| {name} | {value:.4f} | {difference:+.4f} | [{low:+.4f}, {high:+.4f}] | {paired} |", flush=True)

    def both(self, name: str, quantizer: Quantizer, model: torch.nn.Module) -> None:
        """The frozen proxy, and the engine of its exported file."""
        frozen = quantizer.quantize(model)
        self.add(f"{name}, proxy", self.task.predict(lambda batch: frozen(**batch), self.rows))
        with tempfile.TemporaryDirectory() as folder:
            path = quantizer.export(frozen, Path(folder) / "model.onnx", self.task.example())
            engine = load_engine("openvino", path, threads=2)
            names = engine.input_names
            outputs = self.task.predict(lambda batch: engine({n: batch[n].numpy() for n in names}), self.rows)
        self.add(f"{name}, OpenVINO", outputs)


def main() -> None:
    torch.set_num_threads(2)
    print(heading("Accuracy, STS-B dev, Spearman"))
    model, task = minilm()
    scores = Scores(task, stsb("dev"), model)
    linears = calibrated(model, task, backend="openvino", sites={"residual_add": False})
    scores.both("linears and matmuls", linears, model)
    scores.both("default (residual auto)", calibrated(model, task, backend="openvino"), model)
    forced = calibrated(model, task, backend="openvino", sites={"residual_add": True})
    scores.both("every site", forced, model)
    amp = forced.amp(model)
    for batch in task.batches(stsb("train", 64), limit=2):
        amp(**batch)
    chosen = forced.fallback(amp, num=5)
    scores.both("every site, fallback(num=5)", forced, model)
    print("\nkept in float:", *chosen.groups, sep="\n- ")

    print(heading("Accuracy, SST-2 dev, accuracy"))
    model, task = minilm_sst2()
    train, dev = sst2("train", 128), sst2("dev")
    scores = Scores(task, dev, model)
    for name, residual, calibrator in (
        ("linears and matmuls", False, "percentile"),
        ("linears and matmuls, mse", False, "mse"),
        ("linears and matmuls, auto", False, "auto"),
        ("default (residual auto)", "auto", "percentile"),
        ("every site", True, "percentile"),
    ):
        quantizer = Quantizer(
            backend="openvino", activations={"calibrator": calibrator}, sites={"residual_add": residual}
        )
        quantizer.calibrate(model, task.batches(train), progress=False)
        scores.both(name, quantizer, model)


if __name__ == "__main__":
    main()
