"""Synthetic scenes for detectors: shapes of five classes on a noisy background, with COCO annotations.

Each scene follows from its number alone. Shapes differ in size, color, angle and contrast, and may hide each
other in part. The box of an object is that of its visible pixels, as in COCO.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFilter

__all__ = ["CLASSES", "SIDE", "Scene", "scene", "write_scenes"]

CLASSES = ("disc", "square", "triangle", "star", "cross")
SIDE = 96
"""The width and height of a scene in pixels."""

_OBJECTS = 4
"""The most objects of a scene."""
_RADII = (9.0, 28.0)
"""The smallest and the largest radius of a shape in pixels."""
_VISIBLE = 0.6
"""The share of each shape that others must not hide."""
_MARGIN = 2
_SHARP = 4
"""Shapes are drawn at this multiple of the size, for smooth edges."""

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Scene:
    """An image with its objects.

    Attributes:
        image: RGB values [SIDE x SIDE x 3], 0 to 255.
        boxes: x and y of the upper left corner, width and height of each object in pixels [N x 4].
        labels: the number of the class of each object [N].
    """

    image: Array
    boxes: Array
    labels: Array


def scene(number: int) -> Scene:
    """Return one scene; the same number returns the same scene."""
    random = np.random.default_rng(number)
    labels = random.integers(len(CLASSES), size=random.integers(1, _OBJECTS + 1))
    masks = _placed(random, labels)
    image = _background(random)
    hidden = np.zeros((SIDE, SIDE), dtype=bool)
    visible: list[Array] = []
    for mask in reversed(masks):
        visible.append((mask > 0.5) & ~hidden)
        hidden |= mask > 0.5
    for mask in masks:
        image += mask[..., None] * (_color(random, image, mask) - image)
    if random.random() < 0.5:
        blurred = Image.fromarray(image.clip(0, 255).astype(np.uint8)).filter(ImageFilter.GaussianBlur(0.7))
        image = np.asarray(blurred, dtype=np.float64)
    image = image + random.normal(0, random.uniform(2, 10), image.shape)
    boxes = np.array([_box(mask) for mask in reversed(visible)])
    return Scene(image.clip(0, 255).astype(np.uint8), boxes, labels)


def write_scenes(folder: Path, numbers: Iterable[int]) -> Path:
    """Write scenes as PNG files, and return the path of a JSON file with their annotations in COCO's format."""
    folder.mkdir(parents=True, exist_ok=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number in numbers:
        made, name = scene(number), f"{number}.png"
        Image.fromarray(made.image).save(folder / name)
        images.append({"id": number, "file_name": name, "width": SIDE, "height": SIDE})
        for box, label in zip(made.boxes.tolist(), made.labels.tolist(), strict=True):
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": label,
                    "bbox": box,
                    "area": box[2] * box[3],
                    "iscrowd": 0,
                }
            )
    categories = [{"id": at, "name": name} for at, name in enumerate(CLASSES)]
    target = folder / "annotations.json"
    target.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
    return target


def _placed(random: np.random.Generator, labels: Array) -> list[Array]:
    """Return the coverage of each shape, from the lowest to the topmost, each visible enough."""
    masks: list[Array] = []
    while len(masks) < len(labels):
        mask = _shape(random, CLASSES[labels[len(masks)]])
        above = mask > 0.5
        hidden = [_hidden_share(masks, at, above) for at in range(len(masks))]
        if all(share <= 1 - _VISIBLE for share in hidden):
            masks.append(mask)
    return masks


def _hidden_share(masks: list[Array], at: int, above: Array) -> float:
    """Return the share of a placed shape that later ones and ``above`` hide."""
    hidden = above.copy()
    for other in masks[at + 1 :]:
        hidden |= other > 0.5
    own = masks[at] > 0.5
    return float((own & hidden).sum() / own.sum())


def _shape(random: np.random.Generator, kind: str) -> Array:
    """Return the coverage of each pixel by a random shape [SIDE x SIDE], 0 to 1."""
    low, high = _RADII
    radius = low * (high / low) ** random.random()
    center = random.uniform(radius + _MARGIN, SIDE - radius - _MARGIN, 2)
    turn = random.uniform(0, 2 * math.pi)
    # Only the part of the scene around the shape is drawn.
    left, top = (int(value) for value in center - radius - 1)
    size = math.ceil(2 * radius) + 3
    x, y = center[0] - left, center[1] - top
    picture = Image.new("L", (size * _SHARP, size * _SHARP))
    draw = ImageDraw.Draw(picture)
    if kind == "disc":
        wide = radius * random.uniform(0.7, 1.0)
        draw.ellipse([_SHARP * value for value in (x - wide, y - radius, x + wide, y + radius)], fill=255)
    else:
        corners = [
            (x + radius * far * math.cos(turn + at), y + radius * far * math.sin(turn + at))
            for at, far in _corners(kind)
        ]
        draw.polygon([(_SHARP * x, _SHARP * y) for x, y in corners], fill=255)
    part = np.asarray(picture.resize((size, size), Image.Resampling.BOX), dtype=np.float64) / 255
    mask = np.zeros((SIDE, SIDE))
    rows, columns = mask[top : top + size, left : left + size].shape
    mask[top : top + size, left : left + size] = part[:rows, :columns]
    return mask


def _corners(kind: str) -> list[tuple[float, float]]:
    """Return the corners of a shape around its middle, each as an angle and a distance of at most 1."""
    if kind == "cross":
        # A plus sign: two corners at each end, one between two ends.
        wide = math.atan2(0.3, 1.0)
        ends = [math.pi / 2 * at for at in range(4)]
        return [
            corner
            for end in ends
            for corner in ((end - wide, 1.0), (end + wide, 1.0), (end + math.pi / 4, 0.3 * math.sqrt(2)))
        ]
    if kind == "star":
        return [(math.pi / 5 * at, 1.0 if at % 2 == 0 else 0.42) for at in range(10)]
    sides = {"triangle": 3, "square": 4}[kind]
    return [(2 * math.pi / sides * at, 1.0) for at in range(sides)]


def _background(random: np.random.Generator) -> Array:
    """Return a gradient between two colors with lines across it [SIDE x SIDE x 3]."""
    first, second = random.uniform(30, 225, (2, 3))
    angle = random.uniform(0, 2 * math.pi)
    y, x = np.mgrid[0:SIDE, 0:SIDE] / (SIDE - 1) - 0.5
    share = (0.5 + (x * math.cos(angle) + y * math.sin(angle)) / math.sqrt(2))[..., None]
    picture = Image.fromarray((first + share * (second - first)).astype(np.uint8))
    draw = ImageDraw.Draw(picture)
    for _ in range(random.integers(0, 6)):
        ends = random.uniform(0, SIDE, 4).tolist()
        draw.line(ends, fill=tuple(random.integers(0, 256, 3).tolist()), width=int(random.integers(1, 3)))
    return np.asarray(picture, dtype=np.float64)


def _color(random: np.random.Generator, image: Array, mask: Array) -> Array:
    """Return a color that differs from what the shape covers."""
    covered = image[mask > 0.5].mean(axis=0)
    while True:
        color = random.uniform(0, 255, 3)
        if np.abs(color - covered).max() > 70:
            return color


def _box(visible: Array) -> list[float]:
    rows, columns = np.flatnonzero(visible.any(axis=1)), np.flatnonzero(visible.any(axis=0))
    return [
        float(columns[0]),
        float(rows[0]),
        float(columns[-1] - columns[0] + 1),
        float(rows[-1] - rows[0] + 1),
    ]
