"""The step from statistics to a plan, after the choice of ranges and codes that need more passes of the model."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from functools import partial

import torch
from tqdm.auto import tqdm

from quantizer.calibration.auto_range import Trial
from quantizer.calibration.auto_range import choose_ranges
from quantizer.calibration.output_error import OutputError
from quantizer.calibration.output_error import first_of_best
from quantizer.calibration.proxied import Proxied
from quantizer.calibration.settings import calibrator_of
from quantizer.calibration.settings import plan_settings
from quantizer.calibration.settings import replays_batches
from quantizer.calibration.smoothquant import ALPHAS
from quantizer.calibration.smoothquant import migrate
from quantizer.calibration.weight_rounding import round_weights
from quantizer.common.distributed import all_reduce_sum
from quantizer.numerics.qtype import qtype
from quantizer.observe.statistics import Seen
from quantizer.plan.decide_operands import PlanSettings
from quantizer.plan.decide_operands import judged_as
from quantizer.plan.decide_sites import decide
from quantizer.plan.site_plan import Plan
from quantizer.plan.weight_scales import scale_of

__all__ = ["make_plan"]


def make_plan(proxy: Proxied, observation: Seen) -> Plan:
    """Return the plan of a calibrated proxy; if the configuration asks for it, choose ranges and codes on kept batches
    first.

    They are chosen once, and again after more data. This runs the proxy, so pause its observation first.
    """
    config, settings = proxy.config, plan_settings(proxy)

    def decided() -> Plan:
        return decide(proxy.module, list(proxy.sites), observation, proxy.excluded, settings)

    if not replays_batches(config) or observation.batches in (0, observation.chosen_at):
        return decided()
    activations = config.activations
    observation.forget_codes()
    with torch.no_grad():
        if activations.smooth is not None:
            migrate(
                proxy,
                observation,
                decided,
                alphas=ALPHAS if activations.smooth == "auto" else (activations.smooth,),
                make=partial(calibrator_of, config, histogram=False),
                scale_dtype=settings.scale_dtype,
            )
        if activations.calibrator == "auto":
            assert observation.kept is not None
            choose_ranges(proxy.module, _trials(proxy, decided(), observation, settings), observation.kept)
        elif activations.calibrator == "percentile" and len(activations.percentiles) > 1:
            _choose_percentile(activations.percentiles, proxy, observation, decided)
        if config.weights.rounding == "gptq":
            qmax = settings.profile.weight_qmax
            round_weights(proxy, observation, decided(), qmax=qmax, by_size=config.weights.act_order)
    observation.chosen_at = observation.batches
    return decided()


def _trials(proxy: Proxied, plan: Plan, observation: Seen, settings: PlanSettings) -> Iterator[Trial]:
    """Yield the activations that have a scale: quantized ones, and float ones that a better range may let quantize."""
    for site in proxy.sites:
        for operand in plan[site.path].operands:
            seen = observation.records[site.path].operands[operand.name]
            group, dtype = seen.range, judged_as(qtype(operand.dtype))
            fixed = dtype.is_float and seen.softmax
            if group is not None and operand.scale is not None and not fixed:
                yield Trial(
                    site=site,
                    operand=operand.name,
                    group=group,
                    dtype=dtype,
                    scale=partial(scale_of, dtype=dtype, scale_dtype=settings.scale_dtype),
                    planned=plan[site.path].operands,
                )


def _choose_percentile(
    percentiles: Sequence[float], proxy: Proxied, observation: Seen, decided: Callable[[], Plan]
) -> None:
    """Choose one percentile for all ranges: the one with the smallest error of the fully quantized model's output."""
    assert observation.kept is not None
    error = OutputError(proxy, observation.kept)
    errors: dict[float, float] = {}
    # If errors are equal, the larger range.
    for percentile in tqdm(sorted(percentiles, reverse=True), "choosing a percentile", leave=False, disable=None):
        _take_percentile(observation, percentile)
        errors[percentile] = error.of(decided())
    errors = dict(zip(errors, all_reduce_sum(errors.values()), strict=True))
    _take_percentile(observation, first_of_best(errors))


def _take_percentile(observation: Seen, percentile: float) -> None:
    for group in observation.groups:
        estimate = group.calibrator.seen_as("percentile", percentile=percentile)
        group.chosen = (estimate.amax(), f"percentile {percentile:g}")
