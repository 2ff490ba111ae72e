"""The data set ``image-depths``: images, and for each of them a file with the distance at each pixel.

    rooms/images/one.jpg
    rooms/depths/one.png

A distance is the number of a grey pixel, in 8 or 16 bits, or one of an array [height x width] in a ``.npy`` file, in
any unit. What is 0 or no number was not measured.
"""

from __future__ import annotations

from pathlib import Path

from quantizer.tasks.datasets.files.paths import IMAGE_FILES, paired_files
from quantizer.tasks.datasets.rows import Depths, Row, datasets, refuse_options


@datasets.add("image-depths")
def read_image_depths(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all images of a folder with their distances.

    Raises:
        TaskError: a folder does not exist, or an image has no distances.
    """
    refuse_options("image-depths", split=split, subset=subset)
    return [Depths(*pair) for pair in paired_files("image-depths", path, "depths", (*IMAGE_FILES, ".npy"))]
