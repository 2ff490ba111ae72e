"""Conversion of a configuration into the settings of calibration, which does not import the configuration."""

from __future__ import annotations

from quantizer.algorithms.settings import Settings
from quantizer.config import QuantizerConfig, SelectionConfig
from quantizer.config.quantizer_section import WeightsConfig
from quantizer.config.schema import default_format, rule_formats
from quantizer.plan.decide_operands import FormatRule
from quantizer.plan.selection import Selection


def settings_of(config: QuantizerConfig) -> Settings:
    """Return the calibration settings of a quantizer's configuration."""
    activations, weights = config.activations, config.weights
    return Settings(
        backend=config.backend,
        target=config.target,
        dtype=config.dtype,
        default=default_format(config),
        rules=tuple(
            FormatRule(format=number_format, kinds=rule.kinds, sites=_selection(rule))
            for number_format, rule in zip(rule_formats(config), config.formats, strict=True)
        ),
        include=_selection(config.include),
        exclude=_selection(config.exclude),
        switches=config.sites.model_dump(),
        calibrator=activations.calibrator,
        percentiles=activations.percentiles,
        smoothquant_alpha=activations.smoothquant_alpha,
        zero_point=activations.zero_point,
        all_experts=activations.all_experts,
        per_channel=weights.granularity == "per_channel",
        weight_estimate=_weight_estimate(weights),
        rounding=weights.rounding,
        act_order=weights.act_order,
        bias_correction=config.bias_correction,
        text=config.model_dump_json(),
        alike=config.model_dump_json(exclude={"backend", "candidates"}),
    )


def _selection(section: SelectionConfig) -> Selection:
    return Selection(module_types=section.module_types, names=section.names, sites=section.sites)


def _weight_estimate(weights: WeightsConfig) -> str | None:
    if weights.calibrator == "percentile":
        return f"percentile {weights.percentile:g}"
    return None if weights.calibrator == "max" else weights.calibrator
