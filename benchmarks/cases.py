"""The four models that sensitivity is measured on, each with every kind of site forced on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from common import minilm, minilm_sst2, sst2, stsb
from data import CALIBRATION_WINDOWS, imagenet_sample, perplexity, smollm2_and_tokens, windows
from efficientnet_lite import efficientnet_lite0
from torch import nn

from quantizer import Quantizer

__all__ = ["CASES", "Case"]

Runner = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with its data.

    Attributes:
        calibration: batches that ranges come from.
        measured: batches, of the same rows, that sensitivity is measured on.
        granularity: of the groups that are compared with the truth.
        share: how much of the activation quantizers may be kept in float.
        report: what a model's predictions on other samples say beside the float model's: names and figures.
        example: one batch to export with; None: the engine is not scored.
    """

    name: str
    model: nn.Module
    calibration: Sequence[Any]
    measured: Sequence[Any]
    share: float
    report: Callable[[Runner], dict[str, float]]
    granularity: str = "group"
    example: Any = None
    options: dict[str, Any]

    def quantizer(self) -> Quantizer:
        """Calibrated, every kind of site on."""
        quantizer = Quantizer(preset="plain", backend="openvino", sites={"residual_add": True}, **self.options)
        quantizer.calibrate(self.model, self.calibration, progress=False)
        return quantizer


def minilm_stsb() -> Case:
    """Calibrated and measured on the first 64 pairs of train, scored on dev."""
    model, task = minilm()
    rows, dev = task.batches(stsb("train", 64)), stsb("dev")
    reference = task.predict(lambda batch: model(**batch), dev)

    def report(run: Runner) -> dict[str, float]:
        found = task.predict(run, dev)
        loss = task.score(reference, dev) - task.score(found, dev)
        return {"score": task.score(found, dev), "loss": loss, **task.paired(reference, found)}

    return Case(
        name="MiniLM, STS-B dev",
        model=model,
        calibration=rows,
        measured=rows[:2],
        share=0.08,
        report=report,
        example=task.example(),
        options={},
    )


def minilm_on_sst2() -> Case:
    """Calibrated and measured on the first 128 rows of train, scored on dev."""
    model, task = minilm_sst2()
    train, dev = sst2("train", 128), sst2("dev")
    batches = task.batches(train)
    reference = task.predict(lambda batch: model(**batch), dev)

    def report(run: Runner) -> dict[str, float]:
        found = task.predict(run, dev)
        return {"score": task.score(found, dev), **task.paired(reference, found)}

    return Case(
        name="MiniLM, SST-2 dev",
        model=model,
        calibration=batches,
        measured=batches,
        share=0.05,
        report=report,
        example=task.example(),
        options={"activations": {"calibrator": "auto"}},
    )


def efficientnet() -> Case:
    """Calibrated on 64 images of a sample of ImageNet, spread over the classes, and scored on the others."""
    images, classes, tuned = imagenet_sample()
    model = efficientnet_lite0()

    def logits(run: Runner) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([run(batch) for batch in images[~tuned].split(16)])

    reference = logits(model)

    def report(run: Runner) -> dict[str, float]:
        found = logits(run)
        top1 = float((found.argmax(1) == classes[~tuned]).float().mean())
        return {"top-1": top1, "label_flips": float((found.argmax(1) != reference.argmax(1)).float().mean())}

    batches = images[tuned].split(16)
    return Case(
        name="EfficientNet-Lite0, ImageNet sample",
        model=model,
        calibration=batches,
        measured=batches[:2],
        share=0.05,
        report=report,
        options={},
    )


def smollm2() -> Case:
    """Calibrated on windows 20 to 40 of WikiText-2, measured on two of them, scored on windows 0 to 10."""
    model, tokens = smollm2_and_tokens()
    batches = [{"input_ids": window, "use_cache": False} for window in windows(tokens, CALIBRATION_WINDOWS)]

    def report(run: Runner) -> dict[str, float]:
        return {"perplexity": perplexity(lambda **batch: run(batch), tokens)}

    return Case(
        name="SmolLM2-135M, WikiText-2",
        model=model,
        calibration=batches,
        measured=batches[:2],
        share=0.1,
        report=report,
        granularity="block",
        options={},
    )


CASES = {"stsb": minilm_stsb, "sst2": minilm_on_sst2, "efficientnet": efficientnet, "smollm2": smollm2}
