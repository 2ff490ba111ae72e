"""Carrying a plan out: setting scales, storing weights as integers, switching sites on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Mapping

from torch import nn

from quantizer.errors import ProxyError
from quantizer.proxy.build import sites_of
from quantizer.proxy.classes import with_stored_weight
from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.proxy.plan import SitePlan
from quantizer.proxy.site import Site
from quantizer.source.catalogue import Operand

__all__ = ["apply_plan", "freeze", "store_weights"]


def apply_plan(proxy: nn.Module, plan: Mapping[str, SitePlan], dtype: str) -> None:
    """Give every operand that the plan quantizes its scale; sites stay inactive.

    Raises:
        ProxyError: the proxy has not the sites that the plan names, so it was made from another model.
    """
    sites = {site.path: site for site in sites_of(proxy)}
    missing = sorted(set(plan) ^ set(sites))
    if missing:
        raise ProxyError(
            f"the calibration belongs to another model: {len(missing)} sites differ, the first is {missing[0]!r}; "
            "calibrate this model with a Quantizer of its own"
        )
    for path, entry in plan.items():
        site = sites[path]
        for position, operand in enumerate(site.operation.operands):
            planned = next((o for o in entry.operands if o.name == operand.name), None)
            if planned is not None and planned.quantized:
                assert planned.scale is not None
                site.quantizer(position).set_scale(planned.scale, dtype, planned.axis)


def store_weights(proxy: nn.Module, plan: Mapping[str, SitePlan]) -> None:
    """Keep the weights that the plan quantizes as integers in their sites; the modules keep their parameters.

    Raises:
        ProxyError: a weight is not a parameter of the module that holds the site.
    """
    for site, quantizer, operand in _weights(proxy, plan):
        host = _host(proxy, site)
        parameter = host._parameters.get(operand.keyword)
        if parameter is None:
            raise ProxyError(f"{site.path}: the weight is not the module's own parameter {operand.keyword!r}")
        assert quantizer.scale is not None
        # A weight comes back in its module's own float type, which is that of its scale.
        quantizer.scale = quantizer.scale.to(parameter.dtype)
        quantizer.store(parameter)


def freeze(proxy: nn.Module, plan: Mapping[str, SitePlan]) -> None:
    """Store the weights, drop the float ones, and switch the planned sites on.

    A parameter that only one site reads is dropped from its module and read back through a property; one that others
    read too (tied to an embedding, say) stays, and the site keeps integers of its own.
    """
    store_weights(proxy, plan)
    uses = Counter(id(parameter) for module in proxy.modules() for parameter in module._parameters.values())
    for site in sites_of(proxy):
        site.active = plan[site.path].quantized
    for site, quantizer, operand in _weights(proxy, plan):
        host = _host(proxy, site)
        others = [other for other in host.children() if isinstance(other, Site) and other is not site and other.active]
        if uses[id(host._parameters[operand.keyword])] == 1 and not others:
            del host._parameters[operand.keyword]
            host.__class__ = with_stored_weight(type(host), operand.keyword, site.source.attribute)
            quantizer.handed_over = True


def _weights(proxy: nn.Module, plan: Mapping[str, SitePlan]) -> Iterator[tuple[Site, OperandQuantizer, Operand]]:
    """The weight operands that the plan quantizes."""
    for site in sites_of(proxy):
        planned = {operand.name: operand for operand in plan[site.path].operands}
        for position, operand in enumerate(site.operation.operands):
            entry = planned.get(operand.name)
            if entry is not None and entry.quantized and entry.role == "weight":
                yield site, site.quantizer(position), operand


def _host(proxy: nn.Module, site: Site) -> nn.Module:
    return proxy.get_submodule(site.host_path)
