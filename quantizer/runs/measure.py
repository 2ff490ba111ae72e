"""A run's engines: options of their build, latency, in turns, and memory, each engine in its own process."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from quantizer.common.data.sizes import BATCH, SEQUENCE
from quantizer.config import RunConfig
from quantizer.engines import BuildOptions, BuildResult, Engine, InputSizes, interleaved_latency, peak_memory_mib
from quantizer.errors import EngineError
from quantizer.report import EngineFile, Latency, MemoryEntry, latency_entries, memory_entries, text
from quantizer.report.record import EngineChoice
from quantizer.runs.run_context import RunContext, engine_inputs
from quantizer.tasks import batch_shape

FLOAT_STEM, QUANTIZED_STEM = "float", "model"
"""The names of the two files of each engine, without their endings."""

NOT_VERIFIED = "not verified: built ahead of time, and there is no GPU here"

_LATENCY_ROUNDS, _LATENCY_SECONDS = 15, 30.0


def run_sizes(config: RunConfig, context: RunContext) -> InputSizes:
    """Return the sizes at which engines are run and timed, by name where they are not those of a task."""
    sizes, report = context.feed.sizes, config.report
    asked = {BATCH: report.latency_batch, SEQUENCE: report.latency_sequence}
    named = {} if sizes is None else {name: asked.get(name, size) for name, size in sizes.usual.items()}
    return InputSizes(report.latency_batch, report.latency_sequence, named)


def build_options(config: RunConfig, context: RunContext | None = None) -> BuildOptions:
    """Return the options with which a run builds its engines."""
    sizes = None if context is None else context.feed.sizes
    return BuildOptions(
        dynamic={
            **({} if sizes is None else sizes.ranges),
            BATCH: config.export.dynamic.batch,
            SEQUENCE: config.export.dynamic.sequence,
        },
        compute_capability=config.engine.compute_capability,
        inference_precision=config.engine.inference_precision,
        strip_weights=config.engine.strip_weights,
        compiled=config.engine.compiled,
    )


def float_options(config: RunConfig) -> str:
    """Return all that a float engine depends on besides its model, as text."""
    return f"{config.quantizer.backend} {config.export.model_dump_json()} {config.engine.model_dump_json()}"


def engine_file(backend: str, built: BuildResult, *, ran: bool, scored: bool) -> EngineFile:
    """Return the record of the engine's file."""
    verified = "ran here, and was scored" if scored else "ran here, and its outputs were compared"
    if not ran:
        verified = NOT_VERIFIED
    return EngineFile(backend=backend, path=built.path.name, build_seconds=built.seconds, verified=verified)


def measure_latency(
    context: RunContext, config: RunConfig, engines: Mapping[str, Engine], reference: str
) -> Latency | None:
    """Return the latency of each engine at the shape of the configuration; None if there are no engines."""
    report = config.report
    if not engines:
        return None
    batch = context.feed.random_batch(report.latency_batch, report.latency_sequence)
    with context.timer("measure latency"):
        calls = {name: partial(engine, engine_inputs(engine, batch)) for name, engine in engines.items()}
        seconds = interleaved_latency(calls, rounds=_LATENCY_ROUNDS, seconds=_LATENCY_SECONDS)
    return Latency(
        batch=report.latency_batch,
        sequence=batch_shape(batch)[1],
        threads=config.engine.threads,
        reference=reference,
        engines=latency_entries({name: [1000 * s for s in times] for name, times in seconds.items()}),
    )


def with_deployed(
    choice: EngineChoice | None, latency: Latency | None, backend: str, is_float_right: bool = True
) -> EngineChoice | None:
    """Return a choice with the file of the run that is the fastest, now that groups may have gone back to float."""
    entries = {} if latency is None else {entry.name: entry for entry in latency.engines}
    if choice is None or not {"float", "engine"} <= set(entries):
        return choice
    low, plain = (f"{stem}.engine" for stem in (QUANTIZED_STEM, FLOAT_STEM))
    ratio = entries["engine"].ratio_to_float
    if ratio >= 1:
        return replace(choice, deploy=f"{low}, {text.times(ratio)} as fast as {plain} beside it")
    if not is_float_right:
        return choice
    best, lost = choice.candidates[0], f"{plain}; the quantized {low} beside it has {text.times(ratio)} its speed"
    other = f"; {best.name} was faster than both" if best.is_float and best.backend != backend else ""
    return replace(choice, deploy=f"{lost}{other}")


def measure_memory(context: RunContext, config: RunConfig, built: Mapping[str, BuildResult]) -> tuple[MemoryEntry, ...]:
    """Return the peak memory of each engine beyond that of an empty process; nothing, with a warning, if that fails.

    It is the last figure of a run that is complete without it.
    """
    sizes = run_sizes(config, context)

    def peak_mib(name: str) -> float:
        path, threads = built[name].path, config.engine.threads
        peak = peak_memory_mib(path, config.quantizer.backend, threads=threads, sizes=sizes)
        return peak.peak_mib - peak.baseline_mib

    def known_or_measured(name: str) -> float:
        if name != "float" or context.floats is None:
            return peak_mib(name)
        return context.floats.measured(f"{float_options(config)} memory {sizes}", partial(peak_mib, name))

    with context.timer("measure memory"):
        try:
            peaks = {name: known_or_measured(name) for name in built}
        except EngineError as error:
            warnings.warn(f"memory was not measured, and the result is complete without it: {error}", stacklevel=2)
            return ()
    return memory_entries(peaks)
