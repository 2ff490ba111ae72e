"""Current folders in which files have the names of modules: the processes that are started there import none."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path

from hostile_folder import HostileFolder

from quantizer.engines import BuildOptions, InputSizes, peak_memory_mib
from quantizer.engines.measure import tried_build
from quantizer.errors import TaskError
from quantizer.tasks.datasets.builtin import fetch_sdist
from torture import mutations
from torture.kinds import Kind, kind
from torture.readers_engines import exported


def _make(folder: Path) -> None:
    exported("onnxruntime", folder / "model.onnx")
    (folder / "names.bin").write_bytes(b"which modules lie there")


def _measure(folder: Path) -> None:
    peak_memory_mib(folder / "model.onnx", "onnxruntime", sizes=InputSizes(2, 4))


def _build(folder: Path) -> None:
    tried_build(
        "onnxruntime", folder / "model.onnx", folder / "model.engine", BuildOptions(), sizes=InputSizes(sequence=4)
    )


def _fetch(folder: Path) -> None:
    try:
        fetch_sdist("no-such-package==1.0", "no-such-package-1.0.tar.gz", "0" * 64, folder / "cache")
    except TaskError as error:
        if "pip could not download" not in str(error):
            raise


def _start(folder: Path) -> None:
    """Start one process where some modules lie; it ends well, and has imported none of them."""
    digest = hashlib.sha256((folder / "names.bin").read_bytes()).digest()
    pick = random.Random(digest)
    here = folder / "here"
    here.mkdir(exist_ok=True)
    hostile = HostileFolder(here, pick.sample(HostileFolder.names(), pick.choice((1, 5, 40))))
    before = Path.cwd()
    os.environ["PIP_NO_INDEX"] = "1"
    os.chdir(here)
    try:
        pick.choice((_measure, _build, _fetch))(folder)
    finally:
        os.chdir(before)
    if hostile.imported:
        raise AssertionError(f"imported {hostile.imported} of the current folder")


kind(Kind(name="hijack", make=_make, files=("names.bin",), how=(mutations.raw,), read=_start))
