"""The data set ``image-masks``: images, and for each of them one with the class number of each pixel.

    streets/images/one.jpg
    streets/masks/one.png

The class 255 counts nowhere.
"""

from __future__ import annotations

from pathlib import Path

from quantizer.common.paths import is_folder
from quantizer.errors import TaskError
from quantizer.tasks.datasets.files.paths import IMAGE_FILES
from quantizer.tasks.datasets.files.paths import file_paths
from quantizer.tasks.datasets.rows import Masked
from quantizer.tasks.datasets.rows import Row
from quantizer.tasks.datasets.rows import datasets
from quantizer.tasks.datasets.rows import refuse_options
from quantizer.tasks.datasets.rows import require_folder

__all__ = ["read_image_masks"]


@datasets.add("image-masks")
def read_image_masks(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all images of a folder with their masks.

    Raises:
        TaskError: a folder does not exist, or an image has no mask.
    """
    refuse_options("image-masks", split=split, subset=subset)
    folder = require_folder("image-masks", path)
    images, masks = folder / "images", folder / "masks"
    for part in (images, masks):
        if not is_folder(part):
            raise TaskError(f"data set 'image-masks': there is no folder {part}; expected one of images, one of masks")
    by_name = {mask.relative_to(masks).with_suffix(""): mask for mask in file_paths(masks, IMAGE_FILES)}
    rows: list[Row] = []
    for image in file_paths(images, IMAGE_FILES):
        name = image.relative_to(images).with_suffix("")
        if name not in by_name:
            raise TaskError(f"data set 'image-masks': {image} has no mask; expected {masks / name}.png")
        rows.append(Masked(image, by_name[name]))
    return rows
