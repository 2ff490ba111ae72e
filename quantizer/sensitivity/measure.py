"""Measuring what each precision group costs: the model's output with that group alone quantized.

Legend: y the float output, y_g the output with group g quantized; error_g = |y_g - y|^2 / |y|^2 over all floating
tensors of the output together. It is relative, and averaged over batches, so it depends on neither their order nor
their size. Where the inputs hold an ``attention_mask`` [B, S], the padding of outputs [B, S, ...] is left out: nobody
reads it, and on short texts it can be most of the output.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import nn
from torch.utils import _pytree as pytree
from tqdm.auto import tqdm

from quantizer.errors import SensitivityError
from quantizer.proxy.observe import padding_mask
from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.proxy.plan import SitePlan
from quantizer.proxy.site import Site

__all__ = ["GroupError", "Measurement", "flat_output"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupError:
    """A group's place in the ranking: 1 hurts most. ``error`` is relative, 0 is no change."""

    rank: int
    group: str
    kind: str
    error: float
    sites: tuple[str, ...]


class Measurement:
    """Runs an amp proxy once more for each group whenever the user runs it, and keeps the errors.

    Attributes:
        batches: how many batches were measured.
    """

    def __init__(self, sites: Iterable[Site], plan: Mapping[str, SitePlan]) -> None:
        self.batches = 0
        self._errors: dict[str, float] = defaultdict(float)
        self._members: dict[str, list[tuple[Site, OperandQuantizer]]] = defaultdict(list)
        self._kinds: dict[str, str] = {}
        for site in sites:
            entry = plan[site.path]
            for operand in entry.operands:
                if operand.quantized and operand.group is not None:
                    quantizer = site.quantizer_of(operand.name)
                    quantizer.enabled = False
                    self._members[operand.group].append((site, quantizer))
                    self._kinds[operand.group] = entry.kind

    @property
    def groups(self) -> int:
        """How many groups there are."""
        return len(self._members)

    def attach(self, proxy: nn.Module) -> None:
        """Measure at each call of the proxy from now on."""
        proxy.register_forward_hook(self._measure, with_kwargs=True)

    def ranking(self) -> list[GroupError]:
        """All groups, those that hurt most first.

        Raises:
            SensitivityError: no data went through the proxy yet.
        """
        if self.batches == 0:
            raise SensitivityError("nothing was measured yet: run the proxy that amp() returned on data first")
        # Equal errors keep one order, so that the same data gives the same answer.
        ordered = sorted(self._members, key=lambda group: (-self._errors[group], group))
        return [
            GroupError(
                rank=rank,
                group=group,
                kind=self._kinds[group],
                error=self._errors[group] / self.batches,
                sites=tuple(dict.fromkeys(site.path for site, _ in self._members[group])),
            )
            for rank, group in enumerate(ordered, start=1)
        ]

    def _measure(self, proxy: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], result: Any) -> None:
        if proxy.training:
            raise SensitivityError("the proxy is in train mode, where dropout hides the errors; call .eval() first")
        mask = padding_mask(keywords)
        float_output = flat_output(result, mask)
        power = float(float_output.square().sum())
        if power == 0:
            raise SensitivityError("the model's output is all zeros on this batch: no relative error can be taken")
        errors: dict[str, float] = {}
        with torch.no_grad():
            for group, members in tqdm(self._members.items(), "sensitivity", unit="group", leave=False, disable=None):
                try:
                    _switch(members, on=True)
                    output = flat_output(proxy.forward(*args, **keywords), mask)
                finally:
                    _switch(members, on=False)
                errors[group] = float((output - float_output).square().sum()) / power
        # Only whole batches count: an interrupted one leaves the averages as they were.
        for group, error in errors.items():
            self._errors[group] += error
        self.batches += 1


def _switch(members: list[tuple[Site, OperandQuantizer]], *, on: bool) -> None:
    for site, quantizer in members:
        quantizer.enabled = on
        site.active = on


def flat_output(output: Any, mask: Tensor | None) -> Tensor:
    """All floating tensors of an output, of whatever structure, as one float64 vector without padding."""
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not tensors:
        raise SensitivityError(f"the model's output ({type(output).__name__}) holds no floating-point tensor")
    if mask is not None:
        tensors = [t[mask] if t.dim() > 2 and t.shape[:2] == mask.shape else t for t in tensors]
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])
