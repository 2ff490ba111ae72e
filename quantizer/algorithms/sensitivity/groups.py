"""The groups of an AMP proxy: operands switched, measured and kept in float together.

The smallest groups are those of the plan (see ``plan/decide_sites.py``). Coarser groups merge them by the module of
their first site: a *block* is a module's path up to its first number (``encoder.layer.3``), a *layer* a direct child of
a block (``encoder.layer.3.attention``). ``watched`` measures the change that each group causes at the outputs of its
sites, in one float pass.

A backward pass needs a change long after its site was called. If autograd keeps the operands until then, the change is
computed from them on demand: stored changes of attention scores [.., S, S] would need most of the memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantizer.errors import SensitivityError
from quantizer.observe.statistics import is_no_mask
from quantizer.plan.site_plan import OperandPlan, SitePlan
from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.proxy.site import Site
from quantizer.utils.torch_modes import Autocast

GRANULARITIES = ("group", "layer", "block")

_ROOT = "(the model)"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Group:
    """Operands that change precision together.

    Attributes:
        name: the name of the plan's group, or the module's path.
        kind: the kinds of its sites.
        block: the block of its first site.
        parts: the groups of the plan that it consists of.
        members: the site and the quantizer of each operand.
        activations: the number of operands that are activations.
        multiply_adds: the multiply-adds of its sites in calibration.
    """

    name: str
    kind: str
    block: str
    parts: tuple[str, ...]
    members: tuple[tuple[Site, OperandQuantizer], ...]
    activations: int
    multiply_adds: int

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites of its operands, each once."""
        return tuple(dict.fromkeys(site for site, _ in self.members))

    def enable(self, on: bool) -> None:
        """Switch the quantizers of its operands; its sites do not change."""
        for _, quantizer in self.members:
            quantizer.enabled = on

    @contextmanager
    def rounding(self) -> Iterator[None]:
        """Quantize its operands inside the block."""
        self.enable(True)
        for site in self.sites:
            site.active = True
        try:
            yield
        finally:
            self.enable(False)
            for site in self.sites:
                site.active = False


def groups_of(sites: Iterable[Site], plan: Mapping[str, SitePlan], granularity: str) -> list[Group]:
    """Return the groups of a proxy to which ``plan`` was applied, by their first sites, all switched off."""
    if granularity not in GRANULARITIES:
        raise SensitivityError(f"granularity={granularity!r}: expected one of {', '.join(GRANULARITIES)}")
    operands_of_group: dict[str, list[tuple[Site, OperandPlan]]] = defaultdict(list)
    for site in sites:
        for operand in plan[site.path].operands:
            if operand.quantized and operand.group is not None:
                operands_of_group[operand.group].append((site, operand))
    merged: dict[str, list[str]] = defaultdict(list)
    for name, operands in operands_of_group.items():
        merged[name if granularity == "group" else _place(operands[0][0].host_path, granularity)].append(name)
    groups = [
        _group(name, parts, [entry for part in parts for entry in operands_of_group[part]], plan)
        for name, parts in merged.items()
    ]
    for group in groups:
        group.enable(False)
    return groups


def _group(
    name: str, parts: list[str], operands: list[tuple[Site, OperandPlan]], plan: Mapping[str, SitePlan]
) -> Group:
    paths = dict.fromkeys(site.path for site, _ in operands)
    return Group(
        name=name,
        kind=", ".join(dict.fromkeys(plan[path].kind for path in paths)),
        block=_place(operands[0][0].host_path, "block"),
        parts=tuple(parts),
        members=tuple((site, site.quantizer_of(operand.name)) for site, operand in operands),
        activations=sum(operand.role == "activation" for _, operand in operands),
        multiply_adds=sum(plan[path].multiply_adds for path in paths),
    )


def _place(path: str, granularity: str) -> str:
    """Return the block or layer of a module."""
    segments = path.split(".") if path else []
    numbers = [index for index, segment in enumerate(segments) if segment.isdigit()]
    end = numbers[0] + 1 if numbers else 1
    return ".".join(segments[: end + (granularity == "layer")]) or _ROOT


class Changes(NamedTuple):
    """The float output of a call of a site, detached, and its change by group."""

    output: Tensor
    by_group: dict[str, Tensor]


class Pending(NamedTuple):
    """Changes of a call, computed on demand by ``compute(*tensors)``."""

    tensors: tuple[Tensor, ...]
    compute: Callable[..., Changes]

    def changes(self) -> Changes:
        return self.compute(*self.tensors)


Visitor = Callable[[Site, Tensor, Pending], Tensor]
"""A function of a call's site, its float output and its changes that returns the output for the model."""


@contextmanager
def watched(groups: Iterable[Group], visit: Visitor, *, later: bool = False) -> Iterator[None]:
    """Call ``visit`` with every call of the groups' sites inside the block; the model computes in float."""
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
        # Before the float call, because it may change its operand in place.
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
    """Return whether autograd keeps all operands of a call: a multiplication of tensors that all need gradients."""
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

    def compute(*current: Tensor) -> Changes:
        filled = others.copy()
        for place, tensor in zip(places, current, strict=True):
            filled[place] = tensor
        args, keywords = pytree.tree_unflatten(filled, structure)
        with torch.no_grad(), autocast.restored():
            output = function(*args, **keywords)
            rounded = {name: _rounded(site, members, function, args, keywords) for name, members in by_group.items()}
            return Changes(output, {name: _change(value, output) for name, value in rounded.items()})

    return Pending(tensors, compute)


def _change(rounded: Tensor, output: Tensor) -> Tensor:
    """Return the change of a float output; scores that a mask hides do not change."""
    change = rounded - output
    no_mask = is_no_mask(output)
    # A difference of two infinite scores is NaN.
    return change if bool(no_mask.all()) else change.masked_fill_(~no_mask, 0.0)


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
