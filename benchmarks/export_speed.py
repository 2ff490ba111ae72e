"""Time and memory of the export of a model of BERT-base's size, in a process of its own.

    python benchmarks/export_speed.py [BACKEND]

Seconds are the process's own (one thread), without imports and calibration. Memory is what the process held at most,
``getrusage``, less what it held after the imports and before the model was made: so it counts the model itself, the
frozen proxy, the export and the file's bytes. ``during export`` counts what came on top of the model and its proxy.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from common import heading

from quantizer import Quantizer


def main(backend: str) -> None:
    torch.set_num_threads(1)
    print(heading(f"Export of a model of BERT-base's size for {backend}"), flush=True)
    _warm_up()
    start = _held()
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig()).eval()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    ids = torch.randint(0, 30_000, (2, 32))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    quantizer = Quantizer(preset="plain", backend=backend)
    quantizer.calibrate(model, [batch], progress=False)
    frozen = quantizer.quantize(model)
    before, began, own = _held(), time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        size = quantizer.export(frozen, Path(folder) / "model.onnx", batch).stat().st_size
    wall, own = time.perf_counter() - began, time.process_time() - own
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print("| weights MB | file MB | seconds | wall | peak MB | of weights | during export MB | of weights |")
    print("|---|---|---|---|---|---|---|---|")
    print(
        f"| {weights / 1e6:.0f} | {size / 1e6:.0f} | {own:.1f} | {wall:.1f} | {(most - start) / 1e6:.0f} "
        f"| {(most - start) / weights:.2f} | {(most - before) / 1e6:.0f} | {(most - before) / weights:.2f} |"
    )


def _warm_up() -> None:
    """Import what an export imports, so that it is no part of the figure."""
    with tempfile.TemporaryDirectory() as folder:
        model, batch = torch.nn.Linear(16, 16).eval(), torch.randn(2, 16)
        quantizer = Quantizer(preset="plain", backend="openvino")
        quantizer.calibrate(model, [batch], progress=False)
        quantizer.export(quantizer.quantize(model), Path(folder) / "model.onnx", batch)


def _held() -> int:
    """The memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "tensorrt-rtx")
