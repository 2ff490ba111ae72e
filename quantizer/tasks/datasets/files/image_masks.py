"""The data set ``image-masks``: images, and for each of them one with the class number of each pixel.

    streets/images/one.jpg
    streets/masks/one.png

The class 255 counts nowhere.
"""

from __future__ import annotations

from pathlib import Path

from quantizer.tasks.datasets.files.paths import IMAGE_FILES, paired_files
from quantizer.tasks.datasets.rows import Masked, Row, datasets, refuse_options


@datasets.add("image-masks")
def read_image_masks(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all images of a folder with their masks.

    Raises:
        TaskError: a folder does not exist, or an image has no mask.
    """
    refuse_options("image-masks", split=split, subset=subset)
    return [Masked(*pair) for pair in paired_files("image-masks", path, "masks", IMAGE_FILES)]
