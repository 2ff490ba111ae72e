"""Photographs with words written on them, and the places of the words: what CRAFT is calibrated and scored on.

Shapes: B images of H x W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import torch
from common import SHARED
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

__all__ = ["calibration", "score"]

_SIDE, _ROWS = 256, 4
_BATCHES = {"calibration": 8, "evaluation": 12}
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_LOW_TEXT = 0.4
"""What counts as text: the threshold of EasyOCR."""


def calibration() -> list[Tensor]:
    """Batches of images [B x 3 x H x W]."""
    return [images for images, _ in _batches("calibration")]


def score(model: Callable[[Tensor], Tensor]) -> Tensor:
    """The F1 of each image's places of text [N]: those that the model marks, and those where words were written."""
    found = []
    for images, truth in _batches("evaluation"):
        with torch.no_grad():
            marked = torch.as_tensor(model(images))[..., 0] > _LOW_TEXT
        both = (marked & truth).sum((1, 2)).float()
        found.append(2 * both / (marked.sum((1, 2)) + truth.sum((1, 2))))
    return torch.cat(found)


@cache
def _batches(part: str) -> list[tuple[Tensor, Tensor]]:
    photos = sorted((SHARED / "data/imagenet1k-sample").glob("*.jpg"))
    text = (SHARED / "data/wikitext2/test.txt").read_text(encoding="utf-8")
    words = sorted({word for word in text.split() if word.isascii() and word.isalpha() and 4 <= len(word) <= 9})
    evaluates = part == "evaluation"
    pages = _pages(photos[evaluates::2], words[evaluates::2], np.random.default_rng(evaluates))
    return [_batch([next(pages) for _ in range(_ROWS)]) for _ in range(_BATCHES[part])]


def _pages(photos: list, words: list[str], draw: np.random.Generator) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Photographs with one to six words in a colour, and where these stand at half the size."""
    for path in photos:
        with Image.open(path) as photo:
            page = photo.convert("RGB").resize((_SIDE, _SIDE))
        brush, truth = ImageDraw.Draw(page), Image.new("1", (_SIDE // 2, _SIDE // 2))
        for top in draw.permutation(6)[: draw.integers(1, 7)]:
            font = ImageFont.load_default(int(draw.integers(18, 32)))
            colour = tuple(int(value) for value in draw.choice([0, 255], 3))
            at = (int(draw.integers(4, _SIDE // 3)), int(top) * 40 + 4)
            word = str(draw.choice(words))
            brush.text(at, word, fill=colour, font=font, stroke_width=1, stroke_fill=tuple(255 - c for c in colour))
            box = [value / 2 for value in brush.textbbox(at, word, font=font)]
            ImageDraw.Draw(truth).rectangle(box, fill=1)
        yield np.asarray(page, dtype=np.float32) / 255, np.asarray(truth)


def _batch(pages: list[tuple[np.ndarray, np.ndarray]]) -> tuple[Tensor, Tensor]:
    images = (np.stack([page for page, _ in pages]) - _MEAN) / _DEVIATION
    truth = np.stack([marked for _, marked in pages])
    return torch.from_numpy(images.transpose(0, 3, 1, 2).astype(np.float32)), torch.from_numpy(truth)
