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
        self._graphs: dict[str, Path] = {}
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
        _copy(built.path, target)
        return replace(built, path=target / built.path.name)

    def keep(self, options: str, built: BuildResult) -> None:
        """Copy an engine and its ONNX file, for the runs that follow."""
        own = self._folder / f"float-{len(self._built)}"
        own.mkdir()
        _copy(built.path, own)
        self._built[options] = replace(built, path=own / built.path.name)

    def fetch_graph(self, options: str, target: Path) -> bool:
        """Copy the ONNX file of the float model to a path; False if there is none.

        Args:
            options: all that it depends on, as text.
            target: the path.
        """
        if options not in self._graphs:
            return False
        shutil.copyfile(self._graphs[options], target)
        return True

    def keep_graph(self, options: str, graph: Path) -> None:
        """Copy the ONNX file of the float model, for engines of other backends."""
        self._graphs[options] = self._folder / f"float-{len(self._graphs)}.onnx"
        shutil.copyfile(graph, self._graphs[options])

    def measured(self, options: str, take: Callable[[], float]) -> float:
        """Return what is measured on an engine, at the first call only."""
        if options not in self._measured:
            self._measured[options] = take()
        return self._measured[options]


def _copy(engine: Path, target: Path) -> None:
    """Copy the files of an engine: those of its name, whatever their endings."""
    for path in engine.parent.glob(f"{engine.stem}.*"):
        shutil.copyfile(path, target / path.name)
