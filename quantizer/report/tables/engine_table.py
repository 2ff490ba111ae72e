"""The precisions of an engine's layers as tables and sentences, for a terminal and a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from quantizer.engines import Inspection
from quantizer.report.tables import text
from quantizer.report.tables.lines import print_lines
from quantizer.report.tables.tables import Column, html_table, text_table

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
