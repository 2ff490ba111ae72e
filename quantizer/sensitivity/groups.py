"""The groups of an amp proxy: operands that are switched, measured and fall back together.

The smallest are the groups of the plan (see ``plan/precision_groups.py``). Coarser groups join them by the module of
their first site: a *block* is a module's path up to its first number (``encoder.layer.3``), a *layer* a direct child
of a block (``encoder.layer.3.attention``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from quantizer.errors import SensitivityError
from quantizer.plan.site_plan import OperandPlan, SitePlan
from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.proxy.site import Site

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
        activations: how many of the operands are activations.
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
        """Switch the quantizers of its operands; its sites stay as they are."""
        for _, quantizer in self.members:
            quantizer.enabled = on

    @contextmanager
    def rounding(self) -> Iterator[None]:
        """Round its operands while the block is open."""
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
    """Return the groups of a proxy to which ``plan`` was applied, by their first sites, and switch all of them off.

    Raises:
        SensitivityError: the granularity is unknown.
    """
    if granularity not in GRANULARITIES:
        raise SensitivityError(f"granularity={granularity!r}: expected one of {', '.join(GRANULARITIES)}")
    found: dict[str, list[tuple[Site, OperandPlan]]] = defaultdict(list)
    for site in sites:
        for operand in plan[site.path].operands:
            if operand.quantized and operand.group is not None:
                found[operand.group].append((site, operand))
    merged: dict[str, list[str]] = defaultdict(list)
    for name, operands in found.items():
        merged[name if granularity == "group" else _place(operands[0][0].host_path, granularity)].append(name)
    groups = [
        _group(name, parts, [entry for part in parts for entry in found[part]], plan) for name, parts in merged.items()
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
