"""``Algorithm``: a function from plan to plan that runs kept batches again, and ``Work``: what it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from quantizer.algorithms.proxied import Proxied
from quantizer.algorithms.replay import OutputError
from quantizer.algorithms.settings import Settings
from quantizer.errors import CalibrationError
from quantizer.observe.replay_batches import FEW, Enough, ReplayBatches
from quantizer.observe.statistics import Seen
from quantizer.plan.decide_operands import PlanSettings, formats_for
from quantizer.plan.decide_sites import decide
from quantizer.plan.site_plan import Plan
from quantizer.utils.registry import Registry


def _never(settings: Settings) -> bool:
    return False


def _none(settings: Settings) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Algorithm:
    """An algorithm that runs kept batches again, and notes its choices in the statistics, which decide the plan anew.

    Attributes:
        wanted: whether settings ask for it.
        run: returns the plan with its choices.
        batches: how many batches are kept for it.
        channels: the kinds of site for whose inputs it needs the range of each channel.
        needs_batches: whether there is no plan without kept batches; otherwise there is a default.
    """

    wanted: Callable[[Settings], bool]
    run: Callable[[Plan, Work], Plan]
    batches: Enough = FEW
    channels: Callable[[Settings], tuple[str, ...]] = _none
    needs_batches: Callable[[Settings], bool] = _never


algorithms: Registry[Algorithm] = Registry("algorithm", of="object", has=("wanted", "run"))
"""Those of other packages: ``algorithms.add(name)(Algorithm(...))`` adds one, which runs after the package's own."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Work:
    """A calibrated proxy, whose observation is paused, with its statistics.

    Attributes:
        observed: the statistics, in which choices are noted.
        error: the error of the model's output with a plan.
        planned: the settings of a plan.
    """

    proxy: Proxied
    observed: Seen
    error: OutputError
    planned: PlanSettings = field(repr=False)

    @classmethod
    def of(cls, proxy: Proxied, observed: Seen) -> Work:
        """Return the work on a proxy, with the settings of its plan: all that it depends on besides the data."""
        settings = proxy.settings
        planned = PlanSettings(
            formats=formats_for(
                proxy.module,
                proxy.sites,
                settings.default,
                settings.rules,
                settings.target,
                zero_point=settings.zero_point,
            ),
            per_channel=settings.per_channel,
            weight_estimate=settings.weight_estimate,
            switches=settings.switches,
            scale_dtype=settings.target.torch_dtype,
            profile=settings.target,
            weights=proxy.weights,
        )
        error = OutputError(proxy, None if observed.kept is None else observed.kept.known.errors)
        return cls(proxy=proxy, observed=observed, error=error, planned=planned)

    @property
    def settings(self) -> Settings:
        """The settings of the calibration."""
        return self.proxy.settings

    @property
    def kept(self) -> ReplayBatches:
        """All batches that are kept."""
        if self.observed.kept is None:
            raise CalibrationError("no batch was kept for the algorithms: add them to `algorithms` before calibration")
        return self.observed.kept

    def plan(self) -> Plan:
        """Return the plan by the choices so far."""
        return decide(self.proxy.module, list(self.proxy.sites), self.observed, self.proxy.excluded, self.planned)
