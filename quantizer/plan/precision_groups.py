"""Precision groups: the smallest sets of operands that may change precision without breaking a fusion.

A group has both operands of a product. Weighted products that read the same tensor (query, key, value) form one group,
and so do the products of one attention (activation by activation, in one function of one module). Each operand of a
residual add is its own group: the product before it stays as it is. The result of a convolution is in its group, with
those of operations that the engine computes in integers along with it. A recurrent layer, with both its directions, is
one group: its loop is one operator.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quantizer.plan.site_plan import SitePlan


_RECURRENT = ("input_product", "recurrent_product")


def group_names(plan: Mapping[str, SitePlan]) -> dict[tuple[str, str], str]:
    """Return the group of each operand of a quantized site, by (site name, operand name)."""
    keys: dict[str, list[str]] = defaultdict(list)
    names: dict[tuple[str, str], str] = {}
    for path, site in plan.items():
        if site.kind == "residual_add":
            names.update({(path, operand.name): f"{path}.{operand.name}" for operand in site.operands})
        elif site.quantized and site.kind != "output":
            keys[_key(site)].append(path)
    for members in keys.values():
        name = _common_name(members)
        for path in members:
            names.update({(path, operand.name): name for operand in plan[path].operands})
    for path, site in plan.items():
        if site.kind == "output" and site.quantized:
            of = _product(path, plan)
            group = names.get((of, plan[of].operands[0].name), of) if plan[of].kind != "residual_add" else of
            names.update({(path, operand.name): group for operand in site.operands})
    return names


def _product(path: str, plan: Mapping[str, SitePlan]) -> str:
    """Return the convolution, or the add, from which an output comes."""
    while plan[path].kind == "output":
        path = plan[path].follows[0]
    return path


def _key(site: SitePlan) -> str:
    """Return the key of a site's group: sites with the same key form one group."""
    layer = recurrent_layer(site)
    if layer is not None:
        return f"recurrence {layer}"
    if any(operand.role == "weight" for operand in site.operands):
        shared = next((operand.range_group for operand in site.operands if operand.role == "activation"), None)
        return f"input {shared}" if shared is not None else f"weight of {site.name}"
    return f"function {site.name.rpartition('.')[0]}"


def recurrent_layer(site: SitePlan) -> str | None:
    """Return the path of the recurrent layer that a site is a product of, without its direction; None if of none."""
    host = site.name.rpartition(".forward.")[0]
    return host.removesuffix("_reverse") if site.operation in _RECURRENT else None


def _common_name(paths: Iterable[str]) -> str:
    """Return ``a.{query,key}.linear_0`` for ``a.query.linear_0`` and ``a.key.linear_0``."""
    split = [path.split(".") for path in paths]
    if len(split) == 1:
        return ".".join(split[0])
    head = _shared(split)
    tails = [parts[head:] for parts in split]
    shared = _shared([tail[::-1] for tail in tails])
    middles = [".".join(tail[: len(tail) - shared]) for tail in tails]
    end = split[0][len(split[0]) - shared :]
    return ".".join([*split[0][:head], "{" + ",".join(middles) + "}", *end])


def _shared(sequences: Sequence[Sequence[str]]) -> int:
    """Return how many first entries all sequences have in common."""
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, zip(*sequences, strict=False)))
