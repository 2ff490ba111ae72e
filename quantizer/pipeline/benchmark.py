"""The engines of a run: build options, latency in interleaved rounds, and memory in a process of their own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantizer.config import RunConfig
from quantizer.engines import BuildOptions, BuildResult, Engine, InputSizes, interleaved_latency, peak_memory_mib
from quantizer.errors import EngineError
from quantizer.pipeline.context import RunContext, Runnable, engine_inputs
from quantizer.pipeline.model_graphs import FLOAT_STEM, QUANTIZED_STEM, Graphs, open_sizes
from quantizer.report import EngineFile, Latency, MemoryEntry, RunRecord, latency_entries, memory_entries, text
from quantizer.report.record import TIE, EngineChoice
from quantizer.tasks import Batch, batch_shape
from quantizer.utils.files import NO_STORE
from quantizer.utils.sizes import BATCH, SEQUENCE

PYTORCH = "PyTorch float"
"""The name of the PyTorch float model in benchmarks."""

NOT_VERIFIED = "not verified: built ahead of time, and this machine has no GPU"

LATENCY_ROUNDS, _LATENCY_SECONDS = 11, 5.0
"""Interleaved rounds at one size, and a time limit in seconds, which reduces the rounds of slow engines."""


def run_sizes(config: RunConfig, context: RunContext) -> InputSizes:
    """Return the sizes at which engines run; named dimensions of a Python module get their usual size."""
    sizes, report = context.feed.sizes, config.report
    latency_sizes = {BATCH: report.latency_batch, SEQUENCE: report.latency_sequence}
    named = {} if sizes is None else {name: latency_sizes.get(name, size) for name, size in sizes.usual.items()}
    return InputSizes(report.latency_batch, report.latency_sequence, named)


def build_options(config: RunConfig, dimensions: Mapping[str, Sequence[int]] | None = None) -> BuildOptions:
    """Return the build options for these ranges of dynamic dimensions; None for the ranges of ``export.dynamic``."""
    return BuildOptions(
        dynamic=open_sizes(config) if dimensions is None else dimensions,
        compute_capability=config.engine.compute_capability,
        inference_precision=config.engine.inference_precision,
        strip_weights=config.engine.strip_weights,
        compiled=config.engine.compiled,
    )


def engine_file(backend: str, built: BuildResult, *, ran: bool, scored: bool) -> EngineFile:
    """Return the record of an engine file."""
    verified = "ran on this machine and was scored" if scored else "ran on this machine, and its outputs were compared"
    if not ran:
        verified = NOT_VERIFIED
    return EngineFile(backend=backend, path=built.path.name, build_seconds=built.seconds, verified=verified)


def timed_shapes(config: RunConfig) -> list[tuple[int, int]]:
    """Return the (batch, sequence) sizes of the latency benchmarks, the most important first."""
    dynamic, report = config.export.dynamic, config.report
    usual = (report.latency_batch, report.latency_sequence)
    one = (dynamic.batch[0], report.latency_sequence)
    others = {"usual": [], "one_and_usual": [one], "all": [*zip(dynamic.batch, dynamic.sequence, strict=True)]}
    first = one if config.engine.optimize_for == "latency" else usual
    return list(dict.fromkeys([first, usual, *others[report.latency_shapes]]))


def compared_shapes(config: RunConfig) -> list[tuple[int, int]]:
    """Return the (batch, sequence) sizes at which a choice compares engines, the most important first."""
    shapes = timed_shapes(config)
    return shapes if config.engine.optimize_for == "both" else shapes[:1]


def batches_of_shapes(context: RunContext, shapes: Sequence[tuple[int, int]], samples: Sequence[Any]) -> list[Batch]:
    """Return one batch for each size, in order; sizes that the model fixes give no second batch."""
    batches = [context.feed.inputs.filled(samples, *shape) for shape in shapes]
    return list({batch_shape(batch): batch for batch in batches}.values())


def measure_latency(
    context: RunContext,
    config: RunConfig,
    graphs: Graphs,
    engines: Mapping[str, Runnable],
    single: Mapping[str, Mapping[str, Engine]],
    reference: str,
    samples: Sequence[Any],
    fastest_float: tuple[str, Runnable] | None = None,
    timed: Mapping[tuple[int, int | None], Mapping[str, Sequence[float]]] | None = None,
) -> tuple[Latency, ...]:
    """Return the latency of each engine, the most important size first; with several graphs, also of each graph.

    The float model in PyTorch is also timed at the first size for ``latency_shapes: all``, and at all sizes if there is
    no float engine.

    Args:
        context: the model and its samples.
        config: the sizes.
        graphs: the graphs of the model.
        engines: the engines, ``float`` and ``engine``.
        single: their engines by graph.
        reference: the name of the float engine, to which speed-ups are relative.
        samples: samples for the batches.
        fastest_float: name and engine of another float engine, which is faster; then speed-ups are relative to it.
        timed: latencies that a choice measured, in milliseconds, by size and engine.
    """
    models = {name: graphs.timed(form) for name, form in engines.items()}
    known = {name: name for name in models}
    if fastest_float is not None:
        name, form = fastest_float
        models = {**models, "float": graphs.timed(form), reference: models["float"]}
        known = {**known, "float": name, reference: "float"}
        reference = name
    with_pytorch = config.report.latency_shapes == "all"
    if "float" not in engines:
        models, reference = {"float": graphs.timed(context.model), **models}, PYTORCH
    baseline = {PYTORCH: graphs.timed(context.model)} if with_pytorch and "float" in engines else {}
    threads = config.engine.threads

    def latency_of(models: Mapping[str, Runnable], batch: Batch, graph: str | None = None) -> Latency:
        rows, tokens = size = batch_shape(batch)
        times: Mapping[str, Sequence[float]] = (timed or {}).get(size, {}) if graph is None else {}
        if all(known.get(name) in times for name in models):
            times = {name: times[known[name]] for name in models}
        else:
            times = times_of(models, batch, threads)
        entries = latency_entries(times)
        return Latency(graph=graph, batch=rows, sequence=tokens, threads=threads, reference=reference, engines=entries)

    with context.timer("measure latency"):
        first, *others = batches_of_shapes(context, timed_shapes(config), samples)
        latencies = [latency_of({**models, **baseline}, first), *(latency_of(models, batch) for batch in others)]
    if not graphs.several:
        return tuple(latencies)
    with context.timer("measure the graphs"):
        modules, checked = graphs.modules(context.model), graphs.checked_on(config, samples)
        for graph in graphs.names:
            plain: dict[str, Runnable] = {"float": modules[graph]} if "float" not in single else {}
            of_graph = plain | {name: form[graph] for name, form in single.items()}
            of_graph |= {PYTORCH: modules[graph]} if with_pytorch and not plain else {}
            batches = checked[graph] if with_pytorch else checked[graph][:1]
            latencies += [latency_of(of_graph, batch, graph) for batch in batches]
    return tuple(latencies)


def times_of(
    models: Mapping[str, Runnable],
    batch: Batch,
    threads: int,
    *,
    rounds: int = LATENCY_ROUNDS,
    warmup: int = 3,
    clock: Callable[[], float] | None = None,
) -> dict[str, list[float]]:
    """Return interleaved latencies in ms of models and engines on one batch, all with the same number of threads.

    For ``clock`` see ``interleaved_latency``.
    """
    calls = {name: _call(model, batch) for name, model in models.items()}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        seconds = interleaved_latency(calls, rounds=rounds, warmup=warmup, seconds=_LATENCY_SECONDS, clock=clock)
    finally:
        torch.set_num_threads(before)
    return {name: [1000 * duration for duration in durations] for name, durations in seconds.items()}


def _call(model: Runnable, batch: Batch) -> Callable[[], object]:
    if isinstance(model, nn.Module):
        return torch.no_grad()(partial(model, **batch))
    # Servers call an engine with arrays, so the conversion is not timed.
    return partial(model, engine_inputs(model, batch))


def with_deployed(
    choice: EngineChoice | None, latency: Latency | None, backend: str, is_float_right: bool = True, load: str = ""
) -> EngineChoice | None:
    """Return a choice that names the fastest file of the run, because the fallback may have changed the order.

    ``load`` is the Python code that loads the float engine; empty without one.
    """
    entries = {} if latency is None else {entry.name: entry for entry in latency.engines}
    own = None if latency is None else latency.float_engine
    if choice is None or latency is None or own is None or "engine" not in entries:
        return choice
    low, plain = (f"{stem}.engine" for stem in (QUANTIZED_STEM, FLOAT_STEM))
    ratio = own.median_ms / entries["engine"].median_ms
    if ratio >= TIE:
        to_float = text.times(entries["engine"].ratio_to_float)
        reference = f"{plain} next to it" if own.name == "float" else f"the float engine {latency.reference}"
        return replace(choice, deploy=f"{low}, {to_float} as fast as {reference}")
    if not is_float_right:
        return choice
    best, lost = choice.candidates[0], f"{plain}; the quantized {low} next to it has {text.times(ratio)} its speed"
    other = f"; {best.name} was faster than both" if best.is_float and best.backend != backend else ""
    code = load and f"; load it with {load}"
    return replace(choice, deploy=f"{lost}{other}{code}")


def deployed(record: RunRecord) -> str:
    """Return the engine to deploy: ``engine``, or ``float`` if a choice found it faster."""
    deploy = "" if record.choice is None else record.choice.deploy or ""
    return "float" if deploy.startswith(f"{FLOAT_STEM}.engine") else "engine"


def measure_memory(context: RunContext, config: RunConfig, engines: Mapping[str, Path]) -> tuple[MemoryEntry, ...]:
    """Return the peak memory of each engine above an empty process in MiB.

    It warns and returns nothing if the measurement fails, because the results are complete without it.
    """
    sizes = run_sizes(config, context)

    def peak_mib(name: str) -> float:
        path, threads, backend = engines[name], config.engine.threads, config.quantizer.backend

        def measured() -> float:
            peak = peak_memory_mib(path, backend, threads=threads, sizes=sizes)
            return peak.peak_mib - peak.baseline_mib

        known = context.floats if name == "float" else NO_STORE
        return known.get(["memory", backend, threads, sizes, path], measured)

    with context.timer("measure memory"):
        try:
            peaks = {name: peak_mib(name) for name in engines}
        except EngineError as error:
            warnings.warn(f"memory was not measured; all other results are complete: {error}", stacklevel=2)
            return ()
    return memory_entries(peaks)
