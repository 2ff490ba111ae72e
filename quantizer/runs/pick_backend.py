"""The stage of a run that chooses its backend: all candidates for this CPU, from one calibration, timed in turns."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from quantizer.config import RunConfig
from quantizer.engines import BuildResult
from quantizer.engines import Engine
from quantizer.engines import Inspection
from quantizer.engines import inspect_engine
from quantizer.engines import interleaved_latency
from quantizer.engines import load_engine
from quantizer.engines import medians
from quantizer.engines.candidates import cpu_candidates
from quantizer.engines.measure.trial import tried_build
from quantizer.errors import EngineError
from quantizer.errors import QuantizerError
from quantizer.export import export_onnx
from quantizer.quantizer import Quantizer
from quantizer.report.candidate_record import Candidate
from quantizer.report.candidate_record import EngineChoice
from quantizer.runs.choose_engine import FLOAT
from quantizer.runs.choose_engine import bound
from quantizer.runs.choose_engine import choose
from quantizer.runs.compare_outputs import check_engine
from quantizer.runs.compare_outputs import reference_outputs
from quantizer.runs.compare_outputs import tolerance
from quantizer.runs.measure import build_options
from quantizer.runs.run_context import RunContext
from quantizer.runs.run_context import engine_inputs
from quantizer.runs.run_engines import RunEngines
from quantizer.targets import profile
from quantizer.tasks import Batch
from quantizer.tasks import Row
from quantizer.tasks import batch_shape

__all__ = ["Picked", "pick_backend", "with_backend"]

_ROUNDS = 15


@dataclass(frozen=True)
class Picked:
    """The backend of a run.

    Attributes:
        config: the configuration with the backend.
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

    candidate: Candidate
    onnx: Path
    built: BuildResult
    engine: Engine


def with_backend(config: RunConfig, name: str) -> RunConfig:
    """Return the configuration with another backend."""
    return config.model_copy(
        update={"quantizer": config.quantizer.model_copy(update={"backend": name, "candidates": ()})}
    )


def pick_backend(
    context: RunContext, config: RunConfig, quantizer: Quantizer, rows: list[Row], folder: Path, among: Sequence[str]
) -> Picked:
    """Return the backend with the fastest engine, and what was tried.

    Where an engine in float is the fastest, the run goes on with that backend, so that its ``float.engine`` is the
    fastest of all; unless that backend has no engine in INT8.

    Args:
        context: the model and its task.
        config: the configuration; its engines are timed at the shape of its report.
        quantizer: a calibrated quantizer.
        rows: what engines run on while their outputs are compared and they are timed.
        folder: the folder of the run.
        among: the backends to choose from; empty: all that ``auto`` tries.

    Raises:
        EngineError: nothing is right and runs here, or only engines in float.
    """
    names, missing = cpu_candidates(among)
    report = config.report
    batch = context.task.inputs.filled(context.task.samples(rows), report.latency_batch, report.latency_sequence)
    failed: list[Candidate] = []
    tried: dict[str, _Tried] = {}
    quantizers = {quantizer.config.backend: quantizer}
    with tempfile.TemporaryDirectory(dir=folder) as scratch, context.timer("choose the engine"):
        for name in names:
            for dtype in (FLOAT, config.quantizer.dtype):
                candidate = Candidate(backend=name, format=dtype)
                context.timer.say(f"  {candidate.name}")
                try:
                    if dtype != FLOAT and name not in quantizers:
                        quantizers[name] = quantizer.for_backend(name)
                    model = context.model if dtype == FLOAT else quantizers[name].quantize(context.model)
                    using = None if dtype == FLOAT else quantizers[name]
                    tried[candidate.name] = _built(context, config, candidate, model, using, batch, Path(scratch))
                except QuantizerError as error:
                    failed.append(Candidate(backend=name, format=dtype, verdict=f"failed: {error}"))
                    context.timer.say(f"  {candidate.name} failed: {error}")
        calls = {name: partial(one.engine, engine_inputs(one.engine, batch)) for name, one in tried.items()}
        times = medians(interleaved_latency(calls, rounds=_ROUNDS)) if calls else {}
        timed = [replace(one.candidate, milliseconds=(1000 * times[name],)) for name, one in tried.items()]
        size, sequence = batch_shape(batch)
        shape = f"batch {size}" if sequence is None else f"{size} x {sequence}"
        choice = bound(
            choose([*timed, *failed], [shape], missing),
            lambda candidate: _inspected(config, candidate, tried[candidate.name].built.path),
        )
        name = _usable(choice)
        config = with_backend(config, name)
        engines = RunEngines(context, config, folder)
        for one in tried.values():
            if one.candidate.backend == name:
                engines.adopt("float" if one.candidate.format == FLOAT else "engine", one.onnx, one.built)
    return Picked(config, quantizers[name], choice, engines)


def _built(
    context: RunContext,
    config: RunConfig,
    candidate: Candidate,
    model: nn.Module,
    quantizer: Quantizer | None,
    batch: Batch,
    folder: Path,
) -> _Tried:
    """Export, build and check one candidate.

    Args:
        model: the float model, or the frozen proxy.
        quantizer: what made the proxy; None: the model is the float one.

    Raises:
        QuantizerError: it cannot be built or run, or computes something else than PyTorch.
    """
    name, opset, example = candidate.backend, config.export.opset, context.task.example()
    # One file of the float model is for all.
    path = folder / ("float.onnx" if quantizer is None else f"{name}.onnx")
    if quantizer is not None:
        quantizer.export(model, path, example, opset=opset)
    elif not path.exists():
        export_onnx(model, path, example, opset=opset, dtype=torch.float32)
    threads, report = config.engine.threads, config.report
    precision = config.engine.inference_precision if profile(name).inference_precisions else None
    options = replace(build_options(config), inference_precision=precision)
    size = {"batch": report.latency_batch, "sequence": report.latency_sequence}
    engine_path = folder / f"{candidate.name}.engine".replace(" ", "-")
    built = tried_build(name, path, engine_path, options, threads=threads, **size)
    engine = load_engine(name, built.path, threads=threads)
    plain = reference_outputs(context.model, [batch], engine.output_names)
    expected = plain if quantizer is None else reference_outputs(model, [batch], engine.output_names)
    computed = torch.float32 if precision is None else getattr(torch, precision)
    checks = check_engine(engine, expected, plain, tolerance(None, quantizer is not None, computed))
    far = [check.float_db for check in checks if check.float_db is not None]
    return _Tried(replace(candidate, sqnr_db=min(far, default=None)), path, built, engine)


def _inspected(config: RunConfig, candidate: Candidate, path: Path) -> Inspection:
    batch, sequence = config.report.latency_batch, config.report.latency_sequence
    return inspect_engine(candidate.backend, path, threads=config.engine.threads, batch=batch, sequence=sequence)


def _usable(choice: EngineChoice) -> str:
    """Return the backend to go on with: the fastest one that has an engine in low precision.

    Raises:
        EngineError: none has.
    """
    quantized = [one for one in choice.candidates if one.format != FLOAT and one.milliseconds]
    if not quantized:
        reasons = "; ".join(f"{one.name}: {one.verdict}" for one in choice.candidates if one.format != FLOAT)
        raise EngineError(f"no quantized engine is right and runs here: {reasons}")
    fastest = choice.candidates[0].backend
    return fastest if any(one.backend == fastest for one in quantized) else quantized[0].backend
