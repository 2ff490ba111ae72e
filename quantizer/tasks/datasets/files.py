"""Data sets of image and audio files, and of files beside labels.

``coco-json``: objects in images, in COCO's format. A box is its upper left corner, width and height in pixels;
``iscrowd`` marks a box around many objects. Images lie beside the file, or in its folder ``images``.

    {"images": [{"id": 1, "file_name": "one.jpg"}],
     "categories": [{"id": 3, "name": "car"}],
     "annotations": [{"image_id": 1, "category_id": 3, "bbox": [10, 20, 30, 40]}]}

``image-depths``: ``rooms/images/one.jpg`` with the distance at each pixel in ``rooms/depths/one.png``, in any unit, or
a ``.npy`` array [height x width]. 0 and NaN mean that nothing was measured.

``image-masks``: ``streets/images/one.jpg`` with the class number of each pixel in ``streets/masks/one.png``. Class 255
is ignored.

``image-csv`` and ``audio-csv``: labelled files in a CSV file with the header ``path,label``. A relative path starts at
the folder of the CSV file. A label is a class name of the model, or a class number from 0. The columns may also be
called ``file`` and ``class_index``; other columns are ignored.

    path,label
    cats/one.jpg,cat

``image-folder`` and ``audio-folder``: one folder per class, named by the class or its number, as
``animals/cat/one.jpg``. The order is fixed and mixes the classes; see ``file_paths``.

``transcripts``: recordings with their words, in a ``.csv`` file with the header ``path,text``, or a ``.jsonl`` file of
objects with these keys. A relative path starts at the folder of the file. The first column may also be called ``file``
or ``audio``, the second ``transcript`` or ``sentence``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantizer.errors import TaskError
from quantizer.tasks.datasets.examples import (
    Audio,
    Boxes,
    Depths,
    Example,
    Image,
    Masked,
    Speech,
    datasets,
    read_columns,
    read_lines,
    read_objects,
    refuse_options,
    require_file,
    require_folder,
)
from quantizer.utils.paths import is_file, is_folder
from quantizer.utils.plain_values import json_values

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
def read_unlabelled_images(path: Path | None, split: str | None, subset: str | None) -> list[Example]:
    """Return the images below a folder, without labels; see ``read_images``."""
    refuse_options("images", split=split, subset=subset)
    return [*read_images(require_folder("images", path))]


@datasets.add("recordings")
def read_unlabelled_recordings(path: Path | None, split: str | None, subset: str | None) -> list[Example]:
    """Return the recordings below a folder, without labels; see ``read_recordings``."""
    refuse_options("recordings", split=split, subset=subset)
    return [*read_recordings(require_folder("recordings", path))]


def folder_holds(folder: Path) -> str:
    """Return "audio" if the first image or recording below a folder is a recording, else "image"."""
    first = next(_below(folder, (*AUDIO_FILES, *IMAGE_FILES), ()), None)
    return "audio" if first is not None and first.suffix.lower() in AUDIO_FILES else "image"


def file_paths(folder: Path, endings: Sequence[str]) -> list[Path]:
    """Return the files below a folder in the order of the hashes of their paths, so that the first ones mix the
    classes.

    Links to folders are followed. Names that begin with a dot are skipped.
    """
    paths = list(_below(folder, endings, ()))
    return sorted(paths, key=lambda path: hashlib.sha256(path.relative_to(folder).as_posix().encode()).digest())


def paired_files(name: str, path: Path | None, part: str, endings: Sequence[str]) -> list[tuple[Path, Path]]:
    """Return the images below ``path/images``, each with the file of the same name in the folder ``part``."""
    folder = require_folder(name, path)
    images, others = folder / "images", folder / part
    for needed in (images, others):
        if not is_folder(needed):
            raise TaskError(f"data set {name!r}: there is no folder {needed}; expected the folders images and {part}")
    by_name = {other.relative_to(others).with_suffix(""): other for other in file_paths(others, endings)}
    pairs = []
    for image in file_paths(images, IMAGE_FILES):
        match = by_name.get(image.relative_to(images).with_suffix(""))
        if match is None:
            place = (others / image.relative_to(images)).with_suffix(".png")
            raise TaskError(f"data set {name!r}: {image} has no file in {part}; expected {place}")
        pairs.append((image, match))
    return pairs


def _read(kind: str, path: Path, endings: Sequence[str]) -> list[Path]:
    folder = require_folder(kind, path)
    paths = file_paths(folder, endings)
    if not paths:
        raise TaskError(f"{folder} holds no {kind}: expected files that end in {', '.join(endings)}")
    return paths


def _below(folder: Path, endings: Sequence[str], above: tuple[Path, ...]) -> Iterator[Path]:
    """Yield the files below a folder; ``above`` holds the resolved paths of its parents."""
    above = (*above, folder.resolve())
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            if path.resolve() in above:
                raise TaskError(f"{path} is a link to a folder that contains it: remove the link")
            yield from _below(path, endings, above)
        elif path.suffix.lower() in endings:
            if not path.exists():
                raise TaskError(f"{path} is a broken link: repair or remove it")
            yield path


@datasets.add("coco-json")
def read_coco(path: Path | None, split: str | None, subset: str | None) -> list[Example]:
    """Return all images that a file names, with their objects, in the order of the file."""
    refuse_options("coco-json", split=split, subset=subset)
    file = require_file("coco-json", path)
    try:
        values: Any = json_values("".join(read_lines("coco-json", file)))
        names = {entry["id"]: str(entry["name"]) for entry in values["categories"]}
        objects: dict[Any, list[tuple[tuple[float, float, float, float], str, bool]]] = {
            entry["id"]: [] for entry in values["images"]
        }
        for entry in values["annotations"]:
            objects[entry["image_id"]].append((_box(entry), names[entry["category_id"]], bool(entry.get("iscrowd", 0))))
        images = [(entry["id"], str(entry["file_name"])) for entry in values["images"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        problem = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
        raise TaskError(
            f"data set 'coco-json': {file} is not in the format of COCO ({problem}); expected images with id and "
            "file_name, categories with id and name, and annotations with image_id, category_id and bbox"
        ) from error
    examples: list[Example] = []
    for number, name in images:
        boxes, labels, crowds = zip(*objects[number], strict=True) if objects[number] else ((), (), ())
        examples.append(Boxes(_image(file, name), boxes, labels, crowds))
    return examples


def is_coco(file: Path) -> bool:
    """Return whether a file is in COCO's format: a JSON object with images, annotations and categories."""
    try:
        values = json_values("".join(read_lines("coco-json", file)))
    except ValueError:
        return False
    return isinstance(values, dict) and {"images", "annotations", "categories"} <= values.keys()


def _box(annotation: Mapping[str, Any]) -> tuple[float, float, float, float]:
    x, y, width, height = map(float, annotation["bbox"])
    if not all(map(math.isfinite, (x, y, width, height))) or width < 0 or height < 0:
        raise ValueError(f"a box is {annotation['bbox']}, expected x, y, width and height")
    return x, y, width, height


def _image(file: Path, name: str) -> Path:
    paths = [file.parent / name, file.parent / "images" / name]
    image = next(filter(is_file, paths), None)
    if image is None:
        raise TaskError(f"data set 'coco-json': {file} names {name}, but there is no {paths[0]} and no {paths[1]}")
    return image


@datasets.add("image-depths")
def read_image_depths(path: Path | None, split: str | None, subset: str | None) -> list[Example]:
    """Return all images of a folder with their distances."""
    refuse_options("image-depths", split=split, subset=subset)
    return [Depths(*pair) for pair in paired_files("image-depths", path, "depths", (*IMAGE_FILES, ".npy"))]


@datasets.add("image-masks")
def read_image_masks(path: Path | None, split: str | None, subset: str | None) -> list[Example]:
    """Return all images of a folder with their masks."""
    refuse_options("image-masks", split=split, subset=subset)
    return [Masked(*pair) for pair in paired_files("image-masks", path, "masks", IMAGE_FILES)]


@datasets.add("image-csv")
def read_image_csv(path: Path | None, split: str | None, subset: str | None) -> list[Example]:
    """Return all images that a CSV file names."""
    refuse_options("image-csv", split=split, subset=subset)
    return [Image(file, label) for file, label in _labelled("image-csv", require_file("image-csv", path), "image")]


@datasets.add("audio-csv")
def read_audio_csv(path: Path | None, split: str | None, subset: str | None) -> list[Example]:
    """Return all recordings that a CSV file names."""
    refuse_options("audio-csv", split=split, subset=subset)
    return [Audio(file, label) for file, label in _labelled("audio-csv", require_file("audio-csv", path), "recording")]


def beside(file: Path, name: str, where: str, what: str) -> Path:
    """Return the path of a file named in a line; a relative path starts at the folder of the listing file."""
    path = file.parent / name
    if not is_file(path):
        raise TaskError(f"{where}: there is no {what} {path} (a relative path starts at the file's own folder)")
    return path


def _labelled(dataset: str, file: Path, what: str) -> Iterator[tuple[Path, str]]:
    for where, (name, label) in read_columns(dataset, file, [["path", "file"], ["label", "class_index"]]):
        path = beside(file, name, where, what)
        if not label:
            raise TaskError(f"{where}: the label is empty, expected the name of a class or its number from 0")
        yield path, label


@datasets.add("image-folder")
def read_image_folder(path: Path | None, split: str | None, subset: str | None) -> list[Example]:
    """Return all images below a folder, labelled by the name of their class folder."""
    refuse_options("image-folder", split=split, subset=subset)
    folder = require_folder("image-folder", path)
    return [Image(file, label) for file, label in _labelled_files("image-folder", folder, IMAGE_FILES)]


@datasets.add("audio-folder")
def read_audio_folder(path: Path | None, split: str | None, subset: str | None) -> list[Example]:
    """Return all recordings below a folder, labelled by the name of their class folder."""
    refuse_options("audio-folder", split=split, subset=subset)
    folder = require_folder("audio-folder", path)
    return [Audio(file, label) for file, label in _labelled_files("audio-folder", folder, AUDIO_FILES)]


def _labelled_files(name: str, folder: Path, endings: Sequence[str]) -> list[tuple[Path, str]]:
    """Return the files below a folder and the names of their class folders."""
    kind = {IMAGE_FILES: "images", AUDIO_FILES: "recordings"}[tuple(endings)]
    labelled: list[tuple[Path, str]] = []
    for file in file_paths(folder, endings):
        label, *inside = file.relative_to(folder).parts
        if not inside:
            raise TaskError(
                f"data set {name!r}: {file} is not in a class folder; expected {folder}/CLASS/{file.name}. "
                f"{kind.capitalize()} without labels can only calibrate"
            )
        labelled.append((file, label))
    if not labelled:
        raise TaskError(
            f"data set {name!r}: {folder} holds no {kind}; expected {folder}/CLASS/FILE with files that end in "
            f"{', '.join(endings)}"
        )
    return labelled


_COLUMNS = (("path", "file", "audio"), ("text", "transcript", "sentence"))


@datasets.add("transcripts")
def read_transcripts(path: Path | None, split: str | None, subset: str | None) -> list[Example]:
    """Return all recordings that a file names, with their words."""
    refuse_options("transcripts", split=split, subset=subset)
    file = require_file("transcripts", path)
    readers = {".csv": _from_csv, ".jsonl": _from_jsonl}
    if file.suffix.lower() not in readers:
        raise TaskError(f"{file}: expected a file that ends in {' or '.join(readers)}")
    examples: list[Example] = []
    for where, name, text in readers[file.suffix.lower()](file):
        if not text.split():
            raise TaskError(f"{where}: the text is empty, expected the words of {name}")
        examples.append(Speech(beside(file, name, where, "recording"), " ".join(text.split())))
    return examples


def _from_csv(file: Path) -> Iterator[tuple[str, str, str]]:
    for where, (name, text) in read_columns("transcripts", file, _COLUMNS):
        yield where, name, text


def _from_jsonl(file: Path) -> Iterator[tuple[str, str, str]]:
    for where, values in read_objects("transcripts", file):
        name, text = (next((values[key] for key in keys if key in values), None) for keys in _COLUMNS)
        if not (isinstance(name, str) and isinstance(text, str)):
            raise TaskError(f'{where}: expected an object like {{"path": "one.wav", "text": "its words"}}')
        yield where, name, text
