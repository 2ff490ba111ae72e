"""The stage of a run that chooses its engine: all candidates for this CPU, from one calibration, timed in turns."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from quantizer.common.progress import counted
from quantizer.config import RunConfig
from quantizer.engines import BuildResult, Engine, Inspection, inspect_engine, interleaved_latency, load_engine, medians
from quantizer.engines.candidates import Variant, cpu_candidates
from quantizer.quantizer import Quantizer
from quantizer.report.record import Candidate, EngineChoice
from quantizer.runs.choose_engine import (
    FAILURES,
    NO_FASTER,
    bound,
    candidate_line,
    choose,
    failed,
    named,
    not_built,
    quantized_of,
    require_sites,
    timed,
)
from quantizer.runs.measure import FLOAT_STEM, build_options, run_sizes
from quantizer.runs.outputs.check_batches import check_batches, checked_shapes
from quantizer.runs.outputs.compare_outputs import References, check_engine, far_from_float, tolerance
from quantizer.runs.placement.rough_plan import RoughTrials, rough_engine
from quantizer.runs.ranks.variants import Calibrated, variants_of
from quantizer.runs.run_context import RunContext, engine_inputs
from quantizer.runs.run_engines import RunEngines, export_float
from quantizer.runs.saved.kept_engines import KeptEngines
from quantizer.runs.workload.workload import Scorer
from quantizer.targets import AUTO
from quantizer.tasks import Batch, Row, batch_shape

_ROUNDS, _SECONDS = 15, 30.0
"""Of all engines in turns; slow ones have fewer rounds."""


@dataclass(frozen=True)
class Picked:
    """The backend of a run.

    Attributes:
        config: the configuration with the backend, and what else the chosen engine is built with.
        quantizer: the quantizer for it, from the same calibration.
        choice: what was tried.
        engines: its engines, of the float model and of the plan without a fallback.
    """

    config: RunConfig
    quantizer: Quantizer
    choice: EngineChoice
    engines: RunEngines


@dataclass(frozen=True)
class _Tried:
    """An engine that was built and is right; its record has no times yet."""

    variant: Variant
    candidate: Candidate
    onnx: Path
    built: BuildResult
    engine: Engine


def chooses(config: RunConfig) -> bool:
    """Return whether a run chooses its engine: with ``auto``, unless there is a GPU and no backend is named."""
    wanted = config.quantizer
    return wanted.backend == AUTO and (bool(wanted.candidates) or not torch.cuda.is_available())


def with_backend(config: RunConfig, name: str) -> RunConfig:
    """Return the configuration with another backend."""
    return config.model_copy(
        update={"quantizer": config.quantizer.model_copy(update={"backend": name, "candidates": ()})}
    )


def _with_variant(config: RunConfig, variant: Variant, quantizer: Quantizer) -> RunConfig:
    """Return the configuration of a run that goes on with one variant, and with the settings of its quantizer."""
    ranges = {"ranges": quantizer.config.activations.ranges}
    activations = config.quantizer.activations.model_copy(update=ranges if variant.dynamic else {})
    told = {"inference_precision": variant.precision, "compiled": variant.compiled}
    chosen = {"backend": variant.backend, "candidates": (), "activations": activations}
    return config.model_copy(
        update={
            "quantizer": config.quantizer.model_copy(update=chosen),
            "engine": config.engine.model_copy(update=told),
        }
    )


def pick_backend(
    context: RunContext,
    config: RunConfig,
    calibrated: Calibrated,
    scoring: Scorer,
    rows: list[Row],
    folder: Path,
    among: Sequence[str],
    kept: KeptEngines,
) -> Picked:
    """Return the backend with the fastest engine, and what was tried.

    Where an engine in float is the fastest, the run goes on with that backend, so that its ``float.engine`` is the
    fastest of all; unless that backend has no engine in INT8.

    Args:
        context: the model and its task.
        config: the configuration; its engines are timed at the shape of its report.
        calibrated: quantizers of one calibration, the one that was calibrated first.
        scoring: scores each candidate.
        rows: what engines run on while their outputs are compared and they are timed.
        folder: the folder of the run.
        among: the backends to choose from; empty: all that ``auto`` tries.
        kept: builds the engines, but those that a run before this one has built until it was stopped.
    """
    _, missing = cpu_candidates(among)
    report = config.report
    batch = context.feed.inputs.filled(context.feed.samples(rows), report.latency_batch, report.latency_sequence)
    variants = variants_of(config, among)
    with tempfile.TemporaryDirectory(dir=folder) as scratch, context.timer("choose the engine"):
        checked = check_batches(context.feed, context.feed.samples(rows), checked_shapes(config))
        maker = _Maker(context, config, calibrated, scoring, batch, checked, Path(scratch), kept)
        tried, out = maker.all(variants)
        engines = {name: one.engine for name, one in tried.items()}
        times, broken = timed(engines, partial(_latency, batch), partial(_called, batch)) if engines else ({}, {})
        out += [failed(tried.pop(name).candidate, why) for name, why in broken.items()]
        ran = [replace(one.candidate, milliseconds=(1000 * times[name],)) for name, one in tried.items()]
        choice = bound(
            choose([*ran, *out], [_shape(batch)], missing),
            lambda candidate: _inspected(context, config, candidate, tried[candidate.name].built.path),
        )
        low, plain = _pair(choice, tried)
        used = maker.quantizers[low.variant.backend, low.variant.dynamic]
        config = _with_variant(config, low.variant, used)
        both = RunEngines(context, config, folder)
        if plain is not None:
            both.float_name = plain.variant.name
            both.adopt("float", plain.onnx, plain.built, plain.engine)
        both.adopt("engine", low.onnx, low.built, low.engine)
    return Picked(config, used, choice, both)


def _shape(batch: Batch) -> str:
    size, sequence = batch_shape(batch)
    return f"batch {size}" if sequence is None else f"{size} x {sequence}"


class _Maker:
    """Maker of the candidates of a run."""

    def __init__(
        self,
        context: RunContext,
        config: RunConfig,
        calibrated: Calibrated,
        scoring: Scorer,
        batch: Batch,
        checked: Sequence[Batch],
        folder: Path,
        kept: KeptEngines,
    ) -> None:
        self.quantizers = dict(calibrated)
        self._context = context
        self._config = config
        self._calibrated = next(iter(calibrated.values()))
        self._scoring = scoring
        self._folder = folder
        self._kept = kept
        self._frozen: dict[tuple[str, bool], nn.Module] = {}
        self._trials = RoughTrials(self._rough, [batch])
        self._references = References(checked, apart=context.feed.rows_apart)

    def all(self, variants: Sequence[Variant]) -> tuple[dict[str, _Tried], list[Candidate]]:
        """Return the candidates that are right, by name, and the records of the others."""
        tried: dict[str, _Tried] = {}
        out: list[Candidate] = []
        fallback = self._config.fallback
        budget = fallback is not None and fallback.max_drop is not None
        names = [variant.name for variant in variants]
        with counted(variants, "candidates", unit="engine", note=named) as steps:
            for variant in steps:
                candidate, start = Candidate(backend=variant.backend, format=variant.format), time.perf_counter()
                if variant.dynamic and not budget and f"{variant.backend} {variant.dtype}" in tried:
                    out.append(not_built(candidate, NO_FASTER))
                    continue
                try:
                    if (why := self._too_slow(variant, tried)) is None:
                        tried[variant.name] = self._tried(variant, candidate)
                        candidate = tried[variant.name].candidate
                    else:
                        candidate = not_built(candidate, why)
                        out.append(candidate)
                except FAILURES as error:
                    candidate = failed(candidate, error)
                    out.append(candidate)
                self._context.timer.tell(candidate_line(candidate, names, time.perf_counter() - start))
        return tried, out

    def _tried(self, variant: Variant, candidate: Candidate) -> _Tried:
        """Export, build, check and score one candidate."""
        proxy, onnx = self._exported(variant)
        built, engine = self._built(variant, onnx, self._folder / f"{variant.file_name}.engine")
        plain = self._references.of(self._context.model, engine.output_names)
        expected = plain if proxy is None else self._references.of(proxy, engine.output_names)
        computed = torch.float32 if variant.precision is None else getattr(torch, variant.precision)
        checks = check_engine(engine, expected, plain, tolerance(None, proxy is not None, computed))
        # At the size that is timed, the first: texts of others may be longer than all that calibrated.
        timed = [check for check in checks if check.size == checks[0].size]
        found = replace(
            candidate,
            sqnr_db=far_from_float(timed),
            score_difference=self._kept.difference(built.path, partial(self._scoring.difference, variant.name, engine)),
        )
        return _Tried(variant, found, onnx, built, engine)

    def _built(self, variant: Variant, onnx: Path, path: Path) -> tuple[BuildResult, Engine]:
        config, name = self._config, variant.backend
        threads = config.engine.threads
        options = replace(
            build_options(config, self._context), inference_precision=variant.precision, compiled=variant.compiled
        )
        sizes = run_sizes(config, self._context)
        built = self._kept.build(name, onnx, path, options, threads=threads, sizes=sizes)
        return built, load_engine(name, built.path, threads=threads)

    def _too_slow(self, variant: Variant, tried: Mapping[str, _Tried]) -> str | None:
        """Return why a backend needs no plan; None: it needs one, or has it."""
        if variant.dtype is None or (variant.backend, False) in self.quantizers:
            return None
        rivals = {name: one.engine for name, one in tried.items() if one.variant.dtype is not None}
        planned = {backend for backend, dynamic in self._frozen if not dynamic}
        return self._trials.too_slow(variant, self._calibrated, rivals, planned)

    def _rough(self, variant: Variant, calibrated: Quantizer) -> Engine:
        def build(onnx: Path, path: Path) -> Engine:
            return self._built(variant, onnx, path)[1]

        context, name, opset = self._context, variant.backend, self._config.export.opset
        stem, example = self._folder / f"{name}-rough", context.feed.example()
        return rough_engine(calibrated, name, context.model, example, stem, build, opset, context.feed.sizes)

    def _exported(self, variant: Variant) -> tuple[nn.Module | None, Path]:
        """Return the frozen proxy, None for a variant in float, and its file; each is made once for all variants."""
        example, opset = self._context.feed.example(), self._config.export.opset
        if variant.dtype is None:
            # One file of the float model is for all.
            path = self._folder / f"{FLOAT_STEM}.onnx"
            if not path.exists():
                export_float(self._context, opset, path)
            return None, path
        key = variant.backend, variant.dynamic
        path = self._folder / f"{variant.backend}{'-dynamic' if variant.dynamic else ''}.onnx"
        if key not in self._frozen:
            if key not in self.quantizers:
                ranges = "dynamic" if variant.dynamic else None
                self.quantizers[key] = self._calibrated.for_backend(variant.backend, ranges=ranges)
            if variant.dynamic:
                require_sites(self.quantizers[key])
            proxy = self.quantizers[key].quantize(self._context.model)
            self.quantizers[key].export(proxy, path, example, opset=opset, dynamic_axes=self._context.feed.sizes)
            self._frozen[key] = proxy
        return self._frozen[key], path


def _latency(batch: Batch, engines: dict[str, Engine]) -> dict[str, float]:
    # Servers call an engine with arrays: their conversion does not count.
    calls = {name: partial(engine, engine_inputs(engine, batch)) for name, engine in engines.items()}
    return medians(interleaved_latency(calls, rounds=_ROUNDS, seconds=_SECONDS))


def _called(batch: Batch, engine: Engine) -> object:
    return engine(engine_inputs(engine, batch))


def _inspected(context: RunContext, config: RunConfig, candidate: Candidate, path: Path) -> Inspection:
    return inspect_engine(
        candidate.backend,
        path,
        threads=config.engine.threads,
        sizes=run_sizes(config, context),
    )


def _pair(choice: EngineChoice, tried: dict[str, _Tried]) -> tuple[_Tried, _Tried | None]:
    """Return the engines to go on with: the fastest quantized one, of the fastest backend that has one, and in float.

    That in float is the fastest of its backend, or the one whose types are those of the quantized one's rest: what a
    group costs in float is taken from it. If an engine in float won, it is that one.
    """
    ran = [tried[one.name] for one in choice.candidates if one.milliseconds]
    low = [tried[one.name] for one in quantized_of(choice)]
    best = ran[0]
    chosen = next((one for one in low if one.variant.backend == best.variant.backend), low[0])
    plain = [one for one in ran if one.variant.dtype is None and one.variant.backend == chosen.variant.backend]
    if best.variant.dtype is not None:
        plain.sort(key=lambda one: one.variant.precision != chosen.variant.precision)
    return chosen, plain[0] if plain else None
