"""Files of rows for the tasks: parts of real data sets, and made-up ones where there are none."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from common import SHARED

__all__ = [
    "COLOURS",
    "SIDE",
    "animals",
    "animals_csv",
    "made_choices",
    "made_depths",
    "made_images",
    "made_masks",
    "made_objects",
    "made_pairs",
    "made_sounds",
    "made_speech",
    "made_texts",
    "squad",
    "wikitext",
]

COLOURS = ("red", "green", "blue")
"""The classes of made-up images, and of made-up sounds."""
SIDE = 64
"""Of made-up images, in pixels."""
_FIRST_OBJECT = 398
"""The classes of ImageNet before this one are animals."""
_SAMPLE = SHARED / "data/imagenet1k-sample"
_TRAINED_QUESTIONS = 481
_IMAGES, _CLASSES = 48, 5


def animals(part: str) -> Iterator[tuple[Path, int]]:
    """The images of one half of the sample, ``training`` or ``evaluation``, with 1 for an animal."""
    with (_SAMPLE / "labels.csv").open(newline="") as file:
        for at, row in enumerate(csv.DictReader(file)):
            if at % 2 == (part == "evaluation"):
                yield _SAMPLE / row["file"], int(int(row["class_index"]) < _FIRST_OBJECT)


def animals_csv(folder: Path, part: str) -> Path:
    """The same as a file of ``image-csv``; its images are linked beside it."""
    path = folder / f"animals-{part}.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label"])
        for image, label in animals(part):
            link = folder / "animals" / image.name
            link.parent.mkdir(exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(image)
            writer.writerow([f"animals/{image.name}", label])
    return path


def squad(folder: Path, part: str) -> Path:
    """The first 481 questions of the sample of SQuAD, ``training``, or the other 100, ``evaluation``."""
    document = json.loads((SHARED / "data/squad/squad-small.json").read_text(encoding="utf-8"))
    seen = 0
    for article in document["data"]:
        for paragraph in article["paragraphs"]:
            numbered = list(enumerate(paragraph["qas"], start=seen))
            seen += len(numbered)
            training = part == "training"
            paragraph["qas"] = [one for at, one in numbered if (at < _TRAINED_QUESTIONS) == training]
    path = folder / f"squad-{part}.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def wikitext(folder: Path, part: str) -> Path:
    """Long paragraphs of WikiText-2: the first 30, ``evaluation``, or later ones, ``calibration``."""
    text = (SHARED / "data/wikitext2/test.txt").read_text(encoding="utf-8")
    lines = [line.strip() for line in text.splitlines() if len(line) > 400]
    path = folder / f"wikitext-{part}.txt"
    path.write_text("\n".join(lines[:30] if part == "evaluation" else lines[200:264]), encoding="utf-8")
    return path


def made_texts(folder: Path) -> Path:
    """Sentences of 12 to 40 words that mean nothing."""
    draw = np.random.default_rng(0)
    words = ("the", "model", "of", "a", "layer", "weight", "is", "range", "rounds", "to", "and", "in", "scale", "float")
    lines = [" ".join(draw.choice(words, draw.integers(12, 40))) for _ in range(96)]
    path = folder / "made.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def made_masks(folder: Path) -> Path:
    """Images of coloured squares, and the class of each pixel."""
    from PIL import Image

    draw = np.random.default_rng(0)
    at = folder / "masks"
    colours = draw.integers(0, 255, (_CLASSES, 3))
    for number in range(_IMAGES):
        mask = np.kron(draw.integers(0, _CLASSES, (4, 4)), np.ones((SIDE // 4, SIDE // 4), dtype=int))
        pixels = np.clip(colours[mask] + draw.normal(0, 20, (SIDE, SIDE, 3)), 0, 255)
        for part, values in (("images", pixels), ("masks", mask)):
            (at / part).mkdir(parents=True, exist_ok=True)
            Image.fromarray(values.astype(np.uint8)).save(at / part / f"{number}.png")
    return at


def made_depths(folder: Path) -> Path:
    """Images that are darker where they are further away, with noise, and their distances in millimetres."""
    from PIL import Image

    draw = np.random.default_rng(0)
    at = folder / "depths"
    for number in range(_IMAGES):
        slope, across = draw.uniform(-1, 1, 2), np.mgrid[0:SIDE, 0:SIDE] / SIDE
        metres = 4 + slope[0] * across[0] + slope[1] * across[1]
        pixels = 255 - 30 * metres[..., None] + draw.normal(0, 10, (SIDE, SIDE, 3))
        for part, values in (
            ("images", pixels.clip(0, 255).astype(np.uint8)),
            ("depths", (1000 * metres).astype("u2")),
        ):
            (at / part).mkdir(parents=True, exist_ok=True)
            Image.fromarray(values).save(at / part / f"{number}.png")
    return at


def made_pairs(folder: Path) -> Path:
    """Sentences that mean nothing, each with its first words as what is to be written."""
    path = folder / "pairs.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["source", "target"])
        for text in made_texts(folder).read_text(encoding="utf-8").splitlines():
            writer.writerow([text, " ".join(text.split()[:8])])
    return path


def made_objects(folder: Path) -> Path:
    """Images of noise with one to three coloured rectangles, and the box and class of each in the format of COCO."""
    from PIL import Image

    draw = np.random.default_rng(0)
    at = folder / "objects"
    (at / "images").mkdir(parents=True, exist_ok=True)
    images, boxes = [], []
    for number in range(_IMAGES):
        pixels = draw.normal(128, 20, (SIDE, SIDE, 3))
        for _ in range(draw.integers(1, 4)):
            kind, (width, height) = int(draw.integers(0, 3)), draw.integers(SIDE // 8, SIDE // 2, 2)
            x, y = draw.integers(0, SIDE - width), draw.integers(0, SIDE - height)
            pixels[y : y + height, x : x + width] = np.eye(3)[kind] * 200
            box = [int(x), int(y), int(width), int(height)]
            boxes.append({"image_id": number, "category_id": kind, "bbox": box})
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(at / "images" / f"{number}.png")
        images.append({"id": number, "file_name": f"{number}.png"})
    kinds = [{"id": kind, "name": f"class {kind}"} for kind in range(3)]
    document = {"images": images, "categories": kinds, "annotations": boxes}
    (at / "labels.json").write_text(json.dumps(document), encoding="utf-8")
    return at / "labels.json"


def made_images(folder: Path) -> Path:
    """Images of noise in three colours, by their colour."""
    from PIL import Image

    draw = np.random.default_rng(0)
    for number in range(_IMAGES):
        kind = number % len(COLOURS)
        at = folder / "colours" / COLOURS[kind]
        at.mkdir(parents=True, exist_ok=True)
        pixels = np.clip(draw.normal(60, 30, (SIDE, SIDE, 3)) + 120 * np.eye(3)[kind], 0, 255)
        Image.fromarray(pixels.astype(np.uint8)).save(at / f"{number}.png")
    return folder / "colours"


def made_choices(folder: Path) -> Path:
    """Questions that mean nothing, with two to four answers."""
    draw = np.random.default_rng(0)
    texts = made_texts(folder).read_text(encoding="utf-8").splitlines()
    path = folder / "choices.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for text in texts:
            answers = [" ".join(draw.choice(text.split(), 5)) for _ in range(draw.integers(2, 5))]
            row = {"question": text, "choices": answers, "label": int(draw.integers(len(answers)))}
            file.write(json.dumps(row) + "\n")
    return path


def made_sounds(folder: Path) -> Path:
    """Tones of three heights with noise, half a second to one long, by their height."""
    list(_recordings(folder / "sounds", lambda number: Path(COLOURS[number % 3], f"{number}.wav")))
    return folder / "sounds"


def made_speech(folder: Path) -> Path:
    """The same tones, with two words of the letters a to h that nobody speaks."""
    draw = np.random.default_rng(1)
    path = folder / "speech.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "text"])
        for recording in _recordings(folder / "speech", lambda number: Path(f"{number}.wav")):
            words = ["".join(draw.choice([*"abcdefgh"], draw.integers(2, 6))) for _ in range(2)]
            writer.writerow([recording.relative_to(folder), " ".join(words)])
    return path


def _recordings(folder: Path, name: Callable[[int], Path]) -> Iterator[Path]:
    from scipy.io import wavfile

    draw, rate = np.random.default_rng(0), 16_000
    for number in range(_IMAGES):
        seconds = np.arange(int(rate * draw.uniform(0.5, 1))) / rate
        wave = 0.5 * np.sin(2 * np.pi * 300 * 3 ** (number % 3) * seconds) + draw.normal(0, 0.05, len(seconds))
        path = folder / name(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        wavfile.write(path, rate, (wave * 2**14).astype(np.int16))
        yield path
