"""Data sets with fixed formats or sources: SST-2, the STS benchmark and VADER.

``sst2-text`` reads one labelled text per line, the integer label first:

    1 a stirring , funny and finally transporting re-imagining

``stsb-csv`` reads sentence pairs with a similarity score, one per line, without a header:

    A plane is taking off.,An air plane is taking off.,5.0

``vader`` has short texts with human sentiment ratings (Hutto and Gilbert, ICWSM 2014; MIT licence). The texts come with
the source distribution of ``vaderSentiment`` on PyPI. pip downloads it once to ``$XDG_CACHE_HOME/quantizer`` (or
``~/.cache/quantizer``). Its SHA-256 is checked on every read; nothing is unpacked or installed.

Its subsets are ``tweets``, ``movieReviewSnippets``, ``amazonReviewSnippets`` and ``nytEditorialSnippets``. The label is
the sign of the mean rating (1 positive, 0 negative). Ratings within 0.5 of zero and repeated texts are skipped.

Its splits are ``head`` (50%), ``calibration`` (10%) and ``evaluation`` (40%); ``None`` returns all. The split depends
on a hash of the document's id only: sentences of one review stay together, and no sample is in two splits. Samples are
ordered by a hash, because the files are partly sorted by sentiment.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
import os
import subprocess
import tarfile
from pathlib import Path

from quantizer.errors import TaskError
from quantizer.tasks.datasets.examples import (
    Example,
    Pair,
    Text,
    class_number,
    datasets,
    read_lines,
    refuse_options,
    require_file,
)
from quantizer.utils.child_process import child_environment, python_command
from quantizer.utils.files import temporary_beside

PIP_TIMEOUT_S = 600


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/quantizer``, or ``~/.cache/quantizer`` if the variable is unset or a relative path."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "quantizer"


def check_sha256(path: Path, expected: str) -> None:
    """Raise ``TaskError`` unless the file's SHA-256 is ``expected`` (hexadecimal)."""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise TaskError(f"cannot read {path}: {error.strerror or error}") from error
    if digest != expected:
        raise TaskError(
            f"{path} is not the expected file: its SHA-256 is {digest}, expected {expected}. "
            f"Delete it to download it again, or use another package index"
        )


def fetch_sdist(requirement: str, archive: str, sha256: str, folder: Path) -> Path:
    """Return the path of a source distribution in the cache; pip downloads a missing one.

    The file appears in the cache only when complete and with the right hash.
    """
    target = folder / archive
    if target.is_file():
        check_sha256(target, sha256)
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary_beside(target) as scratch:
            _pip_download(requirement, archive, folder, scratch)
            fetched = scratch / archive
            if not fetched.is_file():
                raise TaskError(
                    f"pip downloaded {requirement}, but {archive} is missing: {_manual_download(requirement, folder)}"
                )
            check_sha256(fetched, sha256)
            os.replace(fetched, target)
    except OSError as error:
        raise TaskError(
            f"cannot store {archive} in {folder}: {error.strerror or error}. Point XDG_CACHE_HOME to a writable folder"
        ) from error
    return target


def _pip_download(requirement: str, archive: str, folder: Path, scratch: Path) -> None:
    name = requirement.partition("==")[0]
    options = ("--quiet", "--no-input", "--disable-pip-version-check", "--no-deps", "--no-binary", name)
    command = python_command("pip", "download", *options, "--dest", scratch, requirement)
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False, env=child_environment()
        )
    except subprocess.TimeoutExpired as error:
        raise TaskError(
            f"pip did not download {requirement} within {PIP_TIMEOUT_S} s: {_manual_download(requirement, folder)}"
        ) from error
    if result.returncode != 0:
        message = " | ".join((result.stderr or result.stdout).strip().splitlines()[-3:])
        raise TaskError(
            f"pip could not download {requirement}: {message or 'no message'}. {_manual_download(requirement, folder)}"
        )


def _manual_download(requirement: str, folder: Path) -> str:
    name = requirement.partition("==")[0]
    return (
        f"Check the network and the package index, or run on another machine  pip download --no-deps --no-binary "
        f"{name} "
        f"{requirement}  and copy the file to {folder}"
    )


@datasets.add("sst2-text")
def read_sst2(path: Path | None, split: str | None, subset: str | None) -> list[Example]:
    """Return all texts of a file."""
    refuse_options("sst2-text", split=split, subset=subset)
    file = require_file("sst2-text", path)
    examples: list[Example] = []
    for number, line in enumerate(read_lines("sst2-text", file), start=1):
        if not line.strip():
            continue
        label, _, text = line.strip().partition(" ")
        number_of_class = class_number(label)
        if number_of_class is None or not text.strip():
            raise TaskError(f"{file}:{number}: {line.strip()[:60]!r}, expected an integer label, a space and a text")
        examples.append(Text(text.strip(), number_of_class))
    return examples


@datasets.add("stsb-csv")
def read_stsb(path: Path | None, split: str | None, subset: str | None) -> list[Example]:
    """Return all pairs of a CSV file."""
    refuse_options("stsb-csv", split=split, subset=subset)
    file = require_file("stsb-csv", path)
    reader = csv.reader(read_lines("stsb-csv", file), strict=True)
    examples: list[Example] = []
    try:
        examples.extend(_pair(fields, f"{file}:{reader.line_num}") for fields in reader if fields)
    except csv.Error as error:
        raise TaskError(f"{file}:{reader.line_num}: not CSV ({error})") from error
    return examples


def _pair(fields: list[str], where: str) -> Pair:
    if len(fields) != 3:
        raise TaskError(f"{where}: {len(fields)} fields, expected 3: sentence,sentence,score (quote commas)")
    first, second, score = (field.strip() for field in fields)
    if not first or not second:
        raise TaskError(f"{where}: an empty sentence, expected sentence,sentence,score")
    try:
        value = float(score)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise TaskError(f"{where}: the score is {score!r}, expected a finite number")
    return Pair(first, second, value)


REQUIREMENT = "vaderSentiment==3.3.2"
ARCHIVE = "vaderSentiment-3.3.2.tar.gz"
SHA256 = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
INNER_ARCHIVE = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
SUBSETS = ("amazonReviewSnippets", "movieReviewSnippets", "nytEditorialSnippets", "tweets")
SPLITS = {"head": range(50), "calibration": range(50, 60), "evaluation": range(60, 100)}
"""The hashes, modulo 100, of each split."""
NEUTRAL = 0.5


@datasets.add("vader")
def read_vader(path: Path | None, split: str | None, subset: str | None) -> list[Example]:
    """Return the rated texts of one subset and split."""
    if subset not in SUBSETS:
        raise TaskError(f"data set 'vader' has no subset {subset!r}: set 'subset' to one of {', '.join(SUBSETS)}")
    if split is not None and split not in SPLITS:
        raise TaskError(f"data set 'vader' has no split {split!r}: set 'split' to one of {', '.join(SPLITS)}")
    content = _ground_truth(_archive(path), subset)
    ranked: list[tuple[str, Example]] = []
    texts: set[str] = set()
    # splitlines() would also split at characters that may occur inside a text.
    for number, line in enumerate(content.rstrip("\n").split("\n"), start=1):
        identifier, rating, text = _fields(line, f"{subset}:{number}")
        if abs(rating) < NEUTRAL or text in texts:
            continue
        texts.add(text)
        document = identifier.partition("_")[0]
        if split is None or _hash(subset, "document", document) % 100 in SPLITS[split]:
            order = f"{_hash(subset, 'row', identifier):016x}"
            ranked.append((order, Text(text, int(rating > 0))))
    return [example for _, example in sorted(ranked, key=lambda item: item[0])]


def _archive(path: Path | None) -> Path:
    if path is None:
        return fetch_sdist(REQUIREMENT, ARCHIVE, SHA256, cache_folder())
    archive = require_file("vader", path)
    check_sha256(archive, SHA256)
    return archive


def _ground_truth(archive: Path, subset: str) -> str:
    name = f"hutto_ICWSM_2014/{subset}_GroundTruth.txt"
    with tarfile.open(archive) as outer, tarfile.open(fileobj=io.BytesIO(_member(outer, INNER_ARCHIVE))) as inner:
        return _member(inner, name).decode("utf-8")


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    try:
        file = archive.extractfile(name)
    except KeyError:
        file = None
    if file is None:
        raise TaskError(f"data set 'vader': {ARCHIVE} does not contain {name}")
    return file.read()


def _fields(line: str, where: str) -> tuple[str, float, str]:
    fields = line.split("\t")
    try:
        identifier, rating, text = fields[0], float(fields[1]), fields[2].strip()
    except (IndexError, ValueError) as error:
        raise TaskError(
            f"data set 'vader': {where}: {line[:60]!r}, expected id, rating and text separated by tabs"
        ) from error
    return identifier, rating, text


def _hash(*parts: str) -> int:
    return int.from_bytes(hashlib.sha256("/".join(parts).encode()).digest()[:8], "big")
