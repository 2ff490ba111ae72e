"""``Algorithm``: a function from plan to plan that runs kept batches again, and ``Work``: what it is given.

The parts that all choices of codes by data share: weights without a choice, and the work before an interrupt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn

from quantizer.algorithms.replay import OutputError
from quantizer.algorithms.settings import Settings
from quantizer.errors import CalibrationError
from quantizer.numerics.formats import qtype
from quantizer.observe.range_group import RoundedWeight
from quantizer.observe.replay_batches import FEW, Enough, ReplayBatches
from quantizer.observe.statistics import RoundingProgress, Seen
from quantizer.plan.decide_operands import PlanSettings, formats_for
from quantizer.plan.decide_sites import decide
from quantizer.plan.selection import exclusions
from quantizer.plan.site_plan import OperandPlan, Plan
from quantizer.plan.weight_scales import ScaledWeights
from quantizer.proxy.build import UnrewrittenSource, applied_patches, build_proxy, sites_of, skipped_sources
from quantizer.proxy.site import Site, add_output_sites
from quantizer.rewrite.operator_patches import OperatorPatch
from quantizer.utils.distributed import alone, get_world_size
from quantizer.utils.fingerprint import Fingerprint, tensors_digest
from quantizer.utils.registry import Registry


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Proxied:
    """A proxy as one quantizer calibrates it.

    Attributes:
        settings: the settings of the calibration.
        module: the proxy, or a model that was instrumented in place; never the user's float model, so that keeping
            this keeps no model alive.
        sites: all sites of ``module``, in the order of its modules.
        excluded: the rule that leaves out a site or operand, by ``SITE`` or ``SITE.OPERAND``.
        skipped: calls and functions whose source could not be rewritten.
        patches: the operator patches in the rewritten source, by name.
        weights: the scales of weights that plans of it were made with.
    """

    settings: Settings
    module: nn.Module
    sites: tuple[Site, ...]
    excluded: Mapping[str, str]
    skipped: tuple[UnrewrittenSource, ...]
    patches: tuple[OperatorPatch, ...]
    weights: ScaledWeights = field(default_factory=ScaledWeights)

    def planned(self, plan: Collection[str]) -> list[Site]:
        """Return the sites that a plan has: without those of results that nothing followed in calibration."""
        return [site for site in self.sites if site.path in plan]


def proxied(settings: Settings, module: nn.Module, source: nn.Module | None = None) -> Proxied:
    """Return the ``Proxied`` of a proxy."""
    if settings.target.quantizes_outputs:
        add_output_sites(module)
    sites = tuple(sites_of(module))
    scanned = module if source is None else source
    return Proxied(
        settings=settings,
        module=module,
        sites=sites,
        excluded=exclusions(module, sites, settings.include, settings.exclude),
        skipped=tuple(skipped_sources(scanned)),
        patches=applied_patches(scanned),
    )


def proxied_copy(settings: Settings, model: nn.Module) -> Proxied:
    """Return a new proxy of a float model, in eval mode and with eager attention; see ``proxied`` for errors."""
    return proxied(settings, build_proxy(model, eager_attention=True).eval(), model)


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


UNREACHED = "no batch that was kept reaches it"


@contextmanager
def with_all_batches(work: Work) -> Iterator[None]:
    """Let each process do the block by itself with all kept batches, which gives all of them the same bits."""
    if get_world_size() > 1 and not work.kept.on_every_rank:
        raise CalibrationError(
            f"weights.rounding: {work.settings.rounding} needs all that a weight multiplies, and each process has its "
            "own batches: give all of them the same ones with calibrate(split=True), calibrate in one process, or with "
            "rounding: nearest"
        )
    with alone():
        yield


def progress(plan: Plan, work: Work) -> RoundingProgress:
    """Return what is rounded already; what is added to it survives an interrupt."""
    key, known = _key(plan, work), work.observed.rounding
    if known is None or known.key != key:
        known = work.observed.rounding = RoundingProgress(key=key)
    return known


def record(observation: Seen, chosen: Mapping[str, RoundedWeight]) -> None:
    """Set ``rounded`` of the records of weights, by ``SITE.OPERAND``."""
    for name, rounded in chosen.items():
        path, _, operand = name.rpartition(".")
        observation.records[path].operands[operand].rounded = rounded


def nearest(why: str) -> RoundedWeight:
    """Return the nearest codes, with the reason."""
    return RoundedWeight(codes=None, text=f"rounded to nearest: {why}")


def stored_weights(plan: Plan) -> Counter[tuple[object, object, object]]:
    """Return how many sites store each weight of a plan."""
    operands = (o for entry in plan.values() for o in entry.operands if o.quantized and o.role == "weight")
    return Counter((operand.parameter, operand.view, operand.computation) for operand in operands)


def why_nearest(weight: OperandPlan, stored: Counter[tuple[object, object, object]], method: str) -> str | None:
    """Return why a weight keeps the nearest codes whatever the data is; None if its codes can be chosen."""
    kind = qtype(weight.dtype)
    if kind.is_float:
        return f"{method} chooses whole numbers, and those of {kind.name} are none"
    if stored[weight.parameter, weight.view, weight.computation] > 1:
        return "other sites store the same weight, and a file holds it once"
    return None


def _key(plan: Plan, work: Work) -> str:
    """Return a checksum of all that the codes depend on: weights, scales, factors, batches and the configuration."""
    tensors = {
        f"{path}.{operand.name}.{field}": value
        for path, entry in plan.items()
        for operand in entry.operands
        for field, value in (("scale", operand.scale), ("smooth", operand.smooth))
        # The scales of weights follow from what else is in the checksum, or were chosen together with codes.
        if operand.quantized and value is not None and (operand.role, field) != ("weight", "scale")
    }
    weights = Fingerprint.of(work.proxy.module).plain()
    return tensors_digest(tensors, f"{weights} {work.kept.digest} {work.settings.text}")
