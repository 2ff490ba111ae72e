"""Export, build and loading of a run's two engines: quantized and float."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantizer.config import RunConfig
from quantizer.engines import (
    BuildOptions,
    BuildResult,
    Engine,
    Inspection,
    load_engine,
    observe_engine,
    runs_here,
)
from quantizer.engines import backend as registered
from quantizer.engines.for_this_cpu import Variant
from quantizer.engines.measure import begin_build, shortest
from quantizer.export.exporter import export_onnx
from quantizer.pipeline.benchmark import build_options, run_sizes
from quantizer.pipeline.compare_outputs import OnlySizes
from quantizer.pipeline.context import RunContext, Runnable
from quantizer.pipeline.model_graphs import FLOAT_STEM, QUANTIZED_STEM, Graphs
from quantizer.pipeline.time_groups import EngineFiles, Timing
from quantizer.plan.site_plan import plan_digest
from quantizer.quantizer import Quantizer
from quantizer.report import collect_versions
from quantizer.tasks import Batch
from quantizer.utils import gpu
from quantizer.utils.content import content_digest
from quantizer.utils.cpu import cpu_flags, is_untrusted
from quantizer.utils.files import NO_STORE, Store
from quantizer.utils.files.store import copy_file

_STEMS = {"float": FLOAT_STEM, "engine": QUANTIZED_STEM}
"""File name of each engine, without suffix."""


@dataclass(frozen=True)
class BuiltEngine:
    """A loaded engine from elsewhere, with its ONNX file and build result."""

    files: EngineFiles
    built: BuildResult
    engine: Engine


class RunEngines:
    """Exports and builds the engines of a run, and rebuilds them only if the model has changed.

    A model with several graphs has an engine for each; together they count as one engine.

    Attributes:
        float_name: the backend and the precision of the float engine, such as ``openvino bfloat16``.
        timed: the latencies with which a choice compared ``engine``, ``float`` and the fastest float engine, in
            milliseconds, by size; empty without a choice, and after an engine was built anew.
    """

    def __init__(self, context: RunContext, config: RunConfig, folder: Path, graphs: Graphs) -> None:
        self.float_name = Variant(
            backend=config.quantizer.backend, dtype=None, precision=config.engine.inference_precision
        ).name
        self.timed: dict[tuple[int, int | None], dict[str, Sequence[float]]] = {}
        self._context = context
        self._config = config
        self._folder = folder
        self._graphs = graphs
        self._built: dict[str, dict[str, BuildResult]] = {}
        self._loaded: dict[str, dict[str, Engine]] = {}
        self._assembled: dict[str, Runnable] = {}
        self._is_refused = False
        self._in_float: frozenset[str] | None = None
        self._inspected: dict[Path, Inspection] = {}

    @property
    def runs_here(self) -> bool:
        """True if the engines run on this machine."""
        return runs_here(self._config.quantizer.backend)

    @property
    def built(self) -> dict[str, BuildResult]:
        """Build results of ``engine`` and ``float``; several graphs are added up."""
        return {name: _together(list(graphs.values())) for name, graphs in self._built.items()}

    def files_of(self, name: str) -> list[Path]:
        """Return the engine files of ``engine`` or ``float``."""
        return [result.path for result in self._built[name].values()]

    @property
    def timing(self) -> Timing:
        """The conditions of latency measurements."""
        return Timing(
            backend=self._config.quantizer.backend,
            threads=self._config.engine.threads,
            options=repr(self.options()),
            sizes=run_sizes(self._config, self._context),
            exact=self._config.fallback is not None,
            inspected=self._inspected,
        )

    @property
    def usual_us(self) -> dict[str, float] | None:
        """Latencies of the engines ``low`` and ``plain`` at the usual size in a choice; None if not measured."""
        rows = self.timing.sizes.batch
        times = next((times for (batch, _), times in self.timed.items() if batch == rows), {})
        if not {"engine", "float"} <= times.keys():
            return None
        known = shortest({"low": times["engine"], "plain": times["float"]})
        return {name: 1000 * milliseconds for name, milliseconds in known.items()}

    def files(self, name: str, graph: str | None = None) -> EngineFiles:
        """Return the files of ``engine`` or ``float``, by default of the last graph."""
        return self._graphs.files(self._folder, _STEMS[name], graph or self._graphs.names[-1])

    def build(self, quantizer: Quantizer, quantized: nn.Module, *, trained: bool = False) -> dict[str, BuildResult]:
        """Build the engines ``engine`` and ``float`` from the frozen proxy and the float model."""
        chosen = quantizer.chosen_fallback
        in_float = None if trained else frozenset(() if chosen is None else chosen.reasons())
        missing = [] if "float" in self._built else ["float"]
        if "engine" not in self._built or in_float is None or in_float != self._in_float:
            missing.append("engine")
        if not missing:
            return self.built
        opset, graphs = self._config.export.opset, self._graphs
        with self._context.timer("export"):
            for graph in graphs.names if "float" in missing else ():
                export_float(self._context, graphs, graph, opset, self.files("float", graph).onnx)
            if "engine" in missing:
                places = {graph: self.files("engine", graph).onnx for graph in graphs.names}
                # A plan does not identify trained weights.
                kept = NO_STORE if trained else self._context.resume.engines
                export_quantized(quantizer, graphs, quantized, places, opset, kept)
        self._build_files(missing)
        self._in_float = in_float
        return self.built

    def build_float(self) -> dict[str, BuildResult]:
        """Build the engine of the float model as ``engine``, for a run that quantizes nothing."""
        if "engine" not in self._built:
            dtype = self._config.quantizer.target.float_model_dtype
            with self._context.timer("export"):
                for graph in self._graphs.names:
                    onnx = self.files("engine", graph).onnx
                    export_float(self._context, self._graphs, graph, self._config.export.opset, onnx, dtype)
                    # For a module, this file was only written to find the dynamic axes.
                    self.files("float", graph).onnx.unlink(missing_ok=True)
            self._build_files(["engine"])
        return self.built

    def _build_files(self, names: list[str]) -> None:
        """Build engines from their exported files."""
        backend, timer = self._config.quantizer.backend, self._context.timer
        with timer("build the engines"):
            for name in names:
                self._forget(name)
                self._is_refused = self._is_refused and name != "engine"
                # Other runs share the float engine.
                build = partial(built_once, self._context.floats, timer.build) if name == "float" else timer.build
                built: dict[str, BuildResult] = {}
                for graph in self._graphs.names:
                    files = self.files(name, graph)
                    built[graph] = build(backend, files.onnx, files.engine, self.options(graph))
                self._built[name] = built

    def _forget(self, name: str) -> None:
        self.timed = {}
        self._inspected.clear()
        self._loaded.pop(name, None)
        self._assembled.pop(name, None)

    def inspect(self) -> Inspection:
        """Return the precisions of the engine's layers; of the last graph if there are several."""
        timing, files = self.timing, self.files("engine")
        if files.engine in self._inspected:
            # Latency costs were measured in the same way.
            return self._inspected[files.engine]
        sizes = timing.sizes
        if self._graphs.several and self._context.task.reads != "text":
            # Without text inputs, the sequence length of a decoding step is bounded by the batch.
            sizes = replace(sizes, sequence=sizes.batch)
        return observe_engine(
            timing.backend,
            files.engine,
            files.onnx,
            threads=timing.threads,
            sizes=sizes,
            required=False,
        )

    def options(self, graph: str | None = None) -> BuildOptions:
        """Return the build options of a graph's engine."""
        graph = graph or self._graphs.names[-1]
        return build_options(self._config, self._graphs.dimensions(self._config, graph))

    def build_for(self, name: str, only_sizes: OnlySizes) -> tuple[BuildResult, Engine]:
        """Rebuild and load the engine of a single graph for fixed sizes."""
        files, backend, (graph,) = self.files(name), self._config.quantizer.backend, self._graphs.names
        options = replace(self.options(), only_sizes=only_sizes)
        built = self._context.timer.build(backend, files.onnx, files.engine, options)
        self._forget(name)
        self._built[name] = {graph: built}
        self._loaded[name] = {graph: load_engine(backend, built.path, threads=self._config.engine.threads)}
        return built, self._loaded[name][graph]

    def refuse(self) -> None:
        """Mark the quantized engine as wrong; it is not loaded again."""
        self._is_refused = True

    def graphs_of(self, name: str) -> dict[str, Engine]:
        """Return the loaded engine of each graph of ``engine`` or ``float``."""
        if name not in self._loaded:
            backend, threads = self._config.quantizer.backend, self._config.engine.threads
            self._loaded[name] = {
                graph: load_engine(backend, one.path, threads=threads) for graph, one in self._built[name].items()
            }
        return self._loaded[name]

    def load(self) -> dict[str, Runnable]:
        """Return the loaded engines except a refused one; empty if this machine lacks their device."""
        if not self.runs_here:
            return {}
        names = [name for name in self._built if not (self._is_refused and name == "engine")]
        for name in names:
            if name not in self._assembled:
                self._assembled[name] = self._graphs.assembled(self.graphs_of(name))
        return {name: self._assembled[name] for name in names}

    def adopt(self, name: str, made: Mapping[str, BuiltEngine]) -> None:
        """Adopt engines of all graphs that the choice of an engine built from the same model."""
        self._forget(name)
        self._built[name], self._loaded[name] = {}, {}
        for graph, built_engine in made.items():
            files = self.files(name, graph)
            for data in built_engine.files.onnx.parent.glob(f"{built_engine.files.onnx.name}?*"):
                data.replace(files.onnx.parent / data.name)
            built_engine.files.onnx.replace(files.onnx)
            built_engine.built.path.replace(files.engine)
            self._built[name][graph] = replace(built_engine.built, path=files.engine)
            self._loaded[name][graph] = built_engine.engine
        self._in_float = frozenset()


def _together(results: list[BuildResult]) -> BuildResult:
    """Return several build results as one, with the path of the last."""
    last, warnings = results[-1], tuple(warning for result in results for warning in result.warnings)
    size, seconds = sum(result.size_bytes for result in results), sum(result.seconds for result in results)
    return last if len(results) == 1 else BuildResult(last.path, size, seconds, warnings)


def export_quantized(
    quantizer: Quantizer, graphs: Graphs, quantized: nn.Module, places: Mapping[str, Path], opset: int, kept: Store
) -> None:
    """Write the ONNX file of each graph of a frozen model, or a copy of an earlier export from the same plan."""
    model = graphs.context.model
    plan: list[object] = []
    if kept.folder is not None:
        plan = [
            quantizer.config.model_dump_json(),
            quantizer.diff(model),
            plan_digest(quantizer.plan),
            quantizer.coverage.regions,
        ]
    for graph, place in places.items():
        module, axes, example = graphs.modules(quantized)[graph], graphs.axes(graph), graphs.example(graph)

        def export(module: nn.Module = module, place: Path = place, axes: Any = axes, example: Any = example) -> None:
            quantizer.export(module, place, example, opset=opset, dynamic_axes=axes)

        _export_once(kept, model, [graph, opset, axes, example, *plan], export, place)


def _export_once(kept: Store, model: nn.Module, inputs: list[object], export: Callable[[], None], path: Path) -> None:
    """Write an ONNX file of a model with ``export``, or copy an earlier one from the same inputs."""
    key = [] if kept.folder is None else ["onnx", collect_versions(), content_digest(model, inputs)]
    kept.get(key, export, path)


def export_float(
    context: RunContext,
    graphs: Graphs,
    graph: str,
    opset: int,
    path: Path,
    dtype: torch.dtype = torch.float32,
    others: Sequence[Batch] = (),
) -> None:
    """Write the ONNX file of a graph of the float model; copy an earlier export if possible.

    A new export is compared with the model on ``others``; see ``export_onnx``.
    """
    options = _float_options(graph, opset, dtype)

    def export() -> None:
        if (earlier := context.exported.get(options)) is not None and earlier.exists():
            if earlier != path:
                copy_file(earlier, path)
            return
        module = graphs.modules(context.exportable)[graph]
        example, axes = graphs.example(graph), graphs.axes(graph)

        def write() -> None:
            export_onnx(module, path, example, opset=opset, dtype=dtype, axes=axes, others=others)

        _export_once(context.resume.engines, context.model, [graph, opset, axes, example, dtype], write, path)
        context.exported[options] = path

    context.floats.get([options], export, path)


def forget_float(context: RunContext, graph: str, opset: int, dtype: torch.dtype = torch.float32) -> None:
    """Let the next ``export_float`` of a graph export it again."""
    options = _float_options(graph, opset, dtype)
    context.exported.pop(options, None)
    context.floats.drop([options])


def _float_options(graph: str, opset: int, dtype: torch.dtype) -> str:
    return f"{graph} opset {opset} {dtype}"


def built_once(
    kept: Store,
    build: Callable[..., BuildResult],
    backend: str,
    onnx: Path,
    engine: Path,
    options: BuildOptions,
    **more: Any,
) -> BuildResult:
    """Return a built engine, or a copy of an earlier one from the same file, options, packages and CPU."""
    key = _engine_key(backend, onnx, options, more)

    def make() -> dict[str, Any]:
        built = build(backend, onnx, engine, options, **more)
        return {"size_bytes": built.size_bytes, "seconds": built.seconds, "warnings": built.warnings}

    facts = kept.get(key, make, engine)
    # Native code of an earlier process is not trusted, but rebuilt.
    if is_untrusted(engine):
        kept.drop(key)
        facts = kept.get(key, make, engine)
    return BuildResult(engine, facts["size_bytes"], facts["seconds"], tuple(facts["warnings"]))


def begin_once(kept: Store, backend: str, onnx: Path, engine: Path, options: BuildOptions, **more: Any) -> None:
    """Begin a build in the trial process for a later ``built_once`` with ``tried_build``, unless it is stored."""
    if kept.find(_engine_key(backend, onnx, options, more)) is None:
        begin_build(backend, onnx, engine, options, **more)


def _engine_key(backend: str, onnx: Path, options: BuildOptions, more: Mapping[str, Any]) -> list[object]:
    # The kernels of a GPU are measured in its build.
    processor = (
        [gpu.description()] if registered(backend).device == "cuda" and gpu.is_present() else sorted(cpu_flags())
    )
    return ["engine", backend, options, more, collect_versions(), processor, onnx]


def nearest_form(engines: Mapping[str, Runnable], quantizer: Quantizer, model: nn.Module) -> dict[str, Runnable]:
    """Return the engine; if it does not run on this machine, a half-precision simulation, or nothing for float32."""
    if engines:
        return {"engine": engines["engine"]} if "engine" in engines else {}
    half = quantizer.config.target.torch_dtype is not torch.float32
    return {"simulation": quantizer.simulate(model)} if half else {}
