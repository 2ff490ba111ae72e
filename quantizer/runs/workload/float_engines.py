"""One float model as ONNX files and engines, each made once for all runs that want it with the same options."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

from quantizer.engines import BuildResult


class FloatEngines:
    """Engines of the float model, in a folder that goes with the runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._built: dict[str, tuple[BuildResult, str]] = {}
        self._exported: dict[str, Path] = {}
        self._measured: dict[str, float] = {}

    def fetch(self, options: str, target: Path) -> BuildResult | None:
        """Copy an engine and the ONNX file of which it was built into a folder; None if there is none."""
        if options not in self._built:
            return None
        built, graph_options = self._built[options]
        _copy_files(built.path.parent, f"{built.path.stem}.*", target)
        self.fetch_graph(graph_options, target / f"{built.path.stem}.onnx")
        return replace(built, path=target / built.path.name)

    def keep(self, options: str, graph_options: str, built: BuildResult) -> None:
        """Copy an engine, for the runs that follow; the ONNX file of which it was built is kept already."""
        own = self._folder / f"float-{len(self._built)}"
        own.mkdir()
        _copy_files(built.path.parent, f"{built.path.stem}.*", own, leave=f"{built.path.stem}.onnx*")
        self._built[options] = replace(built, path=own / built.path.name), graph_options

    def fetch_graph(self, options: str, target: Path) -> bool:
        """Copy the kept ONNX file, of whatever backend; False if there is none."""
        if options not in self._exported:
            return False
        copy_onnx(self._exported[options], target)
        return True

    def keep_graph(self, options: str, path: Path) -> None:
        """Copy an ONNX file of the model, for the runs that follow."""
        own = self._folder / f"graph-{len(self._exported)}"
        own.mkdir()
        copy_onnx(path, own / path.name)
        self._exported[options] = own / path.name

    def measured(self, options: str, take: Callable[[], float]) -> float:
        """Return what is measured on an engine, at the first call only."""
        if options not in self._measured:
            self._measured[options] = take()
        return self._measured[options]


def copy_onnx(path: Path, target: Path) -> None:
    """Copy an ONNX file, and the file beside it that holds its weights if they are over 2 GB, which it names."""
    shutil.copyfile(path, target)
    for data in path.parent.glob(f"{path.name}?*"):
        shutil.copyfile(data, target.parent / data.name)


def _copy_files(folder: Path, names: str, target: Path, *, leave: str = "") -> None:
    """Copy the files of a folder whose names match."""
    for path in folder.glob(names):
        if not fnmatch(path.name, leave):
            shutil.copyfile(path, target / path.name)
