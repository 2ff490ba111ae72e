"""Plain arguments of the stages, from a ``QuantizerConfig``: the config itself does not enter them."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterable
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from quantizer.calibrators import OF_FORMAT
from quantizer.calibrators import Calibrator
from quantizer.calibrators import make_calibrator
from quantizer.config import QuantizerConfig
from quantizer.config import SelectionConfig
from quantizer.config.feasibility import default_format
from quantizer.config.feasibility import rule_formats
from quantizer.float16.float32_modules import Float32Modules
from quantizer.observe.observation import Observation
from quantizer.plan.decide_operands import PlanSettings
from quantizer.plan.operand_formats import FormatRule
from quantizer.plan.operand_formats import Formats
from quantizer.plan.operand_formats import formats_for
from quantizer.plan.selection import Selection
from quantizer.plan.selection import exclusions
from quantizer.plan.site_plan import Plan
from quantizer.proxy.build import UnrewrittenSource
from quantizer.proxy.build import sites_of
from quantizer.reasons import ReasonCode
from quantizer.targets import TargetProfile

__all__ = [
    "calibrator_of",
    "make_observation",
    "plan_settings",
    "excluded_sites",
    "replays_batches",
    "tell_where_nothing_is_quantized",
    "warn_of_float32",
]

logger = logging.getLogger(__name__)


def make_observation(
    config: QuantizerConfig, proxy: nn.Module, refused: Mapping[str, str], skipped: Iterable[UnrewrittenSource] = ()
) -> Observation:
    """Return an observation of ``proxy``, not attached yet; ``skipped``: calls that are no sites, and why."""
    # What a switch turns off need not be observed either.
    off = [kind for kind, switch in config.sites.model_dump().items() if switch is False]
    return Observation(
        sites_of(proxy),
        refused,
        partial(calibrator_of, config),
        off,
        skipped,
        keep=replays_batches(config),
        channels=config.activations.smooth is not None,
    )


def replays_batches(config: QuantizerConfig) -> bool:
    """Return whether ranges are found by running the model again: a few batches are kept for that."""
    activations = config.activations
    several = activations.calibrator == "percentile" and len(activations.percentiles) > 1
    return several or activations.calibrator == "auto" or activations.smooth is not None


def calibrator_of(config: QuantizerConfig, histogram: bool) -> Calibrator:
    """Return a calibrator as the config wants it; ``histogram`` asks for a histogram in any case."""
    activations = config.activations
    # Until ranges are chosen: the estimate that needs nothing but the values.
    name = "mse" if activations.calibrator == "auto" else activations.calibrator
    options: dict[str, Any] = {}
    if name == "percentile":
        options["percentile"] = activations.percentiles[0]
    elif name in OF_FORMAT:
        options["dtype"] = config.dtype
    return make_calibrator(name, histogram=histogram, **options)


def excluded_sites(config: QuantizerConfig, proxy: nn.Module) -> dict[str, str]:
    """Return the sites and operands that rules leave out, each with the rule that decided.

    Raises:
        ConfigError: a rule matches nothing in the model.
    """
    return exclusions(proxy, sites_of(proxy), _rules(config.include), _rules(config.exclude))


def _rules(section: SelectionConfig) -> Selection:
    return Selection(module_types=section.module_types, names=section.names, sites=section.sites)


def warn_of_float32(target: TargetProfile, regions: Float32Modules) -> None:
    """Say which modules stay float32 in what is made for the target, where some do."""
    if regions.applies_to(target.torch_dtype):
        warnings.warn(f"{regions.text()}; fallback_dtype: bfloat16 holds such values", stacklevel=3)


def tell_where_nothing_is_quantized(plan: Plan) -> None:
    """Say so where no site of a plan is quantized: what is made of it is the float model."""
    if any(entry.quantized for entry in plan.values()):
        return
    reasons = Counter(
        entry.reason for entry in plan.values() if ReasonCode.of(entry.reason) is not ReasonCode.NEVER_RAN
    )
    most = "; ".join(f"{count} of {len(plan)} sites: {reason}" for reason, count in reasons.most_common(3))
    why = most or ("no site was reached" if plan else "no quantizable operation was found in its source")
    logger.warning("nothing is quantized: what quantize() gives is the float model (%s); see q.coverage", why)


def plan_settings(config: QuantizerConfig, proxy: nn.Module) -> PlanSettings:
    """Return what a plan for ``proxy`` depends on besides the data.

    Raises:
        ConfigError: a rule of ``formats`` matches nothing in it, or asks for what the target cannot compute in.
    """
    return PlanSettings(
        formats=_formats(config, proxy),
        per_channel=config.weights.granularity == "per_channel",
        switches=config.sites.model_dump(),
        scale_dtype=config.target.torch_dtype,
        profile=config.target,
    )


def _formats(config: QuantizerConfig, proxy: nn.Module) -> Formats:
    rules = [
        FormatRule(format=wanted, kinds=rule.kinds, sites=_rules(rule))
        for wanted, rule in zip(rule_formats(config), config.formats, strict=True)
    ]
    return formats_for(proxy, sites_of(proxy), default_format(config), rules, config.target)
