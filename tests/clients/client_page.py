"""The page of what clients compute: a table for each layout, with a reason where there is no figure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import groupby

from client_code import ALL, Client, Row
from client_models import CASES

from quantizer.config.layouts import layout_of

_INTRO = """# Clients

<!-- Made by `make clients`: change tests/clients, not this page. -->

Each client of [Serve it with other clients](how-to/serve-with.md) loads the layout of each task that it has. The models
are tiny random ones. A cell contains two figures:

1. **SQNR** of the client's outputs to those of our engine, for the same inputs; `equal` if all values are equal.
   OpenVINO must reach 60 dB. ONNX Runtime must reach 30 dB, and the engine's own SQNR to the float model, which is in
   the second column.
2. **Time** of a call of the client, relative to a call of our engine. It is the ratio of the medians of {calls}
   interleaved calls. Our engine has one thread; the client has a process of its own on one CPU core. A call of such a
   tiny model takes a millisecond or less, so the ratio shows what a client adds to each call, and not the speed of the
   runtime. Other load on the machine, as in the last run, changes it by several times.

The models of `retrieval` and `embedding-classification` are written like those of `sentence-similarity`.
"""

_REASONS = {
    "no class": "the client has no class for this task with this runtime.",
    "no mask": "the client's class passes no attention mask, which this model needs.",
    "three graphs": "the caller runs the three graphs of the model, as the code for Python does; not written for Node.",
    "not run": "the client was not installed, or its test was not run.",
}
"""The reasons of cells without figures."""

YOLO, DETECTOR = "YOLO", "YOLO11n"
"""The client of the layout ``ultralytics``, and its model."""

_TITLES = {"openvino": "OpenVINO", "onnxruntime": "ONNX Runtime"}


def page(rows: Mapping[tuple[str, str, str], Row], calls: int = 30) -> str:
    """Return the page with the rows of a run."""
    tables = [_INTRO.format(calls=calls)]
    for layout, clients in groupby(ALL, key=lambda client: client.layout):
        tables.append("\n".join(_table(layout, list(clients), rows)) + "\n")
    tables.append("\n".join(_detector(rows)) + "\n")
    return "\n".join(tables)


def _detector(rows: Mapping[tuple[str, str, str], Row]) -> Iterator[str]:
    """The table of the layout that has a trained detector in place of tasks."""
    floats = [f"engine to float, {title}" for title in _TITLES.values()]
    of = {backend: rows.get((YOLO, DETECTOR, backend)) for backend in _TITLES}
    yield "## `ultralytics`\n"
    yield "The model is trained on synthetic scenes. YOLO computes in float32 here. By default, OpenVINO computes in"
    yield "bfloat16 if the CPU has it.\n"
    yield f"| model | {' | '.join([*floats, *(f'{YOLO}, {title}' for title in _TITLES.values())])} |"
    yield f"|{'---|' * (1 + 2 * len(_TITLES))}"
    engines = ["-" if row is None else _decibels(row.engine) for row in of.values()]
    yield f"| {DETECTOR} | {' | '.join(engines + [_figures(row) for row in of.values()])} |"


def _figures(row: Row | None) -> str:
    return "not run" if row is None else f"{_decibels(row.sqnr)}, {row.its / row.ours:.2f}x"


def _table(layout: str, clients: list[Client], rows: Mapping[tuple[str, str, str], Row]) -> Iterator[str]:
    pairs = [(client, backend) for client in clients for backend in client.backends]
    backends = dict.fromkeys(backend for _, backend in pairs)
    floats = [f"engine to float, {_TITLES[backend]}" for backend in backends]
    names = [f"{client.name}, {_TITLES[backend]}" if len(backends) > 1 else client.name for client, backend in pairs]
    yield f"## `{layout}`\n"
    yield f"| task | {' | '.join(floats + names)} |"
    yield f"|{'---|' * (1 + len(floats) + len(names))}"
    used: set[str] = set()
    for task in CASES:
        cells = [_cell(client, task, backend, rows) for client, backend in pairs]
        if set(cells) == {"no class"}:
            continue
        used |= set(cells)
        engines = [_engine(layout, task, backend, rows) for backend in backends]
        yield f"| `{task}` | {' | '.join(engines + cells)} |"
    reasons = [f"- {reason}: {_REASONS[reason]}" for reason in _REASONS if reason in used]
    if reasons:
        yield "\n" + "\n".join(reasons)


def _cell(client: Client, task: str, backend: str, rows: Mapping[tuple[str, str, str], Row]) -> str:
    if client.loads(task, backend):
        return _figures(rows.get((client.name, task, backend)))
    known = layout_of(client.layout, backend)
    assert known is not None
    if known.classes and task not in known.classes:
        return "no class"
    return "no mask" if task in known.unmasked else "three graphs"


def _engine(layout: str, task: str, backend: str, rows: Mapping[tuple[str, str, str], Row]) -> str:
    """The SQNR of an engine to float, of any client of this layout."""
    of = {row.engine for row in rows.values() if (row.task, row.backend) == (task, backend)}
    return _decibels(min(of)) if of else "-"


def _decibels(value: float) -> str:
    return "equal" if math.isinf(value) else f"{value:.1f} dB"
