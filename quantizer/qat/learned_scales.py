"""Scales that are trained with the weights (LSQ, Esser et al. 2020, arXiv:1902.08153).

The scales of a proxy become parameters, and take their start from calibration. Operands that read one tensor share one
parameter, as they share one Q in the exported file.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch import nn

from quantizer.proxy.build import sites_of
from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.proxy.plan import OperandPlan
from quantizer.proxy.plan import Plan

__all__ = ["learn_scales", "learned_scales"]


def learn_scales(proxy: nn.Module, plan: Plan) -> None:
    """Make a parameter of every scale that the plan uses; the proxy has the plan's scales already."""
    shared: dict[tuple[str, str, bool], nn.Parameter] = {}
    for _, operand, quantizer in _scaled(proxy, plan):
        assert quantizer.scale is not None
        parameter = nn.Parameter(quantizer.scale.detach().clone())
        if operand.range_group is not None:
            key = operand.range_group, operand.dtype, operand.smooth is not None
            parameter = shared.setdefault(key, parameter)
        quantizer.learn_scale(parameter, of_samples=operand.role != "weight")


def learned_scales(proxy: nn.Module, plan: Plan) -> Mapping[str, Tensor]:
    """The scales as they are now, by ``SITE.OPERAND``."""
    found = {}
    for name, _, quantizer in _scaled(proxy, plan):
        assert quantizer.scale is not None
        found[name] = quantizer.scale.detach().clone()
    return found


def _scaled(proxy: nn.Module, plan: Plan) -> list[tuple[str, OperandPlan, OperandQuantizer]]:
    """Name, plan and quantizer of every operand with a scale."""
    return [
        (f"{site.path}.{operand.name}", operand, site.quantizer_of(operand.name))
        for site in sites_of(proxy)
        for operand in plan[site.path].operands
        if operand.quantized
    ]
