"""The engines of a choice, kept beside the folder of a command until that is complete: one that was stopped goes on.

An engine is kept by all that it depends on: the content of its ONNX file, the options of its build, the versions of all
packages, and the CPU. So it is found again only where it would be built alike; a score only on the same rows.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from quantizer.common.cpu import cpu_flags
from quantizer.common.native_code import is_untrusted
from quantizer.common.paths import regular_file
from quantizer.common.plain_values import json_values
from quantizer.engines import BuildOptions, BuildResult, InputSizes
from quantizer.engines.measure import tried_build
from quantizer.errors import QuantizerError
from quantizer.report import collect_versions

_OURS = re.compile(r"[0-9a-f]{64}\.(engine|json)(\.part)?")


class KeptEngines:
    """Builds engines as ``tried_build`` does, and keeps them."""

    def __init__(self, folder: Path | None, rows: str | None) -> None:
        self._folder = folder
        self._rows = rows
        self._versions = json.dumps(collect_versions())
        self._keys: dict[Path, str] = {}

    def build(
        self,
        backend: str,
        onnx: Path,
        engine: Path,
        options: BuildOptions,
        *,
        threads: int,
        sizes: InputSizes,
    ) -> BuildResult:
        """Return an engine, copied from the kept one of an equal build if there is one; see ``tried_build``."""
        if self._folder is None:
            return tried_build(backend, onnx, engine, options, threads=threads, sizes=sizes)
        key = self._keys[engine] = self._key(onnx, f"{backend} {options} {threads} {sizes}")
        told, kept = self._read(key), self._folder / f"{key}.engine"
        # Native code that an earlier process left is built again rather than trusted.
        if told is not None and _sum(kept) == told.get("sha256") and not is_untrusted(kept):
            shutil.copyfile(kept, engine)
            return BuildResult(engine, told["size_bytes"], told["seconds"], tuple(told["warnings"]))
        built = tried_build(backend, onnx, engine, options, threads=threads, sizes=sizes)
        # Whatever keeps it from being kept, such as a full disk, does not keep the command from its end.
        with suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            part = kept.with_name(f"{kept.name}.part")
            shutil.copyfile(engine, part)
            os.replace(part, kept)
            told = {"size_bytes": built.size_bytes, "seconds": built.seconds, "warnings": list(built.warnings)}
            self._write(key, told | {"sha256": _sum(kept), "scores": {}})
        return built

    def difference(self, engine: Path, take: Callable[[], float | None]) -> float | None:
        """Return the difference of a score that an engine of ``build`` has, taken only if it is not kept."""
        key = self._keys.get(engine)
        told = None if key is None or self._rows is None else self._read(key)
        if key is None or told is None or self._rows is None:
            return take()
        if self._rows not in told["scores"]:
            found = take()
            told["scores"][self._rows] = found
            with suppress(OSError):
                self._write(key, told)
        score: float | None = told["scores"][self._rows]
        return score

    def _key(self, onnx: Path, told: str) -> str:
        whole = hashlib.sha256(f"{told} {self._versions} {sorted(cpu_flags())}".encode())
        # Weights over 2 GB lie in a file beside it.
        for path in sorted(onnx.parent.glob(f"{onnx.name}*")):
            whole.update(f"\0{path.name}\0{_sum(path)}".encode())
        return whole.hexdigest()

    def _read(self, key: str) -> dict[str, Any] | None:
        """Return what is told of a kept engine; None: there is none, or it cannot be read, and is built again."""
        assert self._folder is not None
        with suppress(OSError, ValueError):
            told = json_values(regular_file(self._folder / f"{key}.json").read_bytes())
            if isinstance(told, dict) and {"size_bytes", "seconds", "warnings", "sha256", "scores"} <= told.keys():
                return told
        return None

    def _write(self, key: str, told: dict[str, Any]) -> None:
        assert self._folder is not None
        part = self._folder / f"{key}.json.part"
        part.write_text(json.dumps(told), encoding="utf-8")
        os.replace(part, self._folder / f"{key}.json")


def check_engines(folder: Path) -> None:
    """Raise if a folder of kept engines holds anything else."""
    others = [path.name for path in folder.iterdir() if not _OURS.fullmatch(path.name)] if folder.is_dir() else []
    if others or (os.path.lexists(folder) and not folder.is_dir()):
        what = f"holds {others[0]!r}" if others else "is no folder"
        raise QuantizerError(
            f"{folder} {what}, and engines are kept there until the run is complete: move it elsewhere, or choose "
            "another folder for the run"
        )


def remove_engines(folder: Path) -> None:
    """Remove a folder of kept engines, if there is one; what else lies in it stays."""
    with suppress(OSError):
        for path in folder.iterdir():
            if _OURS.fullmatch(path.name):
                path.unlink()
        folder.rmdir()


def _sum(path: Path) -> str:
    """Return the SHA-256 of a file; empty: it cannot be read."""
    with suppress(OSError), path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
    return ""
