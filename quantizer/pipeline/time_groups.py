"""Latency costs of precision groups, measured in an engine of the plan and an engine of the float model.

``quantizer.measure_latency_costs`` returns them; ``GroupTimer`` measures them in a run. Times are cached by a checksum
of everything in an ONNX file that affects latency: operators, shapes and types, but not weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from quantizer.algorithms.sensitivity.latency_costs import LatencyCosts, latency_costs_from_layers
from quantizer.engines import Engine, Inspection, inspect_engine, interleaved_latency, load_engine, medians
from quantizer.engines.backends import build_engine, runs_here
from quantizer.engines.base import BuildOptions, InputSizes
from quantizer.engines.inspection import place_times
from quantizer.engines.measure import working_inputs
from quantizer.engines.onnx_graph import product_names
from quantizer.errors import EngineError
from quantizer.export.exporter import export_onnx
from quantizer.export.qdq.onnx_file import input_dimensions, read_graph
from quantizer.plan.apply import frozen_proxy
from quantizer.plan.site_plan import Plan, with_fallback
from quantizer.proxy.build import exportable, sites_of
from quantizer.quantizer import Quantizer
from quantizer.report import collect_machine, collect_versions
from quantizer.report.text import counted
from quantizer.utils.files import Store, scratch
from quantizer.utils.lazy import import_library
from quantizer.utils.sizes import DataSizes

_ROUNDS, _SECONDS, _WARMUP, _FIRST_ROUNDS = 15, 6.0, 3, 5
"""Interleaved rounds for the latency of two engines, a time limit in seconds, rounds of warmup before, and the rounds
after which a comparison may end.
"""

_FEW_ROUNDS, _FEW_SECONDS, _FEW_WARMUP = 3, 2.0, 1
"""The same with its rounds of warmup, if the latency only scales the times of layers."""

_RUNS, _FEW_RUNS, _FEWEST_RUNS, _RUNS_S = 10, 5, 3, 1.0
"""Number of runs for the time of a layer, the same where no fallback depends on it, its minimum, and a time limit in
seconds.
"""

_MEASUREMENTS, _MEASUREMENTS_S = 2, 5.0
"""Number of measurements, of which the lower time counts, and the seconds after which no other begins."""

_LEAST_GAIN, _LEAST_PREDICTED, _CLEARLY_PREDICTED = 1.02, 1.04, 1.06
"""Minimum speed-up of a plan that keeps groups in float for latency, measured and predicted, and the prediction from
which another measurement of layers would not change that the plan is tried.

A prediction counts no conversions between a group in float and its neighbors.
"""

_CHANCE = 0.05
"""Largest probability that as many rounds favour a plan by chance."""


@dataclass(frozen=True, kw_only=True)
class EngineFiles:
    """An engine file and its ONNX file."""

    onnx: Path
    engine: Path


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Conditions of latency measurements.

    Attributes:
        backend: the backend of the engines.
        threads: the number of CPU threads.
        options: the build options as text.
        sizes: the sizes of the inputs.
        exact: measure every group twice, for a fallback by latency costs; else only if a group seems slower.
        inspected: the last inspection of each engine file.
    """

    backend: str
    sizes: InputSizes
    threads: int
    options: str = ""
    exact: bool = True
    inspected: dict[Path, Inspection] = field(default_factory=dict, repr=False, compare=False)

    def words(self, onnx: Path) -> str:
        """Return the conditions in words."""
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        shape = self.sizes.words(input_dimensions(onnx).values())
        return f"{self.backend}, {shape}, {threads}"

    def load(self, path: Path) -> Engine:
        return load_engine(self.backend, path, threads=self.threads, verify=False)

    def of_places(
        self,
        engines: Mapping[str, EngineFiles],
        places: Collection[str],
        latencies: Mapping[str, float],
        doubtful: Callable[[Mapping[str, Mapping[str, float]]], bool],
    ) -> dict[str, dict[str, float]]:
        """Return the time of each place in each engine in microseconds: the lower of two interleaved measurements.

        Other load on the machine slows layers down, but seldom the same ones twice. The second measurement is skipped
        if the first one takes long, or is not ``doubtful``.

        Args:
            engines: the engines by name.
            places: the places, module paths of the model.
            latencies: the total latency of each engine in microseconds.
            doubtful: whether times need a second measurement.
        """
        lowest: dict[str, dict[str, float]] = {}
        begin = time.perf_counter()
        for number in range(_MEASUREMENTS):
            if number > 0 and (time.perf_counter() - begin > _MEASUREMENTS_S or not doubtful(lowest)):
                break
            for name, files in engines.items():
                most = _RUNS if self.exact or number > 0 else _FEW_RUNS
                runs = max(_FEWEST_RUNS, min(most, int(1e6 * _RUNS_S / latencies[name])))
                self.inspected[files.engine] = inspect_engine(
                    self.backend, files.engine, threads=self.threads, sizes=self.sizes, runs=runs
                )
                times = place_times(self.inspected[files.engine], places, product_names(files.onnx))
                lowest[name] = {place: min(spent, lowest.get(name, times)[place]) for place, spent in times.items()}
        return lowest

    def latencies(self, paths: Mapping[str, Path]) -> dict[str, float]:
        """Return the median latency of each engine in microseconds; see ``seconds``."""
        if self.exact:
            samples = self.seconds(paths)
        else:
            samples = self.seconds(paths, rounds=_FEW_ROUNDS, limit=_FEW_SECONDS, warmup=_FEW_WARMUP)
        return {name: 1e6 * seconds for name, seconds in medians(samples).items()}

    def seconds(
        self,
        paths: Mapping[str, Path],
        *,
        rounds: int = _ROUNDS,
        limit: float = _SECONDS,
        warmup: int = _WARMUP,
        goes_on: Callable[[Mapping[str, Sequence[float]]], bool] | None = None,
    ) -> dict[str, list[float]]:
        """Return the seconds of each engine in interleaved rounds, on generated inputs; see ``interleaved_latency``.

        With ``goes_on``, which takes the seconds of the first ``_FIRST_ROUNDS``, further rounds follow if it says so.
        """
        engines = {name: self.load(path) for name, path in paths.items()}
        calls = {name: partial(engine, working_inputs(engine, self.sizes)) for name, engine in engines.items()}
        if goes_on is None:
            return interleaved_latency(calls, rounds=rounds, warmup=warmup, seconds=limit)
        first = interleaved_latency(calls, rounds=_FIRST_ROUNDS, warmup=warmup, seconds=limit)
        if not goes_on(first):
            return first
        more = interleaved_latency(calls, rounds=rounds - _FIRST_ROUNDS, warmup=0, seconds=limit)
        return {name: [*values, *more[name]] for name, values in first.items()}


def time_groups_of(
    plan: Plan,
    quantized: nn.Module,
    low: EngineFiles,
    plain: EngineFiles,
    timing: Timing,
    times: Store,
    known_us: Mapping[str, float] | None = None,
) -> LatencyCosts | None:
    """Return the latency costs of a plan's groups; None if the library does not report layer times.

    ``known_us`` are the latencies of the engines ``low`` and ``plain``; None: they are measured.
    """
    hosts, where = {site.path: site.host_path for site in sites_of(quantized)}, timing.words(plain.onnx)

    def costs(spent: Mapping[str, Mapping[str, float]], low_us: float, float_us: float) -> LatencyCosts:
        totals = {"low_us": low_us, "float_us": float_us}
        return latency_costs_from_layers(plan, hosts, spent["low"], spent["plain"], where=where, **totals)

    def take() -> dict[str, Any]:
        latency = known_us or timing.latencies({"low": low.engine, "plain": plain.engine})
        spent = timing.of_places(
            {"low": low, "plain": plain},
            sorted(set(hosts.values())),
            latency,
            lambda spent: timing.exact or _is_doubtful(costs(spent, latency["low"], latency["plain"])),
        )
        return {"low_us": latency["low"], "float_us": latency["plain"], **spent}

    measured = times.get(_key("times", low, plain, timing), take)
    if not sum(measured["low"].values()) or not sum(measured["plain"].values()):
        return None
    return costs(measured, measured["low_us"], measured["float_us"])


def is_faster(placed: EngineFiles, low: EngineFiles, timing: Timing) -> bool:
    """Return whether the engine ``placed`` is faster than ``low`` by 2% or more, and significantly.

    A sign test over the interleaved rounds decides whether noise may be the reason. A few rounds are enough if the
    median of their ratios shows no gain at all.
    """
    paths = {"placed": placed.engine, "low": low.engine}
    ratios = _ratios(timing.seconds(paths, goes_on=lambda seconds: median(_ratios(seconds)) > 1))
    return median(ratios) >= _LEAST_GAIN and _by_chance(sum(ratio > 1 for ratio in ratios), len(ratios)) <= _CHANCE


def _ratios(seconds: Mapping[str, Sequence[float]]) -> list[float]:
    return [before / after for before, after in zip(seconds["low"], seconds["placed"], strict=True)]


def _may_gain(costs: LatencyCosts) -> bool:
    """Return whether keeping the slower groups in float is expected to gain enough to try it."""
    return costs.low_us >= _LEAST_PREDICTED * costs.time_us(costs.slower())


def _is_doubtful(costs: LatencyCosts) -> bool:
    """Return whether another measurement of layers may save the trial, or show that the gain is too small for it."""
    predicted_us = costs.time_us(costs.slower())
    return _LEAST_PREDICTED * predicted_us <= costs.low_us < _CLEARLY_PREDICTED * predicted_us


def _by_chance(wins: int, rounds: int) -> float:
    """Return the probability of at least this many wins in fair rounds."""
    return sum(math.comb(rounds, count) for count in range(wins, rounds + 1)) * 0.5**rounds


def _key(what: str, low: EngineFiles, plain: EngineFiles, timing: Timing) -> list[str]:
    """Return everything that latencies depend on: file structure, machine, libraries, shape and options."""
    machine, versions = collect_machine(), collect_versions()
    structures = (structure_digest(files.onnx) for files in (low, plain))
    return [what, repr(timing), json.dumps([machine, versions], sort_keys=True), *structures]


_SMALL = 64
"""Maximum size of integer constants that are axes or shapes, whose values matter."""


def structure_digest(path: Path) -> str:
    """Return a checksum of an ONNX file that ignores the values of weights and scales.

    Equal scales remain equal in it, because engines fuse operations with one scale; so does whether a zero point is
    zero.
    """
    onnx, model = import_library("onnx", "onnx"), read_graph(path)
    digest, known = hashlib.sha256(), dict[float, int]()
    for tensor in _tensors(onnx, model.graph):
        digest.update(f"{tensor.name} {_values(onnx, tensor, known)}\n".encode())
        for values in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
            tensor.ClearField(values)
        # The location of external data does not affect latency.
        tensor.ClearField("external_data")
    digest.update(model.SerializeToString(deterministic=True))
    return digest.hexdigest()


def _tensors(onnx: Any, graph: Any) -> Iterator[Any]:
    """Yield the constants of a graph, including those in attributes and subgraphs."""
    yield from graph.initializer
    for node in graph.node:
        for entry in node.attribute:
            if entry.type == onnx.AttributeProto.TENSOR:
                yield entry.t
            for below in (entry.g, *entry.graphs):
                yield from _tensors(onnx, below)


def _values(onnx: Any, tensor: Any, known: dict[float, int]) -> str:
    """Return the part of a constant's values that may affect latency."""
    kind, size = onnx.TensorProto.DataType.Name(tensor.data_type), prod(tensor.dims)
    if size > _SMALL or tensor.data_location == onnx.TensorProto.EXTERNAL:
        return ""
    if kind in ("INT32", "INT64", "BOOL"):
        return str(onnx.numpy_helper.to_array(tensor).tolist())
    if size == 1 and kind in ("INT8", "UINT8"):
        return str(bool(onnx.numpy_helper.to_array(tensor).any()))
    if size == 1 and kind in ("FLOAT", "FLOAT16"):
        return str(known.setdefault(float(onnx.numpy_helper.to_array(tensor).reshape(-1)[0]), len(known)))
    return ""


_WORDS = (("is", "it", "it", "stays"), ("are", "them", "they", "stay"))
"""The words of a message on one group, and on several."""


@dataclass(frozen=True, kw_only=True)
class GroupTimer:
    """Measurement of the latency costs of a plan's groups in the engines of its backend.

    Attributes:
        model: the float model.
        example: one batch, for export.
        timing: the conditions of measurements.
        times: the cache of measured times.
        build: builds an engine of the backend from an ONNX file.
        folder: a folder for temporary engines.
        opset: the ONNX opset; None for the target's.
        axes: the dynamic axes of the inputs; None: derived from the example.
        say: prints a line.
        known_us: latencies of the engines ``low`` and ``plain`` in microseconds, if only the times of layers matter.
    """

    model: nn.Module
    example: Any
    timing: Timing
    times: Store
    build: Callable[[Path, Path], Any]
    folder: Path
    opset: int | None = None
    axes: DataSizes | None = None
    say: Callable[[str], None] = lambda words: None
    known_us: Mapping[str, float] | None = None

    def latency_costs(
        self, quantizer: Quantizer, quantized: nn.Module, low: EngineFiles, plain: EngineFiles
    ) -> LatencyCosts | None:
        """Return the latency costs of all groups of a plan; None if the library does not report layer times.

        Gains of single groups do not add up exactly. So an engine with the slower groups in float is also built and
        timed. If it is not faster, or if the expected gain is too small to try, no group counts as slower.
        """
        latency_costs = time_groups_of(quantizer.plan, quantized, low, plain, self.timing, self.times, self.known_us)
        if latency_costs is None or not latency_costs.slower():
            return latency_costs
        number = len(latency_costs.slower())
        dtype, (are, them, they, stay) = quantizer.config.dtype.upper(), _WORDS[number != 1]
        slower = f"{counted(number, 'group')} {are} slower in {dtype} when timed alone"
        if not _may_gain(latency_costs):
            faster, effect = False, f"the difference is too small to keep {them} in float"
        else:
            key = _key("faster without the slower groups", low, plain, self.timing)
            faster = self.times.get(key, partial(self._faster, quantizer, latency_costs, low))
            effect = f"keeping {them} in float {'made' if faster else 'did not make'} the engine faster"
        self.say(f"{slower}; {effect}, so {they} {stay} in {'float' if faster else dtype}")
        return latency_costs if faster else replace(latency_costs, least_loss_us=math.inf)

    def _faster(self, quantizer: Quantizer, latency_costs: LatencyCosts, low: EngineFiles) -> bool:
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            placed = EngineFiles(onnx=Path(scratch) / "placed.onnx", engine=Path(scratch) / "placed.engine")
            # Biases are not corrected again, because they do not change the latency.
            quantized = frozen_proxy(self.model, with_fallback(quantizer.plan, latency_costs.slower()))
            quantizer.export(quantized, placed.onnx, self.example, opset=self.opset, dynamic_axes=self.axes)
            self.build(placed.onnx, placed.engine)
            return is_faster(placed, low, self.timing)


def measure_latency_costs(
    quantizer: Quantizer,
    model: nn.Module,
    example: Any,
    *,
    batch: int = 8,
    sequence: int = 128,
    threads: int = 1,
    cache: str | os.PathLike[str] | None = None,
) -> LatencyCosts:
    """Measure the latency of each precision group in low precision and in float.

    It builds an engine of the plan and an engine of the float model. Pass the result to
    ``fallback(latency_costs=...)``: groups that are slower in low precision are kept in float, and the others are
    ranked by error per microsecond.

    Args:
        quantizer: a calibrated quantizer without a fallback, for a backend that runs on this machine.
        model: the float model.
        example: one batch, for export.
        batch: the batch size of the measurements.
        sequence: the size of other dynamic dimensions.
        threads: the number of CPU threads.
        cache: a folder for measured times, reused for equal operators, shapes and machines.

    Raises:
        EngineError: the backend does not run on this machine, groups are already kept in float, or an engine fails.
        CalibrationError: the quantizer is not calibrated.
    """
    name = quantizer.config.backend
    if not runs_here(name):
        raise EngineError(
            f"measure_latency_costs() runs engines of {name}, which need a GPU, but this machine has none; call it on "
            "a machine with a GPU, or choose groups without latencies, for example with fallback(num=...)"
        )
    times = Store(cache, EngineError)
    with scratch() as folder:
        quantized, low, plain = _exported_pair(quantizer, model, example, folder)

        def build(onnx: Path, engine: Path) -> None:
            build_engine(name, onnx, engine, BuildOptions(dynamic={"batch": (batch,) * 3, "sequence": (sequence,) * 3}))

        for files in (low, plain):
            build(files.onnx, files.engine)
        placer = GroupTimer(
            model=model,
            example=example,
            timing=Timing(backend=name, sizes=InputSizes(batch, sequence), threads=threads),
            times=times,
            build=build,
            folder=folder,
        )
        latency_costs = placer.latency_costs(quantizer, quantized, low, plain)
    if latency_costs is None:
        raise EngineError(f"engines of {name} do not report layer times, so that latency costs are unknown")
    return latency_costs


def _exported_pair(
    quantizer: Quantizer, model: nn.Module, example: Any, folder: Path
) -> tuple[nn.Module, EngineFiles, EngineFiles]:
    """Export the frozen proxy and the float model; return the proxy and the paths of both engines' files."""
    if quantizer.chosen_fallback is not None:
        raise EngineError(
            "latency costs need all groups quantized, but some are kept in float: call clear_fallback() first"
        )
    low, plain = (
        EngineFiles(onnx=folder / f"{stem}.onnx", engine=folder / f"{stem}.engine") for stem in ("model", "float")
    )
    quantized = quantizer.quantize(model)
    quantizer.export(quantized, low.onnx, example)
    export_onnx(exportable(model), plain.onnx, example, opset=quantizer.config.target.opset, dtype=torch.float32)
    return quantized, low, plain
