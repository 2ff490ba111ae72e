"""The engines of one float model, each built once for all runs that want it with the same options."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from quantizer.engines import BuildResult

__all__ = ["FloatEngines"]


class FloatEngines:
    """Engines of the float model, in a folder that goes with the runs.

    Args:
        folder: where their files lie.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._built: dict[str, BuildResult] = {}
        self._exported: dict[str, Path] = {}
        self._measured: dict[str, float] = {}

    def fetch(self, options: str, target: Path) -> BuildResult | None:
        """Copy an engine and the ONNX file of which it was built into a folder; None if there is none.

        Args:
            options: all that it depends on, as text.
            target: the folder.
        """
        built = self._built.get(options)
        if built is None:
            return None
        _copy(built.path.parent, f"{built.path.stem}.*", target)
        return replace(built, path=target / built.path.name)

    def keep(self, options: str, graph_options: str, built: BuildResult) -> None:
        """Copy an engine and its ONNX file, for the runs that follow.

        Args:
            options: all that the engine depends on, as text.
            graph_options: all that its ONNX file depends on.
            built: the engine.
        """
        own = self._folder / f"float-{len(self._built)}"
        own.mkdir()
        _copy(built.path.parent, f"{built.path.stem}.*", own)
        self._built[options] = replace(built, path=own / built.path.name)
        self._exported[graph_options] = own

    def fetch_graph(self, options: str, target: Path) -> bool:
        """Copy the ONNX file of which an engine was built, of any backend; False if there is none.

        Args:
            options: all that it depends on, as text.
            target: the path; its name is that of the kept file, by which it knows the weights beside it.
        """
        if options not in self._exported:
            return False
        _copy(self._exported[options], f"{target.name}*", target.parent)
        return True

    def measured(self, options: str, take: Callable[[], float]) -> float:
        """Return what is measured on an engine, at the first call only."""
        if options not in self._measured:
            self._measured[options] = take()
        return self._measured[options]


def _copy(folder: Path, names: str, target: Path) -> None:
    """Copy the files of a folder whose names match: weights over 2 GB lie in a file beside the ONNX file."""
    for path in folder.glob(names):
        shutil.copyfile(path, target / path.name)
