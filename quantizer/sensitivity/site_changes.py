"""The change that each group makes at the outputs of its sites, measured in one float pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.proxy.site import Site
from quantizer.sensitivity.groups import Group

__all__ = ["Visitor", "watched"]

Visitor = Callable[[Site, Tensor, dict[str, Tensor]], Tensor]
"""A function of a call's site, its float output and the change by group that returns the output for the model."""


@contextmanager
def watched(groups: Iterable[Group], visit: Visitor) -> Iterator[None]:
    """Call ``visit`` with every call of the groups' sites while the block is open; the model computes in float."""
    quantizers: dict[Site, dict[str, list[OperandQuantizer]]] = defaultdict(lambda: defaultdict(list))
    for group in groups:
        for site, quantizer in group.members:
            quantizers[site][group.name].append(quantizer)

    def judge(site: Site, function: Callable[..., Any], args: list[Any], keywords: dict[str, Any]) -> Any:
        # Before the float call, which may change its operand in place.
        rounded = {
            name: _rounded(site, members, function, args, keywords) for name, members in quantizers[site].items()
        }
        result = function(*args, **keywords)
        if not isinstance(result, Tensor):
            return result
        return visit(site, result, {name: value - result.detach() for name, value in rounded.items()})

    try:
        for site in quantizers:
            site.judge = judge
        yield
    finally:
        for site in quantizers:
            site.judge = None


def _rounded(
    site: Site,
    quantizers: list[OperandQuantizer],
    function: Callable[..., Any],
    args: list[Any],
    keywords: dict[str, Any],
) -> Tensor:
    try:
        for quantizer in quantizers:
            quantizer.enabled = True
        with torch.no_grad():
            result: Tensor = site.rounded(function, args, keywords)
            return result
    finally:
        for quantizer in quantizers:
            quantizer.enabled = False
