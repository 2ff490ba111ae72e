"""The prices of a quantizer's groups, for people who write Python."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantizer.algorithms.sensitivity.prices import Prices
from quantizer.engines.backends import build_engine, runs_here
from quantizer.engines.base import BuildOptions, InputSizes
from quantizer.errors import EngineError
from quantizer.export.exporter import export_onnx
from quantizer.pipeline.time_groups import EngineFiles, GroupPlacer, Timing
from quantizer.quantizer import Quantizer
from quantizer.utils.files import Store, scratch


def measured_prices(
    quantizer: Quantizer,
    model: nn.Module,
    example: Any,
    *,
    batch: int = 8,
    sequence: int = 128,
    threads: int = 1,
    cache: str | os.PathLike[str] | None = None,
) -> Prices:
    """Build an engine of the plan and one of the float model, and return what each group takes in both.

    For ``fallback(prices=...)``: groups that low precision makes slower go back, the others by their error per
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
            f"measured_prices() times engines of {name}, which need a GPU that is not here; "
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
        prices = placer.prices(quantizer, quantized, low, plain)
    if prices is None:
        raise EngineError(f"engines of {name} tell no times of their layers, so that groups have no price")
    return prices


def _exported_pair(
    quantizer: Quantizer, model: nn.Module, example: Any, folder: Path
) -> tuple[nn.Module, EngineFiles, EngineFiles]:
    """Return the frozen proxy, and where its ONNX file and that of the float model were written."""
    if quantizer.chosen_fallback is not None:
        raise EngineError("prices are taken of all groups, and some fell back: call clear_fallback() first")
    low, plain = (
        EngineFiles(onnx=folder / f"{stem}.onnx", engine=folder / f"{stem}.engine") for stem in ("model", "float")
    )
    quantized = quantizer.quantize(model)
    quantizer.export(quantized, low.onnx, example)
    export_onnx(model, plain.onnx, example, opset=quantizer.config.target.opset, dtype=torch.float32)
    return quantized, low, plain
