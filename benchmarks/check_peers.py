"""What `quantizer check` says of the INT8 files that other tools make of a BERT: MiniLM, each tool by its own manual.

    python benchmarks/check_peers.py [--files FOLDER]

One row for each file and target: the findings by rule, with their number. ONNX Runtime: `quantize_static` by its
defaults, in its older operator format, and told to keep to products and symmetric ranges; `quantize_dynamic`. NNCF: its
ONNX backend with the transformer preset. Model Optimizer: its INT8 preset with the products of attention, through
torch's TorchScript exporter; the present exporter stops at a comparison of a range inside Model Optimizer's quantizer.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from common import Positional, heading, minilm, stsb
from peers import BatchReader, model_optimizer, onnxruntime_file

from quantizer import Quantizer
from quantizer.check import check_file
from quantizer.export.exporter import export_onnx
from quantizer.tasks import Batch, Task

TARGETS = ("tensorrt", "openvino", "onnxruntime")
PAIRS = 8
"""Pairs of sentences for calibration: the graphs are looked at, not their accuracy."""


def ours(model: torch.nn.Module, task: Task, batches: list[Batch], folder: Path) -> None:
    """This library's own files, one a target."""
    for target in TARGETS:
        quantizer = Quantizer(backend=target)
        quantizer.calibrate(model, batches, progress=False)
        quantizer.export(quantizer.quantize(model), folder / f"quantizer for {target}.onnx", task.example())


def onnxruntime_files(path: Path, batches: list[Batch], folder: Path) -> None:
    """Four ways of ONNX Runtime's own tool."""
    import onnx
    from onnxruntime.quantization import QuantFormat, quantize_dynamic, quantize_static

    quantize_static(path, folder / "ONNX Runtime static, defaults.onnx", BatchReader(batches))
    operators = folder / "ONNX Runtime static, QOperator.onnx"
    quantize_static(path, operators, BatchReader(batches), quant_format=QuantFormat.QOperator)
    symmetric = folder / "ONNX Runtime static, symmetric products.onnx"
    onnxruntime_file(path, symmetric, batches, matmuls=True, method="MinMax")
    # It fails on shapes that the exporter wrote down.
    model = onnx.load(path)
    del model.graph.value_info[:]
    quantize_dynamic(model, folder / "ONNX Runtime dynamic.onnx")


def nncf_file(path: Path, batches: list[Batch], folder: Path) -> None:
    """NNCF's ONNX backend."""
    import nncf
    import onnx

    model = onnx.load(path)
    names = {value.name for value in model.graph.input}
    quantized = nncf.quantize(
        model,
        nncf.Dataset(batches, lambda batch: {name: batch[name].numpy() for name in names}),
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=len(batches),
    )
    onnx.save(quantized, folder / "NNCF, ONNX backend.onnx")


def model_optimizer_file(model: torch.nn.Module, batches: list[Batch], folder: Path) -> None:
    """Model Optimizer's fake-quantized model through torch's exporter."""
    names = list(batches[0])
    torch.onnx.export(
        Positional(model_optimizer(model, batches, matmuls=True), names, use_cache=False).eval(),
        tuple(batches[0].values()),
        str(folder / "Model Optimizer, torch.onnx.onnx"),
        dynamo=False,
        opset_version=20,
        input_names=names,
        dynamic_axes={name: {0: "batch", 1: "sequence"} for name in names},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=Path, help="keep the files in this folder")
    kept = parser.parse_args().files
    model, task = minilm()
    batches = list(task.batches(stsb("train", PAIRS)))
    with tempfile.TemporaryDirectory() as temporary:
        folder = kept or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        path = export_onnx(model, folder / "float.onnx", task.example(), opset=20, dtype=torch.float32)
        steps: tuple[Callable[[], None], ...] = (
            lambda: ours(model, task, batches, folder),
            lambda: onnxruntime_files(path, batches, folder),
            lambda: nncf_file(path, batches, folder),
            lambda: model_optimizer_file(model, batches, folder),
        )
        for step in steps:
            with suppress(ImportError):  # a peer that is not installed has no row
                step()
        print(heading("Files of other tools against the targets' rules"))
        print("| file | target | errors | warnings |\n|---|---|---|---|")
        for file in sorted(folder.glob("*.onnx"), key=lambda file: file.stem.lower()):
            for target in TARGETS:
                if not file.stem.startswith("quantizer for") or file.stem.endswith(target):
                    found = " | ".join(_said(file, target, severity) for severity in ("error", "warning"))
                    print(f"| {file.stem} | {target} | {found} |")


def _said(file: Path, target: str, severity: str) -> str:
    counts = Counter(finding.rule for finding in check_file(file, target) if finding.severity == severity)
    return ", ".join(f"{rule} {count}" for rule, count in counts.most_common()) or "none"


if __name__ == "__main__":
    main()
