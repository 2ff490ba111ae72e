"""``Proxied``: a proxy with the facts about its sites that follow from its source and the settings."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import nn

from quantizer.algorithms.settings import Settings
from quantizer.plan.selection import exclusions
from quantizer.plan.weight_scales import ScaledWeights
from quantizer.proxy.build import UnrewrittenSource, applied_patches, build_proxy, sites_of, skipped_sources
from quantizer.proxy.site import Site, add_output_sites
from quantizer.rewrite.operator_patches import OperatorPatch


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
