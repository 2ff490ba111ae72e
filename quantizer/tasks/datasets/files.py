"""Data sets in folders and files: images, recordings, and tables of labels beside them.

The data set ``coco-json``: objects in images, in the format of COCO.

{"images": [{"id": 1, "file_name": "one.jpg"}],
     "categories": [{"id": 3, "name": "car"}],
     "annotations": [{"image_id": 1, "category_id": 3, "bbox": [10, 20, 30, 40]}]}

A box is its upper left corner, width and height in pixels; ``iscrowd`` marks one around many objects. Images are beside
the file, or in the folder ``images`` there.

The data set ``image-depths``: images, and for each of them a file with the distance at each pixel.

rooms/images/one.jpg
    rooms/depths/one.png

A distance is the number of a grey pixel, in 8 or 16 bits, or one of an array [height x width] in a ``.npy`` file, in
any unit. What is 0 or no number was not measured.

The data set ``image-masks``: images, and for each of them one with the class number of each pixel.

streets/images/one.jpg
    streets/masks/one.png

The class 255 counts nowhere.

The data sets ``image-csv`` and ``audio-csv``: labelled files in a CSV file with the header ``path,label``.

path,label
    cats/one.jpg,cat

A relative path starts at the folder of the CSV file. A label is the model's name for the class, or the class number
from 0. The columns may also be called ``file`` and ``class_index``; other columns are ignored. The rows are in the
order of the file.

The data sets ``image-folder`` and ``audio-folder``: a folder of files per class, named by the class or its number.

animals/cat/one.jpg
    animals/dog/two.png

The rows are in a fixed order that mixes the classes; see ``file_paths``.

The data set ``transcripts``: recordings with what is said in them, in a ``.csv`` or ``.jsonl`` file.

path,text
    one.wav,a good film

A line of a ``.jsonl`` file is an object with the same two keys. A relative path starts at the folder of the file. The
first column may also be called ``file`` or ``audio``, the second ``transcript`` or ``sentence``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantizer.errors import TaskError
from quantizer.tasks.datasets.rows import (
    Audio,
    Boxes,
    Depths,
    Image,
    Masked,
    Row,
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


@datasets.add("coco-json")
def read_coco(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all images that a file names, with their objects, in the order of the file."""
    refuse_options("coco-json", split=split, subset=subset)
    file = require_file("coco-json", path)
    try:
        told: Any = json_values("".join(read_lines("coco-json", file)))
        names = {one["id"]: str(one["name"]) for one in told["categories"]}
        objects: dict[Any, list[tuple[tuple[float, float, float, float], str, bool]]] = {
            one["id"]: [] for one in told["images"]
        }
        for one in told["annotations"]:
            objects[one["image_id"]].append((_box(one), names[one["category_id"]], bool(one.get("iscrowd", 0))))
        images = [(one["id"], str(one["file_name"])) for one in told["images"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise TaskError(
            f"data set 'coco-json': {file} is not in the format of COCO ({what}); expected images with id and "
            "file_name, categories with id and name, and annotations with image_id, category_id and bbox"
        ) from error
    rows: list[Row] = []
    for number, name in images:
        boxes, labels, crowds = zip(*objects[number], strict=True) if objects[number] else ((), (), ())
        rows.append(Boxes(_image(file, name), boxes, labels, crowds))
    return rows


def _box(annotation: Mapping[str, Any]) -> tuple[float, float, float, float]:
    x, y, width, height = map(float, annotation["bbox"])
    if not all(map(math.isfinite, (x, y, width, height))) or width < 0 or height < 0:
        raise ValueError(f"a box is {annotation['bbox']}, expected x, y, width and height")
    return x, y, width, height


def _image(file: Path, name: str) -> Path:
    places = [file.parent / name, file.parent / "images" / name]
    found = next(filter(is_file, places), None)
    if found is None:
        raise TaskError(f"data set 'coco-json': {file} names {name}, but there is no {places[0]} and no {places[1]}")
    return found


@datasets.add("image-depths")
def read_image_depths(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all images of a folder with their distances."""
    refuse_options("image-depths", split=split, subset=subset)
    return [Depths(*pair) for pair in paired_files("image-depths", path, "depths", (*IMAGE_FILES, ".npy"))]


@datasets.add("image-masks")
def read_image_masks(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all images of a folder with their masks."""
    refuse_options("image-masks", split=split, subset=subset)
    return [Masked(*pair) for pair in paired_files("image-masks", path, "masks", IMAGE_FILES)]


@datasets.add("image-csv")
def read_image_csv(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all images that a CSV file names."""
    refuse_options("image-csv", split=split, subset=subset)
    return [Image(*row) for row in _labelled("image-csv", require_file("image-csv", path), "image")]


@datasets.add("audio-csv")
def read_audio_csv(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all recordings that a CSV file names."""
    refuse_options("audio-csv", split=split, subset=subset)
    return [Audio(*row) for row in _labelled("audio-csv", require_file("audio-csv", path), "recording")]


def beside(file: Path, name: str, where: str, what: str) -> Path:
    """Return the path that a line of a file names, from the file's own folder on."""
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
def read_image_folder(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all images below a folder, labelled by the name of their class folder."""
    refuse_options("image-folder", split=split, subset=subset)
    return [Image(*row) for row in _labelled_files("image-folder", require_folder("image-folder", path), IMAGE_FILES)]


@datasets.add("audio-folder")
def read_audio_folder(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all recordings below a folder, labelled by the name of their class folder."""
    refuse_options("audio-folder", split=split, subset=subset)
    return [Audio(*row) for row in _labelled_files("audio-folder", require_folder("audio-folder", path), AUDIO_FILES)]


def _labelled_files(name: str, folder: Path, endings: Sequence[str]) -> list[tuple[Path, str]]:
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


_COLUMNS = (("path", "file", "audio"), ("text", "transcript", "sentence"))


@datasets.add("transcripts")
def read_transcripts(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all recordings that a file names, with their words."""
    refuse_options("transcripts", split=split, subset=subset)
    file = require_file("transcripts", path)
    readers = {".csv": _from_csv, ".jsonl": _from_jsonl}
    if file.suffix.lower() not in readers:
        raise TaskError(f"{file}: expected a file that ends in {' or '.join(readers)}")
    rows: list[Row] = []
    for where, name, text in readers[file.suffix.lower()](file):
        if not text.split():
            raise TaskError(f"{where}: the text is empty, expected the words of {name}")
        rows.append(Speech(beside(file, name, where, "recording"), " ".join(text.split())))
    return rows


def _from_csv(file: Path) -> Iterator[tuple[str, str, str]]:
    for where, (name, text) in read_columns("transcripts", file, _COLUMNS):
        yield where, name, text


def _from_jsonl(file: Path) -> Iterator[tuple[str, str, str]]:
    for where, told in read_objects("transcripts", file):
        name, text = (next((told[key] for key in keys if key in told), None) for keys in _COLUMNS)
        if not (isinstance(name, str) and isinstance(text, str)):
            raise TaskError(f'{where}: expected an object like {{"path": "one.wav", "text": "its words"}}')
        yield where, name, text
