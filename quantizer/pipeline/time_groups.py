"""The latency costs of a plan's groups: an engine of the plan and one of the float model, timed layer by layer.

A checksum of all in an ONNX file that decides how long its engine takes: operators, shapes and types, no weights.

The stage that times the groups of a plan by measured time, and finds those that low precision makes slower.

``quantizer.measure_latency_costs`` returns the latency costs of the groups of a ``Quantizer``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantizer.algorithms.sensitivity.latency_costs import LatencyCosts, latency_costs_from_layers
from quantizer.engines import Engine, inspect_engine, interleaved_latency, load_engine, medians
from quantizer.engines.backends import build_engine, runs_here
from quantizer.engines.base import BuildOptions, InputSizes
from quantizer.engines.inspection import place_times
from quantizer.engines.measure import working_inputs
from quantizer.engines.onnx_graph import product_names
from quantizer.errors import EngineError
from quantizer.export.exporter import export_onnx
from quantizer.export.qdq.onnx_file import input_dimensions, read_graph
from quantizer.plan.site_plan import Plan
from quantizer.proxy.build import sites_of
from quantizer.quantizer import Quantizer
from quantizer.report import collect_machine, collect_versions
from quantizer.report.text import counted
from quantizer.utils.files import Store, scratch
from quantizer.utils.lazy import import_library
from quantizer.utils.sizes import DataSizes

_ROUNDS, _SECONDS = 15, 20.0
_RUNS, _FEWEST_RUNS, _RUNS_S = 10, 3, 10.0
"""Runs of which a layer's time is the median: so many, or those that take so long, but never fewer than that."""

_MEASUREMENTS, _MEASUREMENTS_S = 2, 20.0
"""Measurements of which a layer's time is the lower one; none is begun after so long."""

_LEAST_GAIN = 1.02
"""A plan with groups kept in float for the time is taken from this gain on, measured as a whole."""


@dataclass(frozen=True, kw_only=True)
class EngineFiles:
    """An engine and the file that it was built from."""

    onnx: Path
    engine: Path


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Conditions in which engines are timed.

    Attributes:
        backend: their backend.
        threads: the threads.
        options: the options of their build, in words.
        sizes: of the inputs.
    """

    backend: str
    sizes: InputSizes
    threads: int
    options: str = ""

    def said(self, onnx: Path) -> str:
        """Return the conditions of engines that were built of such a file, in words."""
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        shape = self.sizes.words(input_dimensions(onnx).values())
        return f"{self.backend}, {shape}, {threads}"

    def load(self, path: Path) -> Engine:
        return load_engine(self.backend, path, threads=self.threads, verify=False)

    def of_places(
        self, engines: Mapping[str, EngineFiles], places: Collection[str], latencies: Mapping[str, float]
    ) -> dict[str, dict[str, float]]:
        """Return the time of each place in each engine, in microseconds, the lower of two measurements.

        The engines take turns. What else runs on the machine makes layers slower, and seldom the same ones twice. Where
        the first measurement takes long, there is no second.

        Args:
            engines: the engines by name.
            places: the places.
            latencies: what each engine takes as a whole, in microseconds.
        """
        found: dict[str, dict[str, float]] = {}
        begin = time.perf_counter()
        for number in range(_MEASUREMENTS):
            if number > 0 and time.perf_counter() - begin > _MEASUREMENTS_S:
                break
            for name, files in engines.items():
                runs = max(_FEWEST_RUNS, min(_RUNS, int(1e6 * _RUNS_S / latencies[name])))
                seen = inspect_engine(
                    self.backend,
                    files.engine,
                    threads=self.threads,
                    sizes=self.sizes,
                    runs=runs,
                )
                times = place_times(seen, places, product_names(files.onnx))
                found[name] = {place: min(spent, found.get(name, times)[place]) for place, spent in times.items()}
        return found

    def latencies(self, paths: Mapping[str, Path]) -> dict[str, float]:
        """Return the median latency of each engine in microseconds, all interleaved, on made-up inputs."""
        engines = {name: self.load(path) for name, path in paths.items()}
        calls = {name: partial(engine, working_inputs(engine, self.sizes)) for name, engine in engines.items()}
        taken = medians(interleaved_latency(calls, rounds=_ROUNDS, seconds=_SECONDS))
        return {name: 1e6 * seconds for name, seconds in taken.items()}


def time_groups_of(
    plan: Plan, quantized: nn.Module, low: EngineFiles, plain: EngineFiles, timing: Timing, times: Store
) -> LatencyCosts | None:
    """Return what each group of a plan takes in low precision and in float, in engines of this machine.

    None: the library tells no times of layers.
    """
    hosts = {site.path: site.host_path for site in sites_of(quantized)}

    def take() -> dict[str, Any]:
        latency = timing.latencies({"low": low.engine, "plain": plain.engine})
        spent = timing.of_places({"low": low, "plain": plain}, sorted(set(hosts.values())), latency)
        return {"low_us": latency["low"], "float_us": latency["plain"], **spent}

    found = times.get(_key("times", low, plain, timing), take)
    if not sum(found["low"].values()) or not sum(found["plain"].values()):
        return None
    in_all = {"low_us": found["low_us"], "float_us": found["float_us"], "where": timing.said(plain.onnx)}
    return latency_costs_from_layers(plan, hosts, found["low"], found["plain"], **in_all)


def is_faster(placed: EngineFiles, low: EngineFiles, timing: Timing) -> bool:
    """Return whether the engine ``placed`` is faster than ``low`` by more than noise."""
    latency = timing.latencies({"placed": placed.engine, "low": low.engine})
    return latency["low"] >= _LEAST_GAIN * latency["placed"]


def _key(what: str, low: EngineFiles, plain: EngineFiles, timing: Timing) -> list[str]:
    """Return all that times depend on: the structure of the files, machine, libraries, shape and options."""
    machine, versions = collect_machine(), collect_versions()
    structures = (structure_digest(files.onnx) for files in (low, plain))
    return [what, repr(timing), json.dumps([machine, versions], sort_keys=True), *structures]


_SMALL = 64
"""Whole numbers up to so many are axes and shapes, whose values count."""


def structure_digest(path: Path) -> str:
    """Return a checksum that two files share if they differ in the values of weights and scales alone.

    Which scales are equal counts, since engines fuse what has one scale; so does whether a zero point is zero.
    """
    onnx, model = import_library("onnx", "onnx"), read_graph(path)
    found, known = hashlib.sha256(), dict[float, int]()
    for tensor in _tensors(onnx, model.graph):
        found.update(f"{tensor.name} {_values(onnx, tensor, known)}\n".encode())
        for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
            tensor.ClearField(field)
        # Where data lies in a second file is no matter of time.
        tensor.ClearField("external_data")
    found.update(model.SerializeToString(deterministic=True))
    return found.hexdigest()


def _tensors(onnx: Any, graph: Any) -> Iterator[Any]:
    """Yield the constants of a graph, with those in attributes and inner graphs."""
    yield from graph.initializer
    for node in graph.node:
        for entry in node.attribute:
            if entry.type == onnx.AttributeProto.TENSOR:
                yield entry.t
            for below in (entry.g, *entry.graphs):
                yield from _tensors(onnx, below)


def _values(onnx: Any, tensor: Any, known: dict[float, int]) -> str:
    """Return as much of the values of a constant as time may depend on."""
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


_WORTH_A_TRIAL = 1.01
"""The gain that the latency costs of the slower groups have to promise, half of what it has to be when it is
measured."""


@dataclass(frozen=True, kw_only=True)
class GroupPlacer:
    """Prices the groups of a quantizer's plan in the engines of its backend.

    Attributes:
        model: the float model.
        example: one batch, to export with.
        timing: how engines are timed.
        times: those that were measured before.
        build: builds an engine of the backend from an ONNX file.
        folder: where engines may lie while they are timed.
        opset: the ONNX opset; None: the target's.
        axes: the open axes of the inputs; None: by the example.
        say: called with what was found, in words.
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

    def latency_costs(
        self, quantizer: Quantizer, quantized: nn.Module, low: EngineFiles, plain: EngineFiles
    ) -> LatencyCosts | None:
        """Return the latency costs of all groups of a plan; those by which a group is slower hold for the plan as a
        whole.

        None: the library tells no times of layers.

        Gains of single groups do not add up exactly. So an engine without the slower groups is built and timed beside
        the other: if it is not faster, no group counts as slower; nor if all of them together would gain too little.
        """
        latency_costs = time_groups_of(quantizer.plan, quantized, low, plain, self.timing, self.times)
        if latency_costs is None or not latency_costs.slower():
            return latency_costs
        number = len(latency_costs.slower())
        what = f"{counted(number, 'group')} {'is' if number == 1 else 'are'} slower in {quantizer.config.dtype}"
        if latency_costs.low_us < _WORTH_A_TRIAL * latency_costs.time_us(latency_costs.slower()):
            faster, then = False, f", but too little to put {'it' if number == 1 else 'them'} back"
        else:
            key = _key("faster without the slower groups", low, plain, self.timing)
            faster = self.times.get(key, partial(self._faster, quantizer, latency_costs, low))
            then = ", kept in float" if faster else ", but the engine is not faster without them"
        self.say(f"{what} than in float{then}")
        return latency_costs if faster else replace(latency_costs, least_loss_us=math.inf)

    def _faster(self, quantizer: Quantizer, latency_costs: LatencyCosts, low: EngineFiles) -> bool:
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            placed = EngineFiles(onnx=Path(scratch) / "placed.onnx", engine=Path(scratch) / "placed.engine")
            quantizer.fallback(None, latency_costs=latency_costs)
            try:
                quantized = quantizer.quantize(self.model)
                quantizer.export(quantized, placed.onnx, self.example, opset=self.opset, dynamic_axes=self.axes)
            finally:
                quantizer.clear_fallback()
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
    """Build an engine of the plan and one of the float model, and return what each group takes in both.

    For ``fallback(latency_costs=...)``: groups that low precision makes slower go back, the others by their error per
    microsecond.

    Args:
        quantizer: a calibrated quantizer for a backend whose engines run on this machine, without a fallback.
        model: the float model.
        example: one batch, to export with.
        batch: rows of the inputs that are timed.
        sequence: size of their other dynamic dimensions.
        threads: threads of the CPU.
        cache: a folder for times, which are taken from there if operators, shapes and machine are the same.

    Raises:
        EngineError: engines of the backend do not run here, groups fell back already, or an engine fails.
        CalibrationError: nothing was calibrated yet.
    """
    name = quantizer.config.backend
    if not runs_here(name):
        raise EngineError(
            f"measure_latency_costs() times engines of {name}, which need a GPU that is not here; "
            "call it on a machine with one, or choose groups without times, as by fallback(num=...)"
        )
    times = Store(cache, EngineError)
    with scratch() as folder:
        quantized, low, plain = _exported_pair(quantizer, model, example, folder)

        def build(onnx: Path, engine: Path) -> None:
            build_engine(name, onnx, engine, BuildOptions(dynamic={"batch": (batch,) * 3, "sequence": (sequence,) * 3}))

        for files in (low, plain):
            build(files.onnx, files.engine)
        placer = GroupPlacer(
            model=model,
            example=example,
            timing=Timing(backend=name, sizes=InputSizes(batch, sequence), threads=threads),
            times=times,
            build=build,
            folder=folder,
        )
        latency_costs = placer.latency_costs(quantizer, quantized, low, plain)
    if latency_costs is None:
        raise EngineError(f"engines of {name} tell no times of their layers, so that groups have no price")
    return latency_costs


def _exported_pair(
    quantizer: Quantizer, model: nn.Module, example: Any, folder: Path
) -> tuple[nn.Module, EngineFiles, EngineFiles]:
    """Return the frozen proxy, and where its ONNX file and that of the float model were written."""
    if quantizer.chosen_fallback is not None:
        raise EngineError("latency costs are taken of all groups, and some fell back: call clear_fallback() first")
    low, plain = (
        EngineFiles(onnx=folder / f"{stem}.onnx", engine=folder / f"{stem}.engine") for stem in ("model", "float")
    )
    quantized = quantizer.quantize(model)
    quantizer.export(quantized, low.onnx, example)
    export_onnx(model, plain.onnx, example, opset=quantizer.config.target.opset, dtype=torch.float32)
    return quantized, low, plain
