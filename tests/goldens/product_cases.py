"""Twelve small commands and calls as users give them: ``product_record.py`` records what they write and print."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import yaml
from helpers import ConvNet, batch, tiny
from torch import nn

import quantizer

if TYPE_CHECKING:
    from product_record import Place


NIGHTLY = frozenset({"encoder_decoder"})
"""Cases that take long, or are one more of a kind."""

NETS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.act = nn.GELU()
        self.down = nn.Linear(32, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(x + self.down(self.act(self.up(x))))


def build():
    torch.manual_seed(3)
    return Net()
"""

DATA = """
from pathlib import Path

import torch


def calibration():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 16, generator=generator) for _ in range(3)]


def score(model):
    if Path("broken").exists() and type(model).__name__ != "Net":
        raise OSError("the disk with the labels is gone")
    with torch.no_grad():
        return torch.cat([model(x).softmax(1).amax(1) for x in calibration()]).mean()
"""

SIZES = ("--batch-size", "1", "2", "4", "--seq-len", "16", "24", "32")


def _functions(place: Place, **sections: Any) -> None:
    """Write a package with a module and its data, and a run of them."""
    (place.folder / "golden_pkg").mkdir()
    (place.folder / "golden_pkg/nets.py").write_text(NETS)
    (place.folder / "golden_pkg/data.py").write_text(DATA)
    run = {
        "model": {
            "source": "golden_pkg.nets:build",
            "inputs": "golden_pkg.data:calibration",
            "metric": "golden_pkg.data:score",
        },
        "quantizer": {"backend": "onnxruntime", "preset": "plain"},
        "output": "out",
        **sections,
    }
    (place.folder / "run.yaml").write_text(yaml.safe_dump(run))


def _classifier(place: Place, **sections: Any) -> None:
    """Write a tiny classifier of texts with its data, a run of them, and settings of a conversion."""
    from tiny_run import tiny_run, write_rows

    run = tiny_run(place.folder)
    write_rows(place.folder / "training.csv", 48, seed=3)
    _label_as_the_model_does(place.folder)
    for part in ("training", "tuning"):
        if part in sections:
            run["data"][part] = {"name": "text-csv", "path": str(place.folder / f"{sections.pop(part)}.csv")}
    run["quantizer"] |= sections.pop("quantizer", {})
    (place.folder / "run.yaml").write_text(yaml.safe_dump({**run, "output": "out", **sections}))
    (place.folder / "settings.yaml").write_text("preset: plain\n")


def _label_as_the_model_does(folder: Path) -> None:
    """The float model is always right, so that a score tells what quantization changes."""
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "model").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    for name in ("training", "calibration", "evaluation"):
        _, *rows = (folder / f"{name}.csv").read_text().splitlines()
        texts = [row.rpartition(",")[0] for row in rows]
        with torch.no_grad():
            labels = model(**tokenizer(texts, return_tensors="pt", padding=True)).logits.argmax(-1).tolist()
        lines = [f"{text},{label}" for text, label in zip(texts, labels, strict=True)]
        (folder / f"{name}.csv").write_text("\n".join(["text,label", *lines]) + "\n")


def _run_module(place: Place) -> None:
    _functions(place)
    place.command("run", "run.yaml")


def _run_fallback(place: Place) -> None:
    settings = {"backend": "onnxruntime", "activations": {"percentile": 95.0}}
    fallback = {"max_drop": 0.1}
    _classifier(place, tuning="training", amp={"batches": 1}, fallback=fallback, quantizer=settings)
    place.command("run", "run.yaml")


def _run_qat(place: Place) -> None:
    qat = {"epochs": 1.0, "learning_rate": 0.0001}
    settings = {"backend": "onnxruntime", "activations": {"percentile": 80.0}}
    _classifier(place, training="training", tuning="calibration", qat=qat, quantizer=settings)
    place.command("run", "run.yaml")


def _convert(place: Place, *words: str) -> None:
    _classifier(place)
    data = (
        "--quantization",
        "--calibration",
        "text-csv:calibration.csv",
        "--samples",
        "12",
        "--config",
        "settings.yaml",
    )
    place.command("convert", "-m", "model", *data, *SIZES, *words, "-o", "out")


def _convert_one(place: Place) -> None:
    _convert(place, "--backend", "onnxruntime")


def _convert_several(place: Place) -> None:
    _convert(place, "--backend", "openvino", "onnxruntime", "--evaluation", "text-csv:evaluation.csv")


def _convert_onnx(place: Place) -> None:
    import onnx

    text = """
    <ir_version: 8, opset_import: ["" : 18]>
    g (float[N, 16] x) => (float[N, 8] y) { h = MatMul (x, w)  r = Relu (h)  y = MatMul (r, v) }
    """
    model, random = onnx.parser.parse_model(text), np.random.default_rng(0)
    for name, shape in (("w", (16, 32)), ("v", (32, 8))):
        array = random.normal(size=shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(model, place.folder / "net.onnx")
    np.savez(place.folder / "data.npz", x=random.normal(size=(32, 16)).astype(np.float32))
    words = ("--quantization", "--calibration", "data.npz", "--backend", "onnxruntime")
    place.command("convert", "-m", "net.onnx", *words, "-o", "out")


def _convert_function(place: Place) -> None:
    _functions(place)
    words = ("--inputs", "golden_pkg.data:calibration", "--score", "golden_pkg.data:score", "--quantization")
    place.command("convert", "-m", "golden_pkg.nets:build", *words, "--backend", "openvino", "-o", "out")


def _encoder_decoder(place: Place) -> None:
    from tiny_seq2seq import TEXTS, tiny_t5

    tiny_t5(place.folder / "t5")
    pairs = "".join(f"{text},{TEXTS[number - 1]}\n" for number, text in enumerate(TEXTS)) * 4
    (place.folder / "pairs.csv").write_text(f"source,target\n{pairs}")
    rows = {"name": "text-pairs", "path": "pairs.csv"}
    run = {
        "model": {"source": "t5", "task": "text-to-text", "max_length": 16, "new_tokens": 6},
        "data": {"calibration": rows, "evaluation": rows, "batch_size": 4},
        "quantizer": {"backend": "onnxruntime", "preset": "plain"},
        "export": {"dynamic": {"batch": [1, 2, 4], "sequence": [4, 8, 16]}},
        "report": {"latency_batch": 3, "latency_sequence": 8, "bootstrap": 50},
        "output": "out",
    }
    (place.folder / "run.yaml").write_text(yaml.safe_dump(run))
    place.command("run", "run.yaml")


def _quantize_convnet(place: Place) -> None:
    torch.manual_seed(3)
    images = [torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]

    def score(model: nn.Module) -> float:
        with torch.no_grad():
            return float(torch.cat([model(image) for image in images]).std())

    def quantize() -> str:
        made = quantizer.quantize_model(
            ConvNet().eval(), images, score=score, backend="openvino", preset="plain", progress=True
        )
        made.save("out")
        made.report("report.html")
        return str(made.summary())

    place.call("quantize_model(ConvNet(), images, score=score, backend='openvino')", quantize)


def _quantize_transformer(place: Place) -> None:
    batches = [batch("bert-classification", seed=seed, rows=8) for seed in range(4)]

    def quantize() -> str:
        model = tiny("bert-classification", attention="sdpa")
        made = quantizer.quantize_model(model, batches, backend="onnxruntime", progress=True)
        made.save("out")
        return str(made.summary())

    place.call("quantize_model(bert, batches, backend='onnxruntime')", quantize)


def _sweep(place: Place) -> None:
    _functions(place)
    place.command("run", "run.yaml", "quantizer.activations.percentile=99.9,60", "--output", "swept")


def _failing(place: Place) -> None:
    _functions(place)
    place.command("run", "run.yaml", "quantizer.presett=plain", "model.inputs=golden_pkg.data:missing")
    place.command("run", "run.yaml", "quantizer.exclude.names=[nothing.like.it]")
    place.command("convert", "-m", "no-such-folder", "--backend", "openvino", "-o", "converted")
    (place.folder / "broken").touch()
    place.command("run", "run.yaml")
    place.files("left by the run that failed")
    (place.folder / "broken").unlink()
    place.command("run", "run.yaml")
    place.command("run", "run.yaml")


def _forgotten(run: Callable[[Place], None]) -> Callable[[Place], None]:
    """Forget the packages of a case after it: another one has others of their name."""

    def case(place: Place) -> None:
        try:
            run(place)
        finally:
            for name in [name for name in sys.modules if name.partition(".")[0] == "golden_pkg"]:
                del sys.modules[name]

    return case


CASES = {
    "run_module": _forgotten(_run_module),
    "run_fallback": _run_fallback,
    "run_qat": _run_qat,
    "convert_one": _convert_one,
    "convert_several": _convert_several,
    "convert_onnx": _convert_onnx,
    "convert_function": _forgotten(_convert_function),
    "encoder_decoder": _encoder_decoder,
    "quantize_convnet": _quantize_convnet,
    "quantize_transformer": _quantize_transformer,
    "sweep": _forgotten(_sweep),
    "failing": _forgotten(_failing),
}
