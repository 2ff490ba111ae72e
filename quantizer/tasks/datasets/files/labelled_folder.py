"""The data sets ``image-folder`` and ``audio-folder``: a folder of files per class, named by the class or its number.

    animals/cat/one.jpg
    animals/dog/two.png

The rows are in a fixed order that mixes the classes; see ``file_paths``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantizer.errors import TaskError
from quantizer.tasks.datasets.files.paths import AUDIO_FILES, IMAGE_FILES, file_paths
from quantizer.tasks.datasets.rows import Audio, Image, Row, datasets, refuse_options, require_folder


@datasets.add("image-folder")
def read_image_folder(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all images below a folder, labelled by the name of their class folder.

    Raises:
        TaskError: the folder does not exist or has no images, or an image is in no class folder.
    """
    refuse_options("image-folder", split=split, subset=subset)
    return [Image(*row) for row in _labelled("image-folder", require_folder("image-folder", path), IMAGE_FILES)]


@datasets.add("audio-folder")
def read_audio_folder(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all recordings below a folder, labelled by the name of their class folder.

    Raises:
        TaskError: the folder does not exist or has no recordings, or a recording is in no class folder.
    """
    refuse_options("audio-folder", split=split, subset=subset)
    return [Audio(*row) for row in _labelled("audio-folder", require_folder("audio-folder", path), AUDIO_FILES)]


def _labelled(name: str, folder: Path, endings: Sequence[str]) -> list[tuple[Path, str]]:
    """Return the files below a folder and the names of their class folders."""
    what = {IMAGE_FILES: "images", AUDIO_FILES: "recordings"}[tuple(endings)]
    rows: list[tuple[Path, str]] = []
    for file in file_paths(folder, endings):
        label, *inside = file.relative_to(folder).parts
        if not inside:
            raise TaskError(
                f"data set {name!r}: {file} lies in no folder of a class; expected {folder}/CLASS/{file.name}. "
                f"{what.capitalize()} without labels can calibrate, but not be scored"
            )
        rows.append((file, label))
    if not rows:
        raise TaskError(
            f"data set {name!r}: {folder} holds no {what}; expected {folder}/CLASS/FILE with files that end in "
            f"{', '.join(endings)}"
        )
    return rows
