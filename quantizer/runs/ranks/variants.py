"""The engines that a run chooses from, and the quantizers for them: of several processes all make them together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from quantizer.common.distributed import alone, get_world_size
from quantizer.config import RunConfig
from quantizer.engines.candidates import Variant, cpu_candidates, cpu_variants
from quantizer.errors import LostRankError
from quantizer.quantizer import Quantizer
from quantizer.runs.choose_engine import FAILURES

Calibrated: TypeAlias = dict[tuple[str, bool], Quantizer]
"""Quantizers of one calibration, by backend and by whether ranges are taken at run time; the calibrated one first."""


def variants_of(config: RunConfig, among: Sequence[str]) -> Sequence[Variant]:
    """Return the engines to choose from; without names in ``among`` those for this CPU."""
    wanted = config.quantizer
    return cpu_variants(
        cpu_candidates(among)[0],
        dtype=wanted.dtype if config.quantize else None,
        precision=config.engine.inference_precision,
        # A plan that is to be trained keeps the ranges that training moves.
        dynamic="ranges" not in wanted.activations.model_fields_set and config.qat is None,
        compiled=config.engine.compiled,
        named=bool(among),
    )


def for_all_variants(config: RunConfig, calibrated: Quantizer, among: Sequence[str]) -> Calibrated:
    """Return the quantizers of several processes for the backends to choose from, as far as they need batches.

    All processes choose their ranges together. One process makes each when it comes to its engine.
    """
    found = {(calibrated.config.backend, False): calibrated}
    for variant in variants_of(config, among) if get_world_size() > 1 else ():
        if variant.dtype is not None and (variant.backend, False) not in found:
            try:
                quantizer = calibrated.for_backend(variant.backend)
                _ = quantizer.plan
            except LostRankError:
                raise
            except FAILURES:
                # What cannot be made is told where its engine is tried.
                continue
            found[variant.backend, False] = quantizer
    return found


def quantizer_of(config: RunConfig, calibrated: Calibrated) -> Quantizer:
    """Return the quantizer with which a run goes on whose configuration another process chose."""
    name, dynamic = config.quantizer.backend, config.quantizer.activations.ranges == "dynamic"
    if (name, dynamic) in calibrated:
        return calibrated[name, dynamic]
    with alone():
        quantizer = next(iter(calibrated.values())).for_backend(name, ranges="dynamic" if dynamic else None)
        # Decided here, where no other process needs to come.
        _ = quantizer.plan
    return quantizer
