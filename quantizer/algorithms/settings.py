"""Settings of calibration as plain values, made from a configuration, and warnings about a plan."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quantizer.numerics.formats import Format
from quantizer.observe.calibrators import CANDIDATES, OF_FORMAT, Calibrator, Estimate, make_calibrator
from quantizer.observe.float16_modules import Float32Modules
from quantizer.plan.decide_operands import FormatRule
from quantizer.plan.reasons import ran
from quantizer.plan.selection import Selection
from quantizer.plan.site_plan import Plan
from quantizer.plan.targets import TargetProfile

logger = logging.getLogger(__name__)

_BY_OUTPUT = tuple(entry for entry in CANDIDATES if entry.label not in ("percentile 99.9", "entropy"))
"""The candidates without two that were worse in every measurement (docs/design/calibration.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings of one quantizer's calibration and plan; the fields are the keys of ``QuantizerConfig``.

    Attributes:
        default: the format of sites that no rule matches.
        rules: the rules of ``formats``.
        switches: ``sites``: whether each kind of site is quantized.
        percentiles: the percentiles to compare, one without a search.
        weight_estimate: the calibrator of weights; None: max.
        text: the whole configuration as JSON.
        alike: the configuration without the backend and its candidates, as JSON.
    """

    backend: str
    target: TargetProfile
    dtype: str
    default: Format
    rules: tuple[FormatRule, ...]
    include: Selection
    exclude: Selection
    switches: Mapping[str, bool | str] = field(hash=False)
    calibrator: str
    percentiles: tuple[float, ...]
    smoothquant_alpha: float | str | None
    zero_point: bool
    all_experts: bool
    per_channel: bool
    weight_estimate: str | None
    rounding: str
    act_order: bool
    bias_correction: bool
    text: str
    alike: str

    @property
    def off(self) -> list[str]:
        return [kind for kind, switch in self.switches.items() if switch is False]

    @property
    def estimates(self) -> tuple[Estimate, ...]:
        """The candidate estimates of ranges for a search by the model's output, the default first."""
        if self.calibrator == "output":
            return _BY_OUTPUT
        if self.calibrator == "percentile":
            # If errors are equal, the larger range wins.
            ordered = sorted(self.percentiles, reverse=True)
            return tuple(Estimate(name="percentile", options={"percentile": value}) for value in ordered)
        return (Estimate(name=self.calibrator),)

    def make_calibrator(self, histogram: bool = False) -> Calibrator:
        """Return a calibrator of activations; ``histogram`` forces a histogram."""
        # Until ranges are chosen, an estimate that needs only the values.
        name = {"auto": "mse", "output": "max"}.get(self.calibrator, self.calibrator)
        histogram = histogram or self.calibrator == "output"
        options: dict[str, Any] = {}
        if name == "percentile":
            options["percentile"] = self.percentiles[0]
        elif name in OF_FORMAT:
            options["dtype"] = self.dtype
        return make_calibrator(name, histogram=histogram, **options)


def warn_of_float32(target: TargetProfile, regions: Float32Modules) -> None:
    """Warn of modules that stay float32 if the target computes in float16."""
    if regions.applies_to(target.torch_dtype):
        warnings.warn(f"{regions.text()}; fallback_dtype: bfloat16 can represent these values", stacklevel=3)


def tell_where_nothing_is_quantized(plan: Plan) -> None:
    """Log a warning if a plan quantizes no site."""
    if any(entry.quantized for entry in plan.values()):
        return
    reasons = Counter(entry.reason for entry in plan.values() if ran(entry.reason))
    most = "; ".join(f"{count} of {len(plan)} sites: {reason}" for reason, count in reasons.most_common(3))
    why = most or ("no site was reached" if plan else "no quantizable operation was found in its source")
    logger.warning("nothing is quantized, so quantize() returns the float model (%s); see q.coverage", why)
