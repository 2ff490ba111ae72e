"""The lowering of a frozen proxy, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from quantizer.common.shown import Rows
from quantizer.errors import ProxyError
from quantizer.numerics.byte_codes import spend_deprecation_warning
from quantizer.proxy.build import sites_of
from quantizer.proxy.lowered.choose import Lowering
from quantizer.proxy.lowered.lowered_site import LoweredSite

_MARK = "_quantizer_lowered"


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteKernel:
    """The kernel of a quantized site of a lowered proxy, or why it has none.

    Attributes:
        name: the site.
        operation: what it calls.
        kernel: the operator of torch that computes with its codes; None: its operands are rounded, and it computes in
            floats.
        reason: why there is no kernel; empty if there is one.
    """

    name: str
    operation: str
    kernel: str | None
    reason: str


class Kernels(Rows[SiteKernel]):
    """The quantized sites of a lowered model, with the kernel of each."""

    look = "kernels"


def lower(proxy: nn.Module, lowering: Lowering) -> nn.Module:
    """Let the sites of a frozen proxy compute with torch's kernels, in place; return it."""
    spend_deprecation_warning()
    vars(proxy)[_MARK] = True
    _need_no_gradients(proxy)
    for site in sites_of(proxy):
        if site.active:
            LoweredSite.of(site, lowering)
    return proxy


def _need_no_gradients(proxy: nn.Module) -> None:
    """Let no parameter need a gradient: what does then is an input, or what the model differentiates itself.

    The memory of a parameter may be that of the user's model, whose own need of gradients does not change.
    """
    # With the parameter itself, which must live as long as its id is looked up.
    fixed: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in proxy.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                if id(parameter) not in fixed:
                    fixed[id(parameter)] = parameter, nn.Parameter(parameter.detach(), requires_grad=False)
                module._parameters[name] = fixed[id(parameter)][1]
    for site in sites_of(proxy):
        for place in range(len(site.operation.operands)):
            frozen = site.quantizer(place).frozen
            if frozen is not None:
                frozen.follow(fixed)


def is_lowered(model: nn.Module) -> bool:
    """Return whether a model is a lowered proxy, or a copy of one."""
    return _MARK in vars(model)


def kernels_of(lowered: nn.Module) -> list[SiteKernel]:
    """Return what computes each quantized site."""
    if not is_lowered(lowered):
        raise ProxyError("kernels() takes the model that lower() returned")
    found = []
    for site in sites_of(lowered):
        if isinstance(site, LoweredSite):
            choice = site.choice()
            kernel, reason = (None, choice) if isinstance(choice, str) else (choice.name, "")
            entry = SiteKernel(name=site.path, operation=site.source.operation, kernel=kernel, reason=reason)
            found.append(entry)
    return found
