"""The interface of algorithms: ``Algorithm`` maps a plan to a plan, ``Work`` is its input.

An algorithm runs stored batches again. The file also holds the code that all algorithms share which choose integers of
weights: weights without a choice, and progress that survives an interrupt.
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
    """A proxy with the settings of its calibration.

    Attributes:
        settings: the settings of the calibration.
        module: the proxy, or a model that was instrumented in place; never the user's float model, which stays free to
            be deleted.
        sites: all sites of ``module``, in the order of its modules.
        excluded: the rule that excludes a site or operand, by ``SITE`` or ``SITE.OPERAND``.
        skipped: calls and functions whose source could not be rewritten.
        patches: the operator patches in the rewritten source, by name.
        weights: the cached scales of weights.
    """

    settings: Settings
    module: nn.Module
    sites: tuple[Site, ...]
    excluded: Mapping[str, str]
    skipped: tuple[UnrewrittenSource, ...]
    patches: tuple[OperatorPatch, ...]
    weights: ScaledWeights = field(default_factory=ScaledWeights)

    def planned(self, plan: Collection[str]) -> list[Site]:
        """Return the sites of a plan; output sites that calibration did not observe are not in it."""
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
    """Return the ``Proxied`` of a new proxy of a model, in eval mode and with eager attention."""
    return proxied(settings, build_proxy(model, eager_attention=True).eval(), model)


def _never(settings: Settings) -> bool:
    return False


def _none(settings: Settings) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Algorithm:
    """An algorithm that runs stored batches again and records its choices in the statistics, from which plans follow.

    Attributes:
        wanted: whether the settings request it.
        run: returns the plan with its choices.
        batches: how many batches are stored for it.
        channels: the kinds of site whose inputs need a range per channel.
        needs_batches: whether no plan exists without stored batches; otherwise there is a default.
    """

    wanted: Callable[[Settings], bool]
    run: Callable[[Plan, Work], Plan]
    batches: Enough = FEW
    channels: Callable[[Settings], tuple[str, ...]] = _none
    needs_batches: Callable[[Settings], bool] = _never


algorithms: Registry[Algorithm] = Registry("algorithm", of="object", has=("wanted", "run"))
"""Algorithms of other packages; ``algorithms.add(name)(Algorithm(...))`` adds one that runs after the built-in ones."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Work:
    """A calibrated proxy, whose observation is paused, with its statistics.

    Attributes:
        observed: the statistics, in which choices are recorded.
        error: the error of the model's output with a plan.
        planned: the settings of a plan.
    """

    proxy: Proxied
    observed: Seen
    error: OutputError
    planned: PlanSettings = field(repr=False)

    @classmethod
    def of(cls, proxy: Proxied, observed: Seen) -> Work:
        """Return the work on a proxy, with the settings of its plan."""
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
        error = OutputError(proxy, None if observed.kept is None else observed.kept.known)
        return cls(proxy=proxy, observed=observed, error=error, planned=planned)

    @property
    def settings(self) -> Settings:
        return self.proxy.settings

    @property
    def kept(self) -> ReplayBatches:
        """The stored batches; a CalibrationError if there are none."""
        if self.observed.kept is None:
            raise CalibrationError(
                "no batches were stored for the algorithms; add the algorithms to `algorithms` before calibration"
            )
        return self.observed.kept

    def plan(self) -> Plan:
        """Return the plan for the choices so far."""
        return decide(self.proxy.module, list(self.proxy.sites), self.observed, self.proxy.excluded, self.planned)


UNREACHED = "no stored batch reaches it"


@contextmanager
def with_all_batches(work: Work) -> Iterator[None]:
    """Run the block in each process alone with all stored batches, so that all get the same bits."""
    if get_world_size() > 1 and not work.kept.on_every_rank:
        raise CalibrationError(
            f"weights.rounding: {work.settings.rounding} needs all inputs of a weight, but each process has its own "
            "batches; pass the same batches to all processes with calibrate(split=True), calibrate in one process, or "
            "use rounding: nearest"
        )
    with alone():
        yield


def progress(plan: Plan, work: Work) -> RoundingProgress:
    """Return the finished part of the rounding of weights; additions survive an interrupt."""
    key, known = _key(plan, work), work.observed.rounding
    if known is None or known.key != key:
        known = work.observed.rounding = RoundingProgress(key=key)
    return known


def record(observation: Seen, chosen: Mapping[str, RoundedWeight]) -> None:
    """Record how each weight, by ``SITE.OPERAND``, was rounded."""
    for name, rounded in chosen.items():
        path, _, operand = name.rpartition(".")
        observation.records[path].operands[operand].rounded = rounded


def nearest(why: str) -> RoundedWeight:
    """Return a weight that is rounded to nearest, with the reason."""
    return RoundedWeight(codes=None, text=f"rounded to nearest: {why}")


def stored_weights(plan: Plan) -> Counter[tuple[object, object, object]]:
    """Return how many sites store each weight of a plan."""
    operands = (o for entry in plan.values() for o in entry.operands if o.quantized and o.role == "weight")
    return Counter((operand.parameter, operand.view, operand.computation) for operand in operands)


def why_nearest(weight: OperandPlan, stored: Counter[tuple[object, object, object]], method: str) -> str | None:
    """Return why a weight is always rounded to nearest; None if its integers can be chosen."""
    kind = qtype(weight.dtype)
    if kind.is_float:
        return f"{method} applies to integer formats, not to {kind.name}"
    if stored[weight.parameter, weight.view, weight.computation] > 1:
        return "other sites use the same weight, which a file stores once"
    return None


def _key(plan: Plan, work: Work) -> str:
    """Return a checksum of all inputs of the integers: weights, scales, factors, batches and the configuration."""
    tensors = {
        f"{path}.{operand.name}.{field}": value
        for path, entry in plan.items()
        for operand in entry.operands
        for field, value in (("scale", operand.scale), ("smooth", operand.smooth))
        # The scales of weights follow from the other inputs, or were chosen together with the integers.
        if operand.quantized and value is not None and (operand.role, field) != ("weight", "scale")
    }
    weights = Fingerprint.of(work.proxy.module).plain()
    return tensors_digest(tensors, f"{weights} {work.kept.digest} {work.settings.text}")
