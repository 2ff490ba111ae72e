"""The data set ``image-folder``: a folder of images per class, named by the model's name for the class or its number.

    animals/cat/one.jpg
    animals/dog/two.png

The rows are in a fixed order that mixes the classes; see ``image_paths``.
"""

from __future__ import annotations

from pathlib import Path

from quantizer.errors import TaskError
from quantizer.tasks.datasets.images import IMAGE_FILES
from quantizer.tasks.datasets.images import image_paths
from quantizer.tasks.datasets.rows import Image
from quantizer.tasks.datasets.rows import Row
from quantizer.tasks.datasets.rows import datasets
from quantizer.tasks.datasets.rows import refuse_options
from quantizer.tasks.datasets.rows import require_folder

__all__ = ["read_image_folder"]


@datasets.add("image-folder")
def read_image_folder(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all images below a folder, labelled by the name of their class folder.

    Raises:
        TaskError: the folder does not exist or has no images, or an image is in no class folder.
    """
    refuse_options("image-folder", split=split, subset=subset)
    folder = require_folder("image-folder", path)
    rows: list[Row] = []
    for image in image_paths(folder):
        label, *inside = image.relative_to(folder).parts
        if not inside:
            raise TaskError(
                f"data set 'image-folder': {image} lies in no folder of a class; expected {folder}/CLASS/{image.name}. "
                "Images without labels can calibrate, but not be scored"
            )
        rows.append(Image(image, label))
    if not rows:
        raise TaskError(
            f"data set 'image-folder': {folder} holds no images; expected {folder}/CLASS/FILE with files that end in "
            f"{', '.join(IMAGE_FILES)}"
        )
    return rows
