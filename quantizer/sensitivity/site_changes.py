"""The change that each group makes at the outputs of its sites, measured in one float pass.

A backward pass asks for a change long after its site was called. Where autograd keeps the operands until then, the
change and the output are computed from them when they are asked for: held until then, those of the scores of an
attention [.., S, S], made of operands [.., S, E], were most of the memory of a measure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantizer.common.autocast import Autocast
from quantizer.observe.outputs import is_no_mask
from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.proxy.site import Site
from quantizer.sensitivity.groups import Group


class Changes(NamedTuple):
    """The float output of a call of a site, detached, and the change of it by group."""

    output: Tensor
    by_group: dict[str, Tensor]


class Pending(NamedTuple):
    """Tensors from which the changes of a call can be computed, and how: ``compute(*tensors)``."""

    tensors: tuple[Tensor, ...]
    compute: Callable[..., Changes]

    def changes(self) -> Changes:
        """Return the changes."""
        return self.compute(*self.tensors)


Visitor = Callable[[Site, Tensor, Pending], Tensor]
"""A function of a call's site, its float output and its changes that returns the output for the model."""


@contextmanager
def watched(groups: Iterable[Group], visit: Visitor, *, later: bool = False) -> Iterator[None]:
    """Call ``visit`` with every call of the groups' sites while the block is open; the model computes in float.

    Args:
        groups: the groups.
        visit: receives each call.
        later: whether to leave changes to be computed from the operands, where autograd keeps these anyway.
    """
    quantizers: dict[Site, dict[str, list[OperandQuantizer]]] = defaultdict(lambda: defaultdict(list))
    for group in groups:
        for site, quantizer in group.members:
            quantizers[site][group.name].append(quantizer)

    def judge(site: Site, function: Callable[..., Any], args: list[Any], keywords: dict[str, Any]) -> Any:
        by_group = quantizers[site]
        if later and _keeps_operands(site, args, keywords):
            result = function(*args, **keywords)
            pending = _pending(site, by_group, function, args, keywords)
            return visit(site, result, pending) if isinstance(result, Tensor) else result
        # Before the float call, which may change its operand in place.
        rounded = [_rounded(site, members, function, args, keywords) for members in by_group.values()]
        result = function(*args, **keywords)
        if not isinstance(result, Tensor):
            return result
        output = result.detach()
        changes = (_change(value, output) for value in rounded)
        return visit(site, result, Pending((output, *changes), partial(_as_changes, tuple(by_group))))

    try:
        for site in quantizers:
            site.judge = judge
        yield
    finally:
        for site in quantizers:
            site.judge = None


def _keeps_operands(site: Site, args: list[Any], keywords: dict[str, Any]) -> bool:
    """Return whether autograd keeps all operands of a call: a product of tensors that all need gradients."""
    if site.source.in_place or site.operation.geometry is None or not torch.is_grad_enabled():
        return False
    indexed = [place for place, operand in enumerate(site.operation.operands) if operand.index is not None]
    operands = [site.argument(place, args, keywords) for place in indexed]
    return all(isinstance(operand, Tensor) and operand.requires_grad for operand in operands)


def _pending(
    site: Site,
    by_group: Mapping[str, list[OperandQuantizer]],
    function: Callable[..., Any],
    args: list[Any],
    keywords: dict[str, Any],
) -> Pending:
    """Return the changes of a call, to be computed from its arguments."""
    leaves, structure = pytree.tree_flatten((list(args), dict(keywords)))
    tensors = tuple(leaf.detach() for leaf in leaves if isinstance(leaf, Tensor))
    others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    # The backward pass computes the call outside of the model's own autocast blocks.
    autocast = Autocast.now()

    def compute(*given: Tensor) -> Changes:
        filled = others.copy()
        for place, tensor in zip(places, given, strict=True):
            filled[place] = tensor
        args, keywords = pytree.tree_unflatten(filled, structure)
        with torch.no_grad(), autocast.restored():
            output = function(*args, **keywords)
            rounded = {name: _rounded(site, members, function, args, keywords) for name, members in by_group.items()}
            return Changes(output, {name: _change(value, output) for name, value in rounded.items()})

    return Pending(tensors, compute)


def _change(rounded: Tensor, output: Tensor) -> Tensor:
    """Return the change of a float output; a score that a mask hides, of -inf or next to it, does not change."""
    change = rounded - output
    seen = is_no_mask(output)
    # A difference of two infinite scores is NaN.
    return change if bool(seen.all()) else change.masked_fill_(~seen, 0.0)


def _as_changes(names: tuple[str, ...], output: Tensor, *changes: Tensor) -> Changes:
    return Changes(output, dict(zip(names, changes, strict=True)))


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
