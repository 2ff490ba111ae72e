"""Plain arguments for the stages, taken from a ``QuantizerConfig``, which the stages themselves do not know."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from functools import partial
from typing import Any

from quantizer.calibration.proxied import Proxied, selection_of
from quantizer.calibrators import CANDIDATES, OF_FORMAT, Calibrator, Estimate, make_calibrator
from quantizer.config import QuantizerConfig
from quantizer.config.quantizer_section import ActivationsConfig, WeightsConfig
from quantizer.config.schema import default_format, rule_formats
from quantizer.float16.float32_modules import Float32Modules
from quantizer.observe.observation import Observation
from quantizer.observe.replay_batches import FEW, MANY, Enough
from quantizer.plan.decide_operands import FormatRule, Formats, PlanSettings, formats_for
from quantizer.plan.site_plan import Plan
from quantizer.reasons import ReasonCode
from quantizer.targets import TargetProfile

logger = logging.getLogger(__name__)

_BY_OUTPUT = tuple(entry for entry in CANDIDATES if entry.label not in ("percentile 99.9", "entropy"))
"""These two were worse in every measurement (docs/explain/calibration.md)."""


def make_observation(proxy: Proxied) -> Observation:
    """Return an observation of a proxy, not attached yet."""
    config = proxy.config
    # Kinds of sites that are switched off need no observation.
    off = [kind for kind, switch in config.sites.model_dump().items() if switch is False]
    return Observation(
        proxy.sites,
        proxy.excluded,
        partial(calibrator_of, config),
        off,
        proxy.skipped,
        keep=_kept(config),
        channels=_with_channels(config),
        all_experts=config.activations.all_experts,
    )


def _kept(config: QuantizerConfig) -> Enough | None:
    if config.weights.rounding != "nearest":
        return MANY
    return FEW if replays_batches(config) or config.bias_correction else None


def _with_channels(config: QuantizerConfig) -> tuple[str, ...]:
    """Return the kinds of site for whose inputs the range of each channel is needed."""
    if config.activations.smooth is not None:
        return ("linear", "conv")
    return ("linear",) if config.weights.rounding == "awq" else ()


def sees_the_same(first: QuantizerConfig, second: QuantizerConfig, *, convolves: bool = True) -> bool:
    """Return whether calibration sees the same with both configurations, so that its statistics serve either.

    The percentile of a range is taken from them later, and so is what the target of a backend wants.
    """
    results = not convolves or first.target.quantizes_outputs == second.target.quantizes_outputs
    return results and _seen_with(first) == _seen_with(second)


def _seen_with(config: QuantizerConfig) -> tuple[object, ...]:
    calibrator = calibrator_of(config, histogram=False)
    off = [kind for kind, switch in config.sites.model_dump().items() if switch is False]
    kept = (type(calibrator), calibrator.histogram is None, _kept(config), _with_channels(config))
    return (off, config.include, config.exclude, config.activations.all_experts, *kept)


def replays_batches(config: QuantizerConfig) -> bool:
    """Return whether the model is run again to choose ranges or codes, for which a few batches are kept."""
    activations = config.activations
    return needs_batches(config) or activations.calibrator == "output" or activations.smooth is not None


def keeps_batches(config: QuantizerConfig) -> bool:
    """Return whether batches are kept, since a plan takes runs of the model for ranges, codes or biases."""
    return _kept(config) is not None


def needs_batches(config: QuantizerConfig) -> bool:
    """Return whether there is no plan without kept batches; other choices have a default for that case."""
    activations = config.activations
    several = activations.calibrator == "percentile" and len(activations.percentiles) > 1
    by_hand = several or activations.calibrator == "auto" or isinstance(activations.smooth, float)
    return by_hand or config.weights.rounding != "nearest"


def estimates_of(activations: ActivationsConfig) -> tuple[Estimate, ...]:
    """Return the estimates of ranges among which the model's output decides, the default first."""
    if activations.calibrator == "output":
        return _BY_OUTPUT
    if activations.calibrator == "percentile":
        # If errors are equal, the larger range.
        ordered = sorted(activations.percentiles, reverse=True)
        return tuple(Estimate(name="percentile", options={"percentile": value}) for value in ordered)
    return (Estimate(name=activations.calibrator),)


def calibrator_of(config: QuantizerConfig, histogram: bool) -> Calibrator:
    """Return the calibrator that the configuration names; with ``histogram`` it has a histogram in any case."""
    activations = config.activations
    # Before a choice of ranges: an estimate that needs only the values.
    name = {"auto": "mse", "output": "max"}.get(activations.calibrator, activations.calibrator)
    histogram = histogram or activations.calibrator == "output"
    options: dict[str, Any] = {}
    if name == "percentile":
        options["percentile"] = activations.percentiles[0]
    elif name in OF_FORMAT:
        options["dtype"] = config.dtype
    return make_calibrator(name, histogram=histogram, **options)


def warn_of_float32(target: TargetProfile, regions: Float32Modules) -> None:
    """Warn of the modules that stay float32 on the target, if there are any."""
    if regions.applies_to(target.torch_dtype):
        warnings.warn(f"{regions.text()}; fallback_dtype: bfloat16 holds such values", stacklevel=3)


def tell_where_nothing_is_quantized(plan: Plan) -> None:
    """Log a warning if a plan quantizes no site, so that the result is the float model."""
    if any(entry.quantized for entry in plan.values()):
        return
    reasons = Counter(
        entry.reason for entry in plan.values() if ReasonCode.of(entry.reason) is not ReasonCode.NEVER_RAN
    )
    most = "; ".join(f"{count} of {len(plan)} sites: {reason}" for reason, count in reasons.most_common(3))
    why = most or ("no site was reached" if plan else "no quantizable operation was found in its source")
    logger.warning("nothing is quantized: what quantize() gives is the float model (%s); see q.coverage", why)


def plan_settings(proxy: Proxied) -> PlanSettings:
    """Return the settings of a plan for ``proxy``: all that the plan depends on besides the data."""
    config = proxy.config
    return PlanSettings(
        formats=_formats(proxy),
        per_channel=config.weights.granularity == "per_channel",
        weight_estimate=_weight_estimate(config.weights),
        switches=config.sites.model_dump(),
        scale_dtype=config.target.torch_dtype,
        profile=config.target,
        weights=proxy.weights,
    )


def _weight_estimate(weights: WeightsConfig) -> str | None:
    if weights.calibrator == "percentile":
        return f"percentile {weights.percentile:g}"
    return None if weights.calibrator == "max" else weights.calibrator


def _formats(proxy: Proxied) -> Formats:
    config = proxy.config
    rules = [
        FormatRule(format=wanted, kinds=rule.kinds, sites=selection_of(rule))
        for wanted, rule in zip(rule_formats(config), config.formats, strict=True)
    ]
    zero_point = config.activations.zero_point
    return formats_for(proxy.module, proxy.sites, default_format(config), rules, config.target, zero_point=zero_point)
