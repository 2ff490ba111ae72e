"""Scales that are trained with the weights (LSQ, Esser et al. 2020, arXiv:1902.08153).

Each is multiplied by the exponential of a parameter that starts at 0. Operands that read one tensor share a parameter,
as they share one Q in the exported file.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch import nn

from quantizer.proxy.build import sites_of
from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.proxy.plan import OperandPlan
from quantizer.proxy.plan import Plan
from quantizer.proxy.scales import scale_group

__all__ = ["learn_scales", "learned_scales"]


def learn_scales(proxy: nn.Module, plan: Plan) -> None:
    """Train every scale that the plan uses; the proxy has the plan's scales already."""
    shared: dict[tuple[str, str, bool], nn.Parameter] = {}
    for _, operand, quantizer in _scaled(proxy, plan):
        assert quantizer.scale is not None
        parameter = nn.Parameter(torch.zeros_like(quantizer.scale))
        group = scale_group(operand)
        if group is not None:
            parameter = shared.setdefault(group, parameter)
        quantizer.learn_scale(parameter, of_samples=operand.role != "weight")


def learned_scales(proxy: nn.Module, plan: Plan) -> Mapping[str, Tensor]:
    """The scales as they are now, by ``SITE.OPERAND``."""
    return {name: quantizer.current_scale().clone() for name, _, quantizer in _scaled(proxy, plan)}


def _scaled(proxy: nn.Module, plan: Plan) -> list[tuple[str, OperandPlan, OperandQuantizer]]:
    """Name, plan and quantizer of every operand with a scale."""
    return [
        (f"{site.path}.{operand.name}", operand, site.quantizer_of(operand.name))
        for site in sites_of(proxy)
        for operand in plan[site.path].operands
        if operand.quantized
    ]
