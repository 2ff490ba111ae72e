"""A plan that is made in a moment, with which it is seen whether an engine can be the fastest before it has a good one.

How long an engine takes depends on what is quantized, and hardly on the ranges. A good plan takes most of the time of a
choice of engines, and is of no use for an engine that is far slower than another one. Products of two activations and
residual adds are quantized or not by what a good plan finds out, so that a rough one tells less of a backend that has
kernels for them. A backend whose plans are those of another one needs no trial: it has its good plan in a moment.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from torch import nn

from quantizer.algorithms.make_plan import keeps_batches, replays_batches
from quantizer.config import QuantizerConfig
from quantizer.engines import Engine, interleaved_latency, medians
from quantizer.engines.for_this_cpu import Variant
from quantizer.pipeline.context import engine_inputs
from quantizer.pipeline.fastest_engine import FAILURES, HOPELESS
from quantizer.plan.targets import profile
from quantizer.quantizer import Quantizer
from quantizer.report import text
from quantizer.settings import settings_of
from quantizer.tasks import Batch
from quantizer.utils.sizes import DataSizes

_FAR = 1.5
"""The least ratio for a backend of which a rough plan tells less."""

_ROUNDS, _SECONDS = 15, 10.0
"""Of all engines in turns, at each shape; slow ones have fewer rounds."""


class RoughTrials:
    """Trials of the backends of a choice with rough plans, one for each."""

    def __init__(self, make: Callable[[Variant, Quantizer], Engine], batches: Sequence[Batch]) -> None:
        self._make = make
        self._batches = batches
        self._slow: dict[str, str | None] = {}

    def too_slow(
        self, variant: Variant, calibrated: Quantizer, rivals: Mapping[str, Engine], planned: Collection[str]
    ) -> str | None:
        """Return why the backend of a variant needs no plan; None: it may have the fastest engine."""
        name = variant.backend
        least = least_ratio(calibrated.config, name, planned)
        if not rivals or least is None:
            return None
        if name not in self._slow:
            self._slow[name] = None
            # What fails here is tried with a good plan, whose error is told.
            with suppress(*FAILURES):
                engine = self._make(replace(variant, dynamic=False), calibrated)
                self._slow[name] = too_slow(variant.name, engine, rivals, self._batches, least)
        return self._slow[name]


def least_ratio(config: QuantizerConfig, backend: str, planned: Collection[str]) -> float | None:
    """Return how many times as slow as another one an engine of a rough plan has to be to need no good plan.

    None: a good plan is made in no more time.
    """
    tried = profile(backend)
    settings = settings_of(config)
    known = replays_batches(settings) and any(profile(name).plan_traits == tried.plan_traits for name in planned)
    if known or not keeps_batches(settings):
        return None
    return HOPELESS if tried.site_kinds.isdisjoint({"matmul", "residual_add"}) else _FAR


def rough_quantizer(calibrated: Quantizer, backend: str) -> Quantizer:
    """Return a quantizer for a backend, from a calibration, whose plan takes no runs of the model.

    Ranges are the largest values seen; channels have no factors, biases are not corrected, weights are rounded to the
    nearest codes.
    """
    config = calibrated.config
    plain = {
        "activations": {**config.activations.model_dump(), "calibrator": "max", "smooth": None},
        "weights": {**config.weights.model_dump(), "rounding": "nearest"},
        "bias_correction": False,
    }
    rough = Quantizer(config, backend=backend, **plain)
    rough.inherit(calibrated)
    rough.clear_fallback()
    return rough


def rough_engine(
    calibrated: Quantizer,
    backend: str,
    model: nn.Module,
    example: Any,
    stem: Path,
    build: Callable[[Path, Path], Engine],
    opset: int | None = None,
    axes: DataSizes | None = None,
) -> Engine:
    """Return the engine of a backend from a rough plan."""
    rough, onnx = rough_quantizer(calibrated, backend), stem.with_name(f"{stem.name}.onnx")
    rough.export(rough.quantize(model), onnx, example, opset=opset, dynamic_axes=axes)
    return build(onnx, stem.with_name(f"{stem.name}.engine"))


def too_slow(
    name: str, engine: Engine, rivals: Mapping[str, Engine], batches: Sequence[Batch], least: float
) -> str | None:
    """Return why an engine, built from a rough plan, cannot be the fastest; None: it may be."""
    engines, taken = {**rivals, name: engine}, []
    for batch in batches:
        calls = {key: partial(one, engine_inputs(one, batch)) for key, one in engines.items()}
        taken.append(medians(interleaved_latency(calls, rounds=_ROUNDS, seconds=_SECONDS)))
    ratios = {key: geometric_mean(times[name] / times[key] for times in taken) for key in rivals}
    best = max(rivals, key=lambda key: ratios[key])
    if ratios[best] < least:
        return None
    return f"with ranges by largest values it takes {text.times(ratios[best])} the time of {best}"
