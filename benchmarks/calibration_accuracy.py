"""Accuracy by calibrator, and other quantizers at the same placement; tuned and scored on different rows.

    python benchmarks/calibration_accuracy.py [TABLE]...

The tables are minilm, peers, efficientnet, int4, per_tensor, smollm2 and rounding; without a name all of them.

MiniLM: calibrated on the first 64 pairs of STS-B train, scored on all of dev. EfficientNet-Lite0: calibrated on 64
images of an ImageNet sample, spread over the classes, and scored on the others, or half and half, twice. SmolLM2-135M:
calibrated on the windows 20 to 40 of 512 tokens of the WikiText-2 test text, scored on the windows 0 to 10.

All figures are of the frozen proxy; accuracy.py shows how close engines are to it.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout

import torch
from accuracy import Scores
from common import calibrated, heading, minilm, stsb
from data import CALIBRATION_WINDOWS, imagenet_sample, perplexity, smollm2_and_tokens, windows
from efficientnet_lite import efficientnet_lite0
from torch import nn

from quantizer import Quantizer

_CALIBRATORS = ("max", "percentile", "mse", "entropy", "auto")
_BATCH = 32


def minilm_rows() -> None:
    print(heading("Calibrators: MiniLM, linears and matmuls, STS-B dev, Spearman"))
    model, task = minilm()
    scores = Scores(task, stsb("dev"), model)
    searched = {"calibrator": "percentile", "percentile": [99.9, 99.99, 99.999]}
    for name, dtype, backend, activations in (
        *((f"INT8, {calibrator}", "int8", "openvino", {"calibrator": calibrator}) for calibrator in _CALIBRATORS),
        ("INT8, percentile of three", "int8", "openvino", searched),
        *(
            (f"FP8, {calibrator}", "fp8", "tensorrt", {"calibrator": calibrator})
            for calibrator in ("max", "mse", "auto")
        ),
    ):
        quantizer = calibrated(
            model,
            task,
            preset="plain",
            backend=backend,
            dtype=dtype,
            activations=activations,
            sites={"residual_add": False},
        )
        frozen = quantizer.quantize(model)
        scores.add(name, task.predict(lambda batch, frozen=frozen: frozen(**batch), scores.rows))


def peer_rows() -> None:
    # Large libraries, which the other tables do not need.
    from peers import PEERS

    print(heading("Other quantizers at the same placement: MiniLM, STS-B dev, Spearman"))
    print("In brackets: products rounded on both sides, of 37 linears and 12 products of attentions.\n")
    model, task = minilm()
    batches = task.batches(stsb("train", 64))
    scores = Scores(task, stsb("dev"), model)
    for placement, sites, left in (
        ("linears", {"matmul": False}, []),
        # What is left to compare NNCF with, which rounds no output of a softmax.
        ("linears and first products", {}, ["**.matmul_1"]),
        ("linears and matmuls", {}, []),
    ):
        for calibrator in ("max", "auto"):
            quantizer = calibrated(
                model,
                task,
                preset="plain",
                backend="openvino",
                activations={"calibrator": calibrator},
                sites={**sites, "residual_add": False},
                exclude={"sites": left},
            )
            frozen = quantizer.quantize(model)
            rounded = sum(site.quantized for site in quantizer.plan.values())
            scores.add(
                f"{placement}: ours, {calibrator} ({rounded})",
                task.predict(lambda batch, frozen=frozen: frozen(**batch), scores.rows),
            )
        for name, make in PEERS.get(placement, {}).items():
            # What the libraries print goes beside the table, not into it.
            with redirect_stdout(sys.stderr):
                run, rounded = make(model, task, batches)
            scores.add(f"{placement}: {name} ({rounded})", task.predict(run, scores.rows))


def _logits(model: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(batch) for batch in images.split(_BATCH)])


def image_rows(model: nn.Module, images: torch.Tensor, classes: torch.Tensor) -> Callable[[str, nn.Module], None]:
    """Print the head of a table and the row of the float model; return a function that adds a row."""
    expected = _logits(model, images)

    def row(name: str, quantized: nn.Module) -> None:
        logits = _logits(quantized, images)
        top1 = float((logits.argmax(1) == classes).float().mean())
        flips = float((logits.argmax(1) != expected.argmax(1)).float().mean())
        error = float((logits - expected).square().sum() / expected.square().sum())
        sqnr = f"{-10 * math.log10(error):.2f}" if error else ""
        print(f"| {name} | {top1:.4f} | {100 * flips:.1f} % | {sqnr} |", flush=True)

    print(f"{len(images)} images scored\n")
    print("| model | top-1 | label flips | SQNR dB |\n|---|---|---|---|")
    row("float", model)
    return row


def efficientnet_rows() -> None:
    """Normalisation is folded into the convolutions, as every engine does it.

    With a scale for each output channel that changes no integer of a weight and no activation, except those of the
    residual additions' operands.
    """
    print(heading("Calibrators: EfficientNet-Lite0, INT8, an ImageNet sample"))
    images, classes, tuned = imagenet_sample()
    model = efficientnet_lite0()
    row = image_rows(model, images[~tuned], classes[~tuned])
    for placement, residual in (("convolutions and linear", False), ("default (residual auto)", "auto")):
        for calibrator in _CALIBRATORS:
            quantizer = Quantizer(
                preset="plain",
                backend="openvino",
                activations={"calibrator": calibrator},
                sites={"residual_add": residual},
            )
            quantizer.calibrate(model, images[tuned].split(_BATCH), progress=False)
            row(f"{placement}, {calibrator}", quantizer.quantize(model))


def int4_rows() -> None:
    print(heading("Rounding of weights: EfficientNet-Lite0, INT4 per channel, INT8 activations, an ImageNet sample"))
    images, classes, _ = imagenet_sample()
    model = efficientnet_lite0()
    for tuned in (0, 1):
        row = image_rows(model, images[1 - tuned :: 2], classes[1 - tuned :: 2])
        for rounding in ("nearest", "gptq", "reconstruct"):
            quantizer = Quantizer(
                backend="onnxruntime",
                formats=[{"weights": "int4", "activations": "int8"}],
                weights={"rounding": rounding},
            )
            start = time.process_time()
            # A step of the descent takes one batch: small ones make it fast.
            quantizer.calibrate(model, images[tuned::2].split(_BATCH // 2), progress=False)
            frozen = quantizer.quantize(model)
            row(f"{rounding}, {time.process_time() - start:.0f} s of processor time", frozen)


def per_tensor_rows() -> None:
    """Without equalisation the classifier's input is not smoothed either: one setting asks for both."""
    print(heading("Weights with one scale: EfficientNet-Lite0, INT8, an ImageNet sample"))
    images, classes, tuned = imagenet_sample()
    model = efficientnet_lite0()
    row = image_rows(model, images[~tuned], classes[~tuned])
    for granularity, equalized, corrected in (
        ("per_channel", True, True),
        ("per_tensor", False, False),
        ("per_tensor", False, True),
        ("per_tensor", True, False),
        ("per_tensor", True, True),
    ):
        quantizer = Quantizer(
            backend="openvino",
            weights={"granularity": granularity},
            activations={} if equalized else {"smoothquant_alpha": None},
            bias_correction=corrected,
        )
        quantizer.calibrate(model, images[tuned].split(_BATCH), progress=False)
        words = [granularity, *["equalized"] * equalized, *["biases corrected"] * corrected]
        row(", ".join(words), quantizer.quantize(model))


def smollm2_rows() -> None:
    print(heading("Calibrators: SmolLM2-135M, INT8 linears, WikiText-2, perplexity"))
    model, tokens = smollm2_and_tokens()
    print("| weights | activations | perplexity |\n|---|---|---|")
    print(f"| float | float | {perplexity(model, tokens):.2f} |", flush=True)
    for weights, activations, left in _SMOLLM2:
        quantizer = Quantizer(
            preset="plain",
            backend="openvino",
            weights={"granularity": weights},
            activations=activations,
            sites={"matmul": False, "residual_add": False},
            exclude={"names": left},
        )
        batches = ({"input_ids": window, "use_cache": False} for window in windows(tokens, CALIBRATION_WINDOWS))
        quantizer.calibrate(model, batches, progress=False)
        name = ", ".join(
            [*(f"{key} {value}" for key, value in activations.items()), *(f"{module} in float" for module in left)]
        )
        print(f"| {weights} | {name} | {perplexity(quantizer.quantize(model), tokens):.2f} |", flush=True)


def rounding_rows() -> None:
    print(heading("Rounding of weights: SmolLM2-135M, INT4 in blocks of 64, WikiText-2, perplexity"))
    model, tokens = smollm2_and_tokens()
    print("| activations | rounding | perplexity |\n|---|---|---|")
    print(f"| float | float | {perplexity(model, tokens):.2f} |", flush=True)
    batches = [{"input_ids": row, "use_cache": False} for row in windows(tokens, CALIBRATION_WINDOWS)]
    gptq = {"rounding": "gptq"}
    everywhere = [("float", weights) for weights in ({}, gptq, {**gptq, "act_order": True}, {"rounding": "awq"})]
    for activations, weights in [*everywhere, ("int8", {}), ("int8", gptq)]:
        quantizer = Quantizer(
            backend="onnxruntime",
            formats=[{"weights": "int4", "activations": activations, "block_size": 64}],
            weights=weights,
            sites={"matmul": False, "residual_add": False},
        )
        quantizer.calibrate(model, batches, progress=False)
        name = ", ".join(f"{key} {value}" for key, value in weights.items()) or "nearest"
        print(f"| {activations} | {name} | {perplexity(quantizer.quantize(model), tokens):.2f} |", flush=True)


_SMOLLM2: tuple[tuple[str, dict[str, object], list[str]], ...] = (
    ("per_channel", {"calibrator": "max"}, []),
    ("per_channel", {"calibrator": "max"}, ["lm_head"]),
    ("per_channel", {"calibrator": "max", "smoothquant_alpha": "auto"}, []),
    ("per_tensor", {"calibrator": "max"}, []),
    ("per_tensor", {"calibrator": "max", "smoothquant_alpha": "auto"}, []),
    ("per_channel", {"calibrator": "percentile"}, []),
    ("per_channel", {"calibrator": "auto"}, []),
    ("per_tensor", {"calibrator": "auto"}, []),
)
"""How weights are scaled, how activations are, and the modules that are not quantized."""

_TABLES = {
    "minilm": minilm_rows,
    "peers": peer_rows,
    "efficientnet": efficientnet_rows,
    "int4": int4_rows,
    "per_tensor": per_tensor_rows,
    "smollm2": smollm2_rows,
    "rounding": rounding_rows,
}


if __name__ == "__main__":
    for table in sys.argv[1:] or _TABLES:
        _TABLES[table]()
