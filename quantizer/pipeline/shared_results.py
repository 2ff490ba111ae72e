"""One float model as ONNX files and engines, each made once for all runs that want it with the same options.

The calibrations of one model on one set of rows, and their rankings, once for all runs that have them in common.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

from torch import nn

from quantizer.calibration.make_plan import sees_the_same
from quantizer.engines import BuildResult
from quantizer.quantizer import Quantizer
from quantizer.settings import settings_of
from quantizer.tasks import Batch


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


class Calibrations:
    """The statistics of calibrations, for several quantizers of one model; the batches are the same for all.

    A quantizer with the settings of an earlier one gets its plan; one with other settings, such as another backend or
    percentile, gets the statistics, of which its plan is made as if it had seen the batches itself.

    Attributes:
        has_head: whether the head of the task was fitted, which needs the float model alone.
    """

    def __init__(self) -> None:
        # Only calibrated, so that no fallback of a run is in them.
        self._known: list[Quantizer] = []
        self._ranked: dict[int, tuple[str, nn.Module]] = {}
        self.has_head = False

    def calibrate(self, quantizer: Quantizer, model: nn.Module, batches: Sequence[Batch]) -> None:
        """Calibrate a quantizer, on the batches only if no earlier one has seen in them what it needs."""
        quantizer.inherit(self._same(quantizer, model, batches))

    def amp(self, quantizer: Quantizer, settings: str, measure: Callable[[Quantizer], nn.Module]) -> nn.Module:
        """Return the amp proxy of a quantizer, that of an earlier one if its configuration and settings are equal."""
        place = next((place for place, known in enumerate(self._known) if known.config == quantizer.config), None)
        if place is None:
            return measure(quantizer)
        if place not in self._ranked or self._ranked[place][0] != settings:
            self._ranked[place] = settings, measure(self._known[place])
        quantizer.inherit(self._known[place])
        return self._ranked[place][1]

    def _same(self, quantizer: Quantizer, model: nn.Module, batches: Sequence[Batch]) -> Quantizer:
        config = quantizer.config
        for known in self._known:
            if known.config == config:
                return known
        new = Quantizer(config)
        # The weight of a convolution has three axes or more.
        convolves = any(parameter.dim() > 2 for parameter in model.parameters())
        alike = (
            known
            for known in self._known
            if sees_the_same(settings_of(known.config), settings_of(config), convolves=convolves)
        )
        like = next(alike, None)
        if like is None:
            new.calibrate(model, batches)
        else:
            new.inherit(like)
        self._known.append(new)
        return new
