"""Folders of images, without labels: all that calibration needs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from quantizer.errors import TaskError
from quantizer.tasks.datasets.rows import require_folder

__all__ = ["IMAGE_FILES", "image_paths", "read_images"]

IMAGE_FILES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
"""Endings of files that are taken for images; others are passed over."""


def read_images(path: Path) -> list[Path]:
    """Return all images of a folder and of the folders in it, in an order of their own; see ``image_paths``.

    Raises:
        TaskError: there is no such folder, or it holds no image.
    """
    folder = require_folder("images", path)
    found = image_paths(folder)
    if not found:
        raise TaskError(f"{folder} holds no images: expected files that end in {', '.join(IMAGE_FILES)}")
    return found


def image_paths(folder: Path) -> list[Path]:
    """Return the images below a folder, by the hash of their names: the first ones are then a fair sample.

    Names are sorted by class in most folders, so that the first hundred by name would be of a few classes only. Links
    to folders are followed. What begins with a dot is hidden, and no image: programs keep copies of their own there.

    Raises:
        TaskError: a link leads nowhere, or to a folder that it lies in.
    """
    found = list(_below(folder, ()))
    return sorted(found, key=lambda path: hashlib.sha256(path.relative_to(folder).as_posix().encode()).digest())


def _below(folder: Path, above: tuple[Path, ...]) -> Iterator[Path]:
    """Yield the images of a folder and of those in it; ``above``: the real paths of the folders that it lies in."""
    above = (*above, folder.resolve())
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            if path.resolve() in above:
                raise TaskError(f"{path} leads to a folder that it lies in: remove the link")
            yield from _below(path, above)
        elif path.suffix.lower() in IMAGE_FILES:
            if not path.exists():
                raise TaskError(f"{path} leads to a file that is not there: mend the link, or remove it")
            yield path
