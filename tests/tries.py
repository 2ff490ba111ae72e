"""What tests of a search compare: plans with random groups kept in float, and all that a metric sees of a model."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

from quantizer.plan.site_plan import Plan, with_fallback


def without(plan: Plan, choice: random.Random, share: float) -> Plan:
    """The plan with about this share of its groups kept in float."""
    groups = sorted({operand.group for entry in plan.values() for operand in entry.operands if operand.group})
    return with_fallback(plan, {group: "tried" for group in groups if choice.random() < share})


def seen(proxy: nn.Module, data: Any) -> dict[str, Any]:
    """All that a metric can see of a model after a pass, in the order in which the model lists it."""
    with torch.no_grad():
        output = proxy(**data) if isinstance(data, dict) else proxy(data)
    return {
        "output": output,
        "state": proxy.state_dict(),
        "parameters": list(proxy.parameters()),
        "named": [(name, value.requires_grad) for name, value in proxy.named_parameters()],
        "buffers": list(proxy.named_buffers()),
        "classes": [str(type(module)) for module in proxy.modules()],
        "attributes": [sorted(vars(module)) for module in proxy.modules()],
        "texts": [module.extra_repr() for module in proxy.modules()],
        "modes": [module.training for module in proxy.modules()],
        "hooks": [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in proxy.modules()],
    }
