"""Folders of images or recordings, and folders of files that go with images."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from quantizer.common.paths import is_folder
from quantizer.errors import TaskError
from quantizer.tasks.datasets.rows import Row, datasets, refuse_options, require_folder

IMAGE_FILES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
"""The endings of image files; other files are ignored."""
AUDIO_FILES = (".wav",)
"""The endings of recordings; other files are ignored."""


def read_images(path: Path) -> list[Path]:
    """Return all images below a folder, in a fixed order; see ``file_paths``.

    Raises:
        TaskError: the folder does not exist, or has no image.
    """
    return _read("images", path, IMAGE_FILES)


def read_recordings(path: Path) -> list[Path]:
    """Return all recordings below a folder, in a fixed order; see ``file_paths``.

    Raises:
        TaskError: the folder does not exist, or has no recording.
    """
    return _read("recordings", path, AUDIO_FILES)


@datasets.add("images")
def image_rows(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return the images below a folder, without labels; see ``read_images``."""
    refuse_options("images", split=split, subset=subset)
    return [*read_images(require_folder("images", path))]


@datasets.add("recordings")
def recording_rows(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return the recordings below a folder, without labels; see ``read_recordings``."""
    refuse_options("recordings", split=split, subset=subset)
    return [*read_recordings(require_folder("recordings", path))]


def folder_holds(folder: Path) -> str:
    """Return what the first file below a folder is that is one of both: "audio" or "image"; "image" if none is."""
    first = next(_below(folder, (*AUDIO_FILES, *IMAGE_FILES), ()), None)
    return "audio" if first is not None and first.suffix.lower() in AUDIO_FILES else "image"


def file_paths(folder: Path, endings: Sequence[str]) -> list[Path]:
    """Return the files below a folder in the order of the hashes of their paths, so that the first are a fair sample.

    In most folders the order of names is one of classes: the first hundred by name would be of a few classes only.
    Links to folders are followed. Names that begin with a dot are skipped: programs keep hidden copies there.
    """
    found = list(_below(folder, endings, ()))
    return sorted(found, key=lambda path: hashlib.sha256(path.relative_to(folder).as_posix().encode()).digest())


def paired_files(name: str, path: Path | None, part: str, endings: Sequence[str]) -> list[tuple[Path, Path]]:
    """Return the images below ``path/images``, each with the file of its name below another folder."""
    folder = require_folder(name, path)
    images, others = folder / "images", folder / part
    for needed in (images, others):
        if not is_folder(needed):
            raise TaskError(f"data set {name!r}: there is no folder {needed}; expected one of images, one of {part}")
    by_name = {other.relative_to(others).with_suffix(""): other for other in file_paths(others, endings)}
    pairs = []
    for image in file_paths(images, IMAGE_FILES):
        found = by_name.get(image.relative_to(images).with_suffix(""))
        if found is None:
            place = (others / image.relative_to(images)).with_suffix(".png")
            raise TaskError(f"data set {name!r}: {image} has none of the {part}; expected {place}")
        pairs.append((image, found))
    return pairs


def _read(kind: str, path: Path, endings: Sequence[str]) -> list[Path]:
    folder = require_folder(kind, path)
    found = file_paths(folder, endings)
    if not found:
        raise TaskError(f"{folder} holds no {kind}: expected files that end in {', '.join(endings)}")
    return found


def _below(folder: Path, endings: Sequence[str], above: tuple[Path, ...]) -> Iterator[Path]:
    """Yield the files below a folder; ``above``: the real paths of the folders that contain it."""
    above = (*above, folder.resolve())
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            if path.resolve() in above:
                raise TaskError(f"{path} leads to a folder that it lies in: remove the link")
            yield from _below(path, endings, above)
        elif path.suffix.lower() in endings:
            if not path.exists():
                raise TaskError(f"{path} leads to a file that is not there: mend the link, or remove it")
            yield path
