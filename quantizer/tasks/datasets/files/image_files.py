"""Rows of images with boxes, masks or depths, from files.

The data set ``coco-json``: objects in images, in the format of COCO.

    {"images": [{"id": 1, "file_name": "one.jpg"}],
     "categories": [{"id": 3, "name": "car"}],
     "annotations": [{"image_id": 1, "category_id": 3, "bbox": [10, 20, 30, 40]}]}

A box is its upper left corner, width and height in pixels; ``iscrowd`` marks one around many objects. Images are beside
the file, or in the folder ``images`` there.

The data set ``image-depths``: images, and for each of them a file with the distance at each pixel.

    rooms/images/one.jpg
    rooms/depths/one.png

A distance is the number of a grey pixel, in 8 or 16 bits, or one of an array [height x width] in a ``.npy`` file, in
any unit. What is 0 or no number was not measured.

The data set ``image-masks``: images, and for each of them one with the class number of each pixel.

    streets/images/one.jpg
    streets/masks/one.png

The class 255 counts nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantizer.common.paths import is_file
from quantizer.common.plain_values import json_values
from quantizer.errors import TaskError
from quantizer.tasks.datasets.files.paths import IMAGE_FILES, paired_files
from quantizer.tasks.datasets.rows import Boxes, Depths, Masked, Row, datasets, read_lines, refuse_options, require_file


@datasets.add("coco-json")
def read_coco(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all images that a file names, with their objects, in the order of the file."""
    refuse_options("coco-json", split=split, subset=subset)
    file = require_file("coco-json", path)
    try:
        told: Any = json_values("".join(read_lines("coco-json", file)))
        names = {one["id"]: str(one["name"]) for one in told["categories"]}
        objects: dict[Any, list[tuple[tuple[float, float, float, float], str, bool]]] = {
            one["id"]: [] for one in told["images"]
        }
        for one in told["annotations"]:
            objects[one["image_id"]].append((_box(one), names[one["category_id"]], bool(one.get("iscrowd", 0))))
        images = [(one["id"], str(one["file_name"])) for one in told["images"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise TaskError(
            f"data set 'coco-json': {file} is not in the format of COCO ({what}); expected images with id and "
            "file_name, categories with id and name, and annotations with image_id, category_id and bbox"
        ) from error
    rows: list[Row] = []
    for number, name in images:
        boxes, labels, crowds = zip(*objects[number], strict=True) if objects[number] else ((), (), ())
        rows.append(Boxes(_image(file, name), boxes, labels, crowds))
    return rows


def _box(annotation: Mapping[str, Any]) -> tuple[float, float, float, float]:
    x, y, width, height = map(float, annotation["bbox"])
    if not all(map(math.isfinite, (x, y, width, height))) or width < 0 or height < 0:
        raise ValueError(f"a box is {annotation['bbox']}, expected x, y, width and height")
    return x, y, width, height


def _image(file: Path, name: str) -> Path:
    places = [file.parent / name, file.parent / "images" / name]
    found = next(filter(is_file, places), None)
    if found is None:
        raise TaskError(f"data set 'coco-json': {file} names {name}, but there is no {places[0]} and no {places[1]}")
    return found


@datasets.add("image-depths")
def read_image_depths(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all images of a folder with their distances."""
    refuse_options("image-depths", split=split, subset=subset)
    return [Depths(*pair) for pair in paired_files("image-depths", path, "depths", (*IMAGE_FILES, ".npy"))]


@datasets.add("image-masks")
def read_image_masks(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all images of a folder with their masks."""
    refuse_options("image-masks", split=split, subset=subset)
    return [Masked(*pair) for pair in paired_files("image-masks", path, "masks", IMAGE_FILES)]
