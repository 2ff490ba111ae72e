"""Measure ``gradient``: a second-order estimate of the output's divergence, for all groups by one backward pass.

Legend: y the output; d_s [.., C] the change of a site's output with a group rounded, its rows d_st; J_st the derivative
of y by such a row; v a random direction at the output with the covariance H, the Hessian of the divergence (see
``divergence.py``). To second order a change J d of the output costs |J d|^2 in the metric H, and since g_st = v J_st
comes from one backward pass, E (g_st . d_st)^2 is that cost. The estimate for a group is the sum of (g_st . d_st)^2
over the rows of its sites: the errors of rows are taken as independent, so that thousands of rows average out what one
random direction leaves open. (Hutchinson's estimator; with a loss, g is its gradient, and the estimate that of the
empirical Fisher matrix.)

Groups that no gradient reaches (behind a rounding, an argmax, a block without gradients) are not in the answer, and
neither are those whose changes are not small: where a range cuts off the values of a few rows that the rest of the
network goes by (the first token of many decoders), the true cost is bounded, or far larger, as the second order is
blind to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import nn

from quantizer.errors import SensitivityError
from quantizer.observe.padding import padding_mask
from quantizer.proxy.site import Site
from quantizer.sensitivity.divergence import Divergence
from quantizer.sensitivity.divergence import Probe
from quantizer.sensitivity.groups import Group
from quantizer.sensitivity.passes import pass_of
from quantizer.sensitivity.site_changes import watched

__all__ = ["Loss", "gradient"]

_SMALL = 0.25
"""The most that a row's change may have of the row's square."""

Loss = Callable[[Any], Tensor]
"""Takes the model's output and gives a scalar."""


def gradient(
    proxy: nn.Module,
    groups: Sequence[Group],
    args: tuple[Any, ...],
    keywords: Mapping[str, Any],
    result: Any,
    loss: Loss | None = None,
) -> dict[str, float]:
    """Return the estimate for each group on one batch, by name; ``result`` is the float output.

    Raises:
        SensitivityError: the loss is no scalar that depends on the output, or the output holds no float.
    """
    divergence = Divergence(result, padding_mask(keywords, args))
    costs: dict[str, float] = defaultdict(float)
    large: set[str] = set()
    anchor = torch.zeros((), requires_grad=True)

    def add(changes: dict[str, Tensor], value: Tensor, gradient: Tensor) -> None:
        for name, change in changes.items():
            if loss is None and not _is_small(change, value, gradient):
                large.add(name)
            product = gradient * change
            costs[name] += float((product.sum(-1) if product.dim() else product).double().square().sum())

    def visit(site: Site, output: Tensor, changes: dict[str, Tensor]) -> Tensor:
        if not site.source.in_place:
            added = partial(add, changes, output.detach())
            passed: Tensor = _Watch.apply(output, anchor, added)  # type: ignore[no-untyped-call]
            return passed
        # Others know the tensor too: a copy would part them.
        if output.requires_grad:
            output.register_hook(partial(add, changes, output.detach()))  # type: ignore[no-untyped-call]
        return output

    with torch.enable_grad():
        with watched(groups, visit):
            output = pass_of(proxy, args, keywords)
        probe = divergence.probe(output) if loss is None else _of_loss(loss, output)
        reached = [pair for pair in zip(probe.tensors, probe.directions, strict=True) if pair[0].requires_grad]
        if reached:
            # The gradient of the anchor is 0; on the way to it every site is passed, and no parameter's is taken.
            tensors, directions = zip(*reached, strict=True)
            try:
                torch.autograd.grad(tensors, [anchor], directions, allow_unused=True)
            except RuntimeError as error:
                if loss is not None or "modified by an inplace operation" not in str(error):
                    raise
                # What the model changes in place leaves no gradient, in the model itself either.
                return {}
    return {name: cost * probe.factor for name, cost in costs.items() if name not in large}


def _is_small(change: Tensor, value: Tensor, gradient: Tensor) -> bool:
    """Return whether no row that carries its share of the tensor, and that the output depends on, changes by much."""
    if value.dim() == 0:
        return True
    power = value.square().sum(-1)
    counts = (power >= power.mean()) & gradient.ne(0).any(-1)
    return not bool((counts & (change.square().sum(-1) > _SMALL * power)).any())


class _Watch(torch.autograd.Function):
    """Passes a tensor on and its gradient back, and shows the gradient to a function."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, show: Callable[[Tensor], None]) -> Tensor:
        ctx.show = show
        # A copy, since what a function only passes on may not be changed in place.
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.show(gradient)
        return gradient, torch.zeros(()), None


def _of_loss(loss: Loss, output: Any) -> Probe:
    value = loss(output)
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise SensitivityError(f"loss(output) gave {shown}; expected one floating-point number as a tensor")
    if not value.requires_grad:
        raise SensitivityError("loss(output) does not depend on the model's output by anything torch can differentiate")
    return Probe(tensors=[value], directions=[torch.ones_like(value)], factor=0.5)
