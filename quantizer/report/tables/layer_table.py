"""A line for each layer, and for each group that can go back to float, from the parts of a record.

A time and an error belong to a group. The time is split among the sites of the group by their multiply-adds; the error
is that of the whole group, in the line of each of its sites.

The table of layers, and that of what it gives and costs to put groups back, for a terminal and a page.

A column without any value is left out: a run without sensitivity has no errors, and one without an engine no times.

The precisions of an engine's layers as tables and sentences, for a terminal and a page.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from quantizer.engines import Inspection
from quantizer.report.record import RunRecord, SensitivityRow
from quantizer.report.run_records import Cause, GroupTime, Operand, Site, UnquantizedProduct
from quantizer.report.tables import text
from quantizer.report.tables.tables import Column, html_table, text_table
from quantizer.report.tables.text import error_words, format_name, print_lines

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
    weights: str | None
    amax: float | None
    sqnr_db: float | None
    error: float | None
    share: float | None
    low_us: float | None
    float_us: float | None


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
    sensitivity: Sequence[SensitivityRow] = (),
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
    return (*rows, *(_outside(product, total) for product in outside))


def group_rows(
    sites: Iterable[Site],
    sensitivity: Sequence[SensitivityRow] = (),
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
    found = dict.fromkeys(_format(operand) for operand in site.operands if operand.role == role)
    return ", ".join(found) or None


def _format(operand: Operand) -> str:
    return format_name(operand.dtype, operand.block_size, dynamic=operand.dynamic) if operand.quantized else FLOAT


def _outside(product: UnquantizedProduct, total: int) -> LayerRow:
    return LayerRow(
        layer=product.path,
        operation=product.operation,
        activations=FLOAT,
        weights=None,
        amax=None,
        sqnr_db=None,
        error=None,
        share=product.multiply_adds / total if total else None,
        low_us=None,
        float_us=None,
    )


Cells = tuple[list[Column], list[list[Any]]]
"""Columns, and the cells of each row."""


def layer_cells(rows: Sequence[LayerRow], measure: str | None) -> Cells:
    """Return the columns that hold something, and the cells of each layer."""
    columns = [
        Column(title="layer", mono=True),
        Column(title="operation", mono=True),
        Column(title="activations"),
        Column(title="weights"),
        Column(title="amax", numeric=True),
        Column(title="SQNR, dB", numeric=True, show=text.decibels),
        Column(title=error_words(measure).column, numeric=True, show=text.error),
        Column(title="share of work", numeric=True, show=text.percent),
        *_times(),
    ]
    cells = [
        [
            row.layer or "(the model)",
            row.operation,
            row.activations,
            row.weights,
            row.amax,
            row.sqnr_db,
            row.error,
            row.share,
            row.low_us,
            row.float_us,
        ]
        for row in rows
    ]
    return _filled(columns, cells)


def group_cells(rows: Sequence[GroupRow], measure: str | None) -> Cells:
    """Return the columns that hold something, and the cells of each group."""
    columns = [
        Column(title="group", mono=True),
        Column(title=f"gives back: {error_words(measure).column}", numeric=True, show=text.error),
        Column(title="output with it alone, dB", numeric=True, show=text.decibels),
        *_times(),
        Column(title="costs, us", numeric=True, show=_microseconds),
        Column(title="now"),
    ]
    cells = [
        [
            row.group,
            row.error,
            row.alone_db,
            row.low_us,
            row.float_us,
            row.cost_us,
            "float" if row.back else "quantized",
        ]
        for row in rows
    ]
    return _filled(columns, cells)


def layer_table(record: RunRecord) -> str:
    """Return every layer, as HTML; empty if there are none."""
    times = record.placement.groups if record.placement else ()
    rows = layer_rows(record.coverage, record.escaped, record.sensitivity, times)
    return _html(layer_cells(rows, record.measure), "Layers") if rows else ""


def group_table(record: RunRecord) -> str:
    """Return every group with what it gives back and costs in float, as HTML; empty if nothing was measured."""
    times = record.placement.groups if record.placement else ()
    rows = group_rows(record.coverage, record.sensitivity, times, record.causes)
    return _html(group_cells(rows, record.measure), "What if these go back") if rows else ""


def _html(table: Cells, label: str) -> str:
    columns, cells = table
    titled = [replace(column, title=column.title[:1].upper() + column.title[1:]) for column in columns]
    return html_table(titled, cells, label=label, style=False)


def _times() -> tuple[Column, Column]:
    return (
        Column(title="quantized, us", numeric=True, show=_microseconds),
        Column(title="float, us", numeric=True, show=_microseconds),
    )


def _microseconds(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 or value == 0 else f"{value:.1f}"


def _filled(columns: list[Column], cells: list[list[Any]]) -> Cells:
    """Return a table without the columns that hold nothing."""
    held = [at for at in range(len(columns)) if any(row[at] is not None for row in cells)]
    return [columns[at] for at in held], [[row[at] for at in held] for row in cells]


_SLOWEST = 10
_LEAST = 0.01
"""A share under 1% has no place in a line."""


def _name(precision: str) -> str:
    return {"index": "indices", "unknown": "not told"}.get(precision, precision.upper())


_SHARES = (
    Column(title="Precision", show=_name),
    Column(title="Layers", numeric=True),
    Column(title="of layers", numeric=True, show=text.percent),
    Column(title="Products", numeric=True),
    Column(title="of multiply-adds", numeric=True, show=text.percent),
    Column(title="of time", numeric=True, show=text.percent),
)
_LAYERS = (
    Column(title="Layer", mono=True),
    Column(title="Type"),
    Column(title="Computes in", show=_name),
    Column(title="Writes", show=_name),
    Column(title="Multiply-adds", numeric=True, show=text.compact),
    Column(title="Time, us", numeric=True),
)
_SHORT = tuple(
    replace(column, title=title)
    for column, title in zip(_LAYERS, ("layer", "type", "runs in", "writes", "MACs", "us"), strict=True)
)
"""The same columns as a terminal of 80 has room for."""


def verified_words(inspection: Inspection) -> str:
    """Return whether the engine was observed, and how, or why not: ``verified: seen in a run ...``."""
    return f"{'verified' if inspection.verified else 'not verified'}: {inspection.note}"


def engine_facts(inspection: Inspection) -> list[str]:
    """Return the facts besides the shares: attention, conversions, float outputs, and reasons in words."""
    lines = []
    if inspection.attention_fused or inspection.attention_apart:
        apart = f", {inspection.attention_apart} taken apart" if inspection.attention_apart else ""
        lines.append(f"attention: {inspection.attention_fused} fused{apart}")
    lines.append(
        f"layers that only convert: {inspection.quantizers} quantize or dequantize, {inspection.casts} cast, "
        f"{inspection.reformats} reformat"
    )
    if inspection.verified:
        lines.append(f"products in low precision that write floats: {inspection.float_outputs}")
    if inspection.uncounted:
        lines.append(f"products whose multiply-adds are not told, and not in the shares: {inspection.uncounted}")
    return [*lines, *inspection.reasons]


def engine_table(inspection: Inspection) -> str:
    """Return the shares by precision, as HTML; empty if there are no layers."""
    rows = _share_rows(inspection)
    return html_table(_SHARES, rows, label="Precision in the engine", style=False) if rows else ""


def layers_table(inspection: Inspection) -> str:
    """Return every layer, as HTML; empty if there are none."""
    rows = [_layer_row(layer) for layer in inspection.layers]
    return html_table(_LAYERS, rows, label="Layers of the engine", style=False) if rows else ""


def shares_line(inspection: Inspection) -> str:
    """Return how much of the products and of the time each precision has, and whether that was observed, in a line."""
    said = []
    for share in inspection.shares:
        parts = [("of multiply-adds", share.multiply_add_share), ("of the time", share.time_share)]
        told = [f"{text.percent(value)} {what}" for what, value in parts if value is not None and value >= _LEAST]
        if told:
            said.append(f"{_name(share.precision)} {' and '.join(told)}")
    return "; ".join([*said, verified_words(inspection)])


def print_inspection(inspection: Inspection, console: Console) -> None:
    """Print whether the engine was observed, the shares, the facts, and the slowest layers."""
    style = "bold" if inspection.verified else "bold yellow"
    print_lines([verified_words(inspection)], console, first="", style=style)
    if not inspection.shares:
        return
    title = None if inspection.verified else "products, as the ONNX file asks for them"
    console.print(text_table(_SHARES, _share_rows(inspection), title=title))
    print_lines(engine_facts(inspection), console)
    timed = [layer for layer in inspection.layers if layer.time_us is not None]
    if timed:
        slowest = sorted(timed, key=lambda layer: -(layer.time_us or 0.0))[:_SLOWEST]
        rows = [_layer_row(layer) for layer in slowest]
        console.print(text_table(_SHORT, rows, title=f"the {len(rows)} layers that take longest", compact=True))


def _share_rows(inspection: Inspection) -> Sequence[Sequence[Any]]:
    return [
        (
            share.precision,
            share.layers,
            share.layer_share,
            share.products,
            share.multiply_add_share,
            share.time_share,
        )
        for share in inspection.shares
    ]


def _layer_row(layer: Any) -> Sequence[Any]:
    return (layer.name, layer.type, layer.precision, layer.writes, layer.multiply_adds, layer.time_us)
