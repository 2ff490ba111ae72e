"""The two engines of a run in its folder: that of the quantized model, and that of the float model beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from quantizer.config import RunConfig
from quantizer.engines import BuildResult, Engine, load_engine, runs_here
from quantizer.engines.candidates import Variant
from quantizer.export import export_onnx
from quantizer.quantizer import Quantizer
from quantizer.runs.measure import FLOAT_STEM, QUANTIZED_STEM, build_options, float_options, run_sizes
from quantizer.runs.outputs.right_engine import OnlySizes
from quantizer.runs.placement.price_groups import EngineFiles, Timing
from quantizer.runs.run_context import RunContext
from quantizer.runs.workload.float_engines import copy_files


class RunEngines:
    """Exports and builds the engines of a run, each anew only if its model has changed.

    Attributes:
        float_name: the backend and the type of the float engine, such as ``openvino bfloat16``.
    """

    def __init__(self, context: RunContext, config: RunConfig, folder: Path) -> None:
        self.float_name = Variant(
            backend=config.quantizer.backend, dtype=None, precision=config.engine.inference_precision
        ).name
        self._context = context
        self._config = config
        self._folder = folder
        self._built: dict[str, BuildResult] = {}
        self._loaded: dict[str, Engine] = {}
        self._is_refused = False
        self._back: frozenset[str] | None = None

    @property
    def runs_here(self) -> bool:
        """True if this machine has the device of the engines."""
        return runs_here(self._config.quantizer.backend)

    @property
    def built(self) -> dict[str, BuildResult]:
        """The engines ``engine`` and ``float``, as they were built last."""
        return dict(self._built)

    @property
    def timing(self) -> Timing:
        """Conditions in which the engines are timed."""
        return Timing(
            backend=self._config.quantizer.backend,
            threads=self._config.engine.threads,
            options=repr(build_options(self._config, self._context)),
            sizes=run_sizes(self._config, self._context),
        )

    def files(self, stem: str) -> EngineFiles:
        """Return the files of an engine."""
        return EngineFiles(onnx=self._folder / f"{stem}.onnx", engine=self._folder / f"{stem}.engine")

    def build(self, quantizer: Quantizer, quantized: nn.Module, *, trained: bool = False) -> dict[str, BuildResult]:
        """Return the engines ``engine`` and ``float``, built of the frozen proxy and of the float model."""
        chosen = quantizer.chosen_fallback
        back = None if trained else frozenset(() if chosen is None else chosen.reasons())
        self._fetch_float()
        missing = {} if "float" in self._built else {"float": self.files(FLOAT_STEM)}
        if "engine" not in self._built or back is None or back != self._back:
            missing["engine"] = self.files(QUANTIZED_STEM)
        if not missing:
            return self.built
        opset, example, timer = self._config.export.opset, self._context.feed.example(), self._context.timer
        with timer("export"):
            if "float" in missing:
                export_float(self._context, opset, missing["float"].onnx)
            if "engine" in missing:
                quantizer.export(
                    quantized, missing["engine"].onnx, example, opset=opset, dynamic_axes=self._context.feed.sizes
                )
        with timer("build the engines"):
            for name, files in missing.items():
                self._loaded.pop(name, None)
                self._is_refused = self._is_refused and name != "engine"
                self._built[name] = self.build_file(files.onnx, files.engine)
                if name == "float" and self._context.floats is not None:
                    self._context.floats.keep(float_options(self._config), _graph_options(opset), self._built[name])
        self._back = back
        return self.built

    def _fetch_float(self) -> None:
        """Take the engine of the float model from a run before this one, if there was one with the same options."""
        if "float" not in self._built and self._context.floats is not None:
            found = self._context.floats.fetch(float_options(self._config), self._folder)
            self._built |= {} if found is None else {"float": found}

    def build_file(self, onnx: Path, engine: Path) -> BuildResult:
        """Build an engine with the options of the run."""
        return self._context.timer.build(
            self._config.quantizer.backend, onnx, engine, build_options(self._config, self._context)
        )

    def build_for(self, name: str, only_sizes: OnlySizes) -> tuple[BuildResult, Engine]:
        """Build an engine anew of its file, for some sizes alone, and load it."""
        files, backend = self.files(FLOAT_STEM if name == "float" else QUANTIZED_STEM), self._config.quantizer.backend
        options = replace(build_options(self._config, self._context), only_sizes=only_sizes)
        built = self._context.timer.build(backend, files.onnx, files.engine, options)
        self._built[name] = built
        self._loaded[name] = load_engine(backend, built.path, threads=self._config.engine.threads)
        return built, self._loaded[name]

    def refuse(self) -> None:
        """Let the quantized engine not be loaded any more: it computes wrongly."""
        self._is_refused = True

    def load(self) -> dict[str, Engine]:
        """Return the engines that were built, but not a refused one; none if they need a GPU that is not here."""
        backend, threads = self._config.quantizer.backend, self._config.engine.threads
        if not self.runs_here:
            return {}
        for name in self._built.keys() - self._loaded.keys():
            self._loaded[name] = load_engine(backend, self._built[name].path, threads=threads)
        return {name: self._loaded[name] for name in self._built if not (self._is_refused and name == "engine")}

    def adopt(self, name: str, onnx: Path, built: BuildResult, engine: Engine) -> None:
        """Take an engine that was built and loaded elsewhere of the same model, with the file that it was built of."""
        files = self.files(FLOAT_STEM if name == "float" else QUANTIZED_STEM)
        onnx.replace(files.onnx)
        built.path.replace(files.engine)
        self._built[name] = replace(built, path=files.engine)
        self._loaded[name] = engine
        self._back = frozenset()


def export_float(context: RunContext, opset: int, path: Path) -> None:
    """Write the ONNX file of the float model, exported or copied from a run before this one."""
    floats = context.floats
    if floats is not None and floats.fetch_graph(_graph_options(opset), path):
        return
    if (made := context.exported.get(opset)) is not None and made.exists():
        if made != path:
            copy_files(made.parent, f"{made.name}*", path.parent)
        return
    feed = context.feed
    export_onnx(context.model, path, feed.example(), opset=opset, dtype=torch.float32, axes=feed.sizes)
    if floats is not None:
        floats.keep_graph(_graph_options(opset), path)
    context.exported[opset] = path


def _graph_options(opset: int) -> str:
    """Return all that the ONNX file of the float model depends on besides it, as text."""
    return f"opset {opset}"


def nearest_form(
    engines: Mapping[str, Engine], quantizer: Quantizer, model: nn.Module
) -> dict[str, nn.Module | Engine]:
    """Return the engine; if it cannot run here, a simulation of its half precision, but nothing for float32."""
    if engines:
        return {"engine": engines["engine"]} if "engine" in engines else {}
    half = quantizer.config.target.torch_dtype is not torch.float32
    return {"simulation": quantizer.simulate(model)} if half else {}
