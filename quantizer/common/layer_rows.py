"""A row for each layer, and for each group that can go back to float, from the records of sites, rankings and times.

A time and an error belong to a group. The time is split among the sites of the group by their multiply-adds; the error
is that of the whole group, in the line of each of its sites.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from quantizer.common.records import Cause, GroupSensitivity, GroupTime, Site, UnquantizedProduct

FLOAT = "float"

_ORDINARY = (".forward", "._conv_forward")
"""Functions that say nothing more than the path of their module."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRow:
    """One layer: a site that ran, or products outside of any site.

    Attributes:
        layer: the path of its module, and the function in it if that is not ``forward``; empty for the model itself.
        operation: its operation, numbered where the layer has several of one kind.
        activations: the format of its activations, ``float`` or such as ``uint8``; of several, each once.
        weights: the format of its weight; None: it has none.
        amax: the largest absolute value that its activations represent; None: they have no range.
        sqnr_db: the lowest SQNR among its operands, in dB; None: not measured.
        error: the error of quantizing its group alone, by the measure of the sensitivity; None: not measured.
        share: its share of all multiply-adds, 0 to 1; None: none were counted.
        low_us: its time in low precision in microseconds; None: no engine was timed.
        float_us: its time in float, likewise.
    """

    layer: str
    operation: str
    activations: str
    weights: str | None = None
    amax: float | None = None
    sqnr_db: float | None = None
    error: float | None = None
    share: float | None = None
    low_us: float | None = None
    float_us: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRow:
    """The gain and the cost of one group that goes back to float.

    Attributes:
        group: its name.
        error: the error of quantizing it alone, which would be gone; None: not measured.
        alone_db: the SQNR of the model's output in dB with this group alone quantized; None: not measured.
        low_us: its time in low precision in microseconds; None: no engine was timed.
        float_us: its time in float, likewise.
        back: whether it is float already.
    """

    group: str
    error: float | None
    alone_db: float | None
    low_us: float | None
    float_us: float | None
    back: bool

    @property
    def cost_us(self) -> float | None:
        """The microseconds that float takes more; below 0 float is faster."""
        return None if self.low_us is None or self.float_us is None else self.float_us - self.low_us


def layer_rows(
    sites: Iterable[Site],
    products: Sequence[UnquantizedProduct] = (),
    sensitivity: Sequence[GroupSensitivity] = (),
    times: Sequence[GroupTime] = (),
) -> tuple[LayerRow, ...]:
    """Return a row for each site that ran, in the model's order, then one for products outside of sites."""
    ran = [site for site in sites if site.ran and not site.quiet and site.kind != "source"]
    outside = [product for product in products if product.site is None]
    total = sum(site.multiply_adds or 0 for site in ran) + sum(product.multiply_adds for product in outside)
    errors = {part: row.error for row in sensitivity for part in (row.parts or (row.group,))}
    low, plain = ({entry.group: getattr(entry, name) for entry in times} for name in ("low_us", "float_us"))
    work = _work(ran)
    names = _names(ran)
    rows = [
        LayerRow(
            layer=layer,
            operation=operation,
            activations=_formats(site, "activation") or FLOAT,
            weights=_formats(site, "weight"),
            amax=max((o.amax for o in site.operands if o.role == "activation" and o.amax is not None), default=None),
            sqnr_db=min((o.sqnr_db for o in site.operands if o.sqnr_db is not None), default=None),
            error=max((errors[group] for group in work[site.name] if group in errors), default=None),
            share=(site.multiply_adds or 0) / total if total else None,
            low_us=_time(work[site.name], low),
            float_us=_time(work[site.name], plain),
        )
        for site, (layer, operation) in zip(ran, names, strict=True)
    ]
    rows += [
        LayerRow(
            layer=product.path,
            operation=product.operation,
            activations=FLOAT,
            share=product.multiply_adds / total if total else None,
        )
        for product in outside
    ]
    return tuple(rows)


def group_rows(
    sites: Iterable[Site],
    sensitivity: Sequence[GroupSensitivity] = (),
    times: Sequence[GroupTime] = (),
    causes: Sequence[Cause] = (),
) -> tuple[GroupRow, ...]:
    """Return a row for each group with an error or a time, those with the largest error first, then by time.

    Args:
        sites: all sites, with their operands.
        sensitivity: the ranking; empty if nothing was measured.
        times: the times of the groups; empty if no engine was timed.
        causes: the groups whose cost in dB was measured.
    """
    quantized = {o.group for site in sites for o in site.operands if o.quantized}
    errors = {row.group: row.error for row in sensitivity}
    parts = {row.group: row.parts or (row.group,) for row in sensitivity}
    ranked = {part for some in parts.values() for part in some}
    parts.update({entry.group: (entry.group,) for entry in times if entry.group not in ranked})
    alone = {cause.group: cause.sqnr_db for cause in causes}
    timed = {entry.group: entry for entry in times}
    rows = []
    for group, some in parts.items():
        known = [timed[part] for part in some if part in timed]
        rows.append(
            GroupRow(
                group=group,
                error=errors.get(group),
                alone_db=alone.get(group),
                low_us=sum(entry.low_us for entry in known) if known else None,
                float_us=sum(entry.float_us for entry in known) if known else None,
                back=not quantized & set(some),
            )
        )
    return tuple(sorted(rows, key=lambda row: (row.error is None, -(row.error or 0), row.cost_us or 0)))


def _work(sites: Sequence[Site]) -> dict[str, dict[str, float]]:
    """Return for each site its share of the work of each group that it takes part in."""
    amounts: dict[str, dict[str, int]] = defaultdict(dict)
    for site in sites:
        for group in {operand.group for operand in site.operands if operand.group is not None}:
            # A residual add multiplies nothing, and still takes time.
            amounts[group][site.name] = max(site.multiply_adds or 0, 1)
    work: dict[str, dict[str, float]] = defaultdict(dict)
    for group, members in amounts.items():
        for name, amount in members.items():
            work[name][group] = amount / sum(members.values())
    return work


def _time(shares: Mapping[str, float], times: Mapping[str, float]) -> float | None:
    known = [share * times[group] for group, share in shares.items() if group in times]
    return sum(known) if known else None


def _names(sites: Sequence[Site]) -> list[tuple[str, str]]:
    """Return layer and operation of each site."""
    split = [_split(site.name) for site in sites]
    counts = Counter((layer, operation.rpartition("_")[0]) for layer, operation in split)
    return [
        (layer, operation if counts[layer, kind] > 1 else kind)
        for layer, operation, kind in ((layer, operation, operation.rpartition("_")[0]) for layer, operation in split)
    ]


def _split(name: str) -> tuple[str, str]:
    path, _, operation = f".{name}".rpartition(".")
    for function in _ORDINARY:
        path = path.removesuffix(function)
    return path.removeprefix("."), operation


def _formats(site: Site, role: str) -> str | None:
    found = [
        replace(one, zero_point=None).format if one.quantized else FLOAT for one in site.operands if one.role == role
    ]
    return ", ".join(dict.fromkeys(found)) or None
