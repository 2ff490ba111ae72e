"""Recurrent layers beside the float kernels of the same engines: LSTM, GRU and RNN, one thread.

    python benchmarks/recurrent.py [ROUNDS]

60 steps of 256 inputs, one layer and one direction. Each file is written by the plan that a target chooses: a layer
that is not quantized is not timed, and its cell says so. Times are medians of interleaved rounds; SQNR is that of the
engine's outputs to the frozen proxy's, on rows that calibration has not seen.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from common import heading
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.engines import BuildOptions, Engine, build_engine, interleaved_latency, load_engine
from quantizer.tasks.metrics import sqnr_db

CELLS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}
HIDDEN = (128, 256, 512)
BATCHES = (1, 8)
BACKENDS = ("openvino", "onnxruntime")
STEPS, INPUTS, ROUNDS = 60, 256, 50


class Layer(nn.Module):
    """One recurrent layer. [B, T, I] to [B, T, H]."""

    def __init__(self, cell: type[nn.RNNBase], hidden: int) -> None:
        super().__init__()
        self.layer = cell(INPUTS, hidden, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(x)[0]
        return outputs


def main(rounds: int) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print(heading("Recurrent layers"))
    columns = ["layer", "hidden", "batch", *(f"{backend}: float ms, INT8 ms, speed, SQNR dB" for backend in BACKENDS)]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name, cell in CELLS.items():
        for hidden in HIDDEN:
            for batch in BATCHES:
                cells = [measured(cell, hidden, batch, backend, rounds) for backend in BACKENDS]
                print(f"| {' | '.join([name, str(hidden), str(batch), *cells])} |", flush=True)


def measured(cell: type[nn.RNNBase], hidden: int, batch: int, backend: str, rounds: int) -> str:
    """Return a cell of the table."""
    torch.manual_seed(0)
    model = Layer(cell, hidden).eval()
    seen, x = [torch.randn(8, STEPS, INPUTS) for _ in range(4)], torch.randn(batch, STEPS, INPUTS)
    quantizer = Quantizer(backend=backend)
    quantizer.calibrate(model, seen, progress=False)
    if not quantizer.coverage.share:
        return "is not quantized"
    frozen = quantizer.quantize(model)
    with tempfile.TemporaryDirectory() as folder:
        models = {"float": model, "int8": frozen}
        files = {name: quantizer.export(one, Path(folder) / f"{name}.onnx", x) for name, one in models.items()}
        engines = {name: _built(backend, path) for name, path in files.items()}
        inputs = {engine.input_names[0]: x.numpy() for engine in engines.values()}
        with torch.no_grad():
            expected = frozen(x).numpy()
        (given,) = engines["int8"](inputs).values()
        calls = {name: partial(engine, inputs) for name, engine in engines.items()}
        taken = interleaved_latency(calls, rounds=rounds)
    middle = {name: 1000 * statistics.median(seconds) for name, seconds in taken.items()}
    ratio = statistics.median(one / other for one, other in zip(taken["float"], taken["int8"], strict=True))
    return f"{middle['float']:.2f}, {middle['int8']:.2f}, {ratio:.2f}x, {sqnr_db(expected, given):.0f}"


def _built(backend: str, path: Path) -> Engine:
    built = build_engine(backend, path, path.with_suffix(".engine"), BuildOptions())
    return load_engine(backend, built.path, threads=1)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS)
