"""The prices of a plan's groups by a model of a GPU, for engines that cannot be run here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from quantizer.engines.dimensions import input_dimensions, shape_words
from quantizer.engines.estimate import DEFAULT, estimated_inspection, gpu_of
from quantizer.engines.inspection.place_times import place_times
from quantizer.engines.inspection.product_names import product_names
from quantizer.files import scratch
from quantizer.plan.site_plan import Plan
from quantizer.proxy.build import sites_of
from quantizer.quantizer import Quantizer
from quantizer.runs.placement.exported_pair import exported_pair
from quantizer.sensitivity.prices.group_prices import Prices, prices_from_places


def estimated_prices(
    quantizer: Quantizer,
    model: nn.Module,
    example: Any,
    *,
    capability: str = DEFAULT,
    batch: int = 8,
    sequence: int = 128,
) -> Prices:
    """Return what each group of a plan takes in low precision and in float, by a model of a GPU.

    As ``measured_prices``, where there is no GPU to measure on. No group counts as slower: for that a model is not
    exact enough.

    Args:
        quantizer: a calibrated quantizer without a fallback.
        model: the float model.
        example: one batch, to export with.
        capability: the compute capability of the GPU, such as ``sm89``.
        batch: rows of the inputs.
        sequence: size of their other dynamic dimensions.

    Raises:
        EngineError: groups fell back already, or there are no figures of such a GPU.
        CalibrationError: nothing was calibrated yet.
    """
    gpu_of(capability)
    with scratch() as folder:
        quantized, low, plain = exported_pair(quantizer, model, example, folder)
        return prices_of_files(
            quantizer.plan, quantized, low.onnx, plain.onnx, capability=capability, batch=batch, sequence=sequence
        )


def prices_of_files(
    plan: Plan,
    quantized: nn.Module,
    low: Path,
    plain: Path,
    *,
    capability: str,
    batch: int,
    sequence: int,
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> Prices:
    """Return the estimated prices of a plan whose files were exported.

    Args:
        plan: the plan with all groups quantized.
        quantized: its frozen proxy.
        low: the ONNX file of ``quantized``.
        plain: that of the float model.
        capability: the compute capability of the GPU.
        batch: rows of the inputs.
        sequence: size of their other dynamic dimensions.
        sizes: sizes of dimensions by name, where they are known; they come before the two.

    Raises:
        EngineError: there are no figures of such a GPU, or a file is broken.
    """
    gpu, hosts = gpu_of(capability), {site.path: site.host_path for site in sites_of(quantized)}
    times = [
        place_times(
            estimated_inspection(path, gpu, batch=batch, sequence=sequence, sizes=sizes),
            set(hosts.values()),
            product_names(path),
        )
        for path in (low, plain)
    ]
    shape = shape_words(input_dimensions(plain).values(), batch, sequence, sizes)
    prices = prices_from_places(
        plan,
        hosts,
        *times,
        low_us=sum(times[0].values()),
        float_us=sum(times[1].values()),
        where=f"{capability} ({gpu.name}), {shape}, floats in 16 bits",
    )
    return replace(prices, estimated=True, least_loss_us=math.inf)
