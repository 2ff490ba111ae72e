"""Measurements of a run's engines: latency, in turns, and memory, each engine in its own process."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from quantizer.config import RunConfig
from quantizer.engines import BuildResult
from quantizer.engines import Engine
from quantizer.engines import interleaved_latency
from quantizer.engines import peak_memory_mib
from quantizer.report import Latency
from quantizer.report import MemoryEntry
from quantizer.report import latency_entries
from quantizer.report import memory_entries
from quantizer.runs.run_context import RunContext
from quantizer.runs.run_context import engine_inputs
from quantizer.tasks import batch_shape

__all__ = ["measure_latency", "measure_memory"]

_LATENCY_ROUNDS = 15


def measure_latency(context: RunContext, config: RunConfig, engines: Mapping[str, Engine]) -> Latency | None:
    """Return the latency of each engine at the shape of the configuration; None if there are no engines."""
    report = config.report
    if not engines:
        return None
    batch = context.task.random_batch(report.latency_batch, report.latency_sequence)
    with context.timer("measure latency"):
        calls = {name: partial(engine, engine_inputs(engine, batch)) for name, engine in engines.items()}
        seconds = interleaved_latency(calls, rounds=_LATENCY_ROUNDS)
    return Latency(
        batch=report.latency_batch,
        sequence=batch_shape(batch)[1],
        threads=config.engine.threads,
        engines=latency_entries({name: [1000 * s for s in times] for name, times in seconds.items()}),
    )


def measure_memory(context: RunContext, config: RunConfig, built: Mapping[str, BuildResult]) -> tuple[MemoryEntry, ...]:
    """Return the peak memory of each engine beyond that of an empty process."""
    with context.timer("measure memory"):
        peaks = {
            name: peak_memory_mib(
                result.path,
                config.quantizer.backend,
                batch=config.report.latency_batch,
                sequence=config.report.latency_sequence,
                threads=config.engine.threads,
            )
            for name, result in built.items()
        }
    return memory_entries({name: peak.peak_mib - peak.baseline_mib for name, peak in peaks.items()})
