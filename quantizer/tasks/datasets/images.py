"""Folders of images without labels, which are enough for calibration."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from quantizer.errors import TaskError
from quantizer.tasks.datasets.rows import require_folder

__all__ = ["IMAGE_FILES", "image_paths", "read_images"]

IMAGE_FILES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
"""The endings of image files; other files are ignored."""


def read_images(path: Path) -> list[Path]:
    """Return all images below a folder, in a fixed order; see ``image_paths``.

    Raises:
        TaskError: the folder does not exist, or has no image.
    """
    folder = require_folder("images", path)
    found = image_paths(folder)
    if not found:
        raise TaskError(f"{folder} holds no images: expected files that end in {', '.join(IMAGE_FILES)}")
    return found


def image_paths(folder: Path) -> list[Path]:
    """Return the images below a folder in the order of the hashes of their paths, so that the first are a fair sample.

    In most folders the order of names is one of classes: the first hundred by name would be of a few classes only.
    Links to folders are followed. Names that begin with a dot are skipped: programs keep hidden copies there.

    Raises:
        TaskError: a link to an image is broken, or one leads to a folder that contains it.
    """
    found = list(_below(folder, ()))
    return sorted(found, key=lambda path: hashlib.sha256(path.relative_to(folder).as_posix().encode()).digest())


def _below(folder: Path, above: tuple[Path, ...]) -> Iterator[Path]:
    """Yield the images below a folder; ``above``: the real paths of the folders that contain it."""
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
