"""Folders of images, without labels: all that calibration needs."""

from __future__ import annotations

import hashlib
from pathlib import Path

from quantizer.errors import TaskError
from quantizer.tasks.datasets.rows import require_folder

__all__ = ["IMAGE_FILES", "image_paths", "read_images"]

IMAGE_FILES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
"""Endings of files that are taken for images; others are passed over."""


def read_images(path: Path) -> list[Path]:
    """All images of a folder and of the folders in it, in an order of their own; see ``image_paths``.

    Raises:
        TaskError: there is no such folder, or it holds no image.
    """
    folder = require_folder("images", path)
    found = image_paths(folder)
    if not found:
        raise TaskError(f"{folder} holds no images: expected files that end in {', '.join(IMAGE_FILES)}")
    return found


def image_paths(folder: Path) -> list[Path]:
    """The images below a folder, by the hash of their names: the first ones are then a fair sample.

    Names are sorted by class in most folders, so that the first hundred by name would be of a few classes only.
    """
    found = [path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_FILES and path.is_file()]
    return sorted(found, key=lambda path: hashlib.sha256(path.relative_to(folder).as_posix().encode()).digest())
