"""The fields of a snapshot except the counts of histograms, as types, and checks of their values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from quantizer.calibrators.histogram import BINS
from quantizer.common.plain_values import decoded
from quantizer.operations.catalogue import Kind
from quantizer.proxy.computed.computation import Computation

_EXPONENTS = range(-200, 1100)
"""log2 of a bin's width: from far below the smallest float to the largest double."""


@dataclass(frozen=True, kw_only=True)
class SeenWeight:
    """A parameter: its path (None: no module registered it), and shape, order and offset of the view, if it is one.

    ``computation``: how it is computed from parameters and buffers; None in older files, too.
    """

    path: str | None
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None
    computation: Computation | None = None


@dataclass(frozen=True, kw_only=True)
class SeenOperand:
    """An operand of a site, see ``OperandRecord``; ``group`` is the index of its group.

    Older files have no ``ends_branch``, ``left`` and ``tensors``.
    """

    weight: SeenWeight | None
    axis: int | None
    inner: int | None
    softmax: bool
    group: int | None
    ends_branch: bool = False
    left: str | None = None
    layer_before: str | None = None
    spread: tuple[float, ...] | None = None
    tensors: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class SeenSite:
    """A site, see ``SiteStatistics``. Older files have no rows, head, sequence, left and experts."""

    kind: Kind | None
    calls: int
    fit: int
    reasons: tuple[str, ...]
    reads: Collection[str]
    depth: int | None
    width: int | None
    multiply_adds: int
    operands: Mapping[str, SeenOperand]
    rows: int | None = None
    head: int | None = None
    sequence: int = 0
    left: str | None = None
    experts: tuple[int, ...] = ()
    follows: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SeenHistogram:
    """A histogram: its row in the counts, and exponent and zeros of ``Histogram``."""

    row: int
    exponent: int | None
    zeros: int


@dataclass(frozen=True, kw_only=True)
class SeenCalibrator:
    """The statistics of a ``Calibrator``."""

    minimum: float
    maximum: float
    count: int
    histogram: SeenHistogram | None


@dataclass(frozen=True, kw_only=True)
class SeenPart(SeenCalibrator):
    """A tensor of a pass by itself, see ``RangeGroup.parts``."""

    chosen: tuple[float, str] | None
    channels_vary: bool
    channels: tuple[tuple[float, ...], tuple[float, ...]] | None


@dataclass(frozen=True, kw_only=True)
class SeenGroup(SeenCalibrator):
    """Operands with one range, see ``RangeGroup``. Older files have no ``parts``.

    ``migration``, which older files lack too, is alpha and the factors.
    ``migration_axes`` are those of x and W, of the factors that make the weights of two convolutions alike.
    """

    operands: tuple[str, ...]
    chosen: tuple[float, str] | None
    channels_vary: bool
    channels: tuple[tuple[float, ...], tuple[float, ...]] | None
    migration: tuple[float | None, tuple[float, ...]] | None = None
    migration_axes: tuple[int, int | None] = (-1, None)
    parts: tuple[SeenPart, ...] = ()
    together: str | None = None


@dataclass(frozen=True, kw_only=True)
class SeenDocument:
    """A whole snapshot; ``regions`` and ``products`` are read by their own classes.

    Older files have no ``only_zeros``, ``read_outside``, ``rows`` and ``inputs``.
    """

    batches: int
    chosen_at: int
    sites: Mapping[str, SeenSite]
    groups: tuple[SeenGroup, ...]
    products: tuple[Any, ...]
    regions: Any = None
    only_zeros: bool = False
    rows: int = 0
    read_outside: Mapping[str, str] = field(default_factory=dict)
    inputs: tuple[tuple[tuple[str, bool, tuple[int, ...]], ...], ...] = ()


def seen_document(values: Any, rows: int) -> SeenDocument:
    """Return the document of a snapshot from plain values.

    Args:
        values: the values of the JSON text.
        rows: the number of histograms.

    Raises:
        ValueError: a value has a wrong type or is not possible; the message says which.
    """
    document: SeenDocument = decoded(SeenDocument, values, "observed")
    for fault in _faults(document, rows):
        raise ValueError(fault)
    return document


def _faults(document: SeenDocument, rows: int) -> Iterator[str]:
    yield from _negative(
        "observed", {"batches": document.batches, "chosen_at": document.chosen_at, "rows": document.rows}
    )
    for name, site in document.sites.items():
        place = f"observed.sites.{name}"
        counts = {field: getattr(site, field) for field in ("calls", "fit", "multiply_adds", "sequence")}
        sizes = {field: getattr(site, field) or 0 for field in ("depth", "width", "rows", "head")}
        yield from _negative(place, counts | sizes)
        for operand, seen in site.operands.items():
            if seen.group is not None and not 0 <= seen.group < len(document.groups):
                yield f"{place}.operands.{operand}.group: got {seen.group}, and there are {len(document.groups)} groups"
            if min(seen.tensors or (0,)) < -1:
                yield f"{place}.operands.{operand}.tensors: expected numbers from -1, got {list(seen.tensors or ())}"
            view = None if seen.weight is None else seen.weight.view
            if view is not None and (sorted(view[1]) != list(range(len(view[0]))) or min((*view[0], view[2])) < 0):
                yield f"{place}.operands.{operand}.weight.view: {view} is no view of a parameter"
            computation = None if seen.weight is None else seen.weight.computation
            for fault in () if computation is None else computation.faults():
                yield f"{place}.operands.{operand}.weight.computation.{fault}"
    for number, group in enumerate(document.groups):
        yield from _group_faults(f"observed.groups[{number}]", group, document, rows)


def _group_faults(place: str, group: SeenGroup, document: SeenDocument, rows: int) -> Iterator[str]:
    yield from _range_faults(place, group, rows)
    for number, part in enumerate(group.parts):
        yield from _range_faults(f"{place}.parts[{number}]", part, rows)
    for name in group.operands:
        path, _, operand = name.rpartition(".")
        if path not in document.sites or operand not in document.sites[path].operands:
            yield f"{place}.operands: {name!r} is no operand of a site"


def _range_faults(place: str, group: SeenGroup | SeenPart, rows: int) -> Iterator[str]:
    yield from _negative(place, {"count": group.count})
    if group.count and not group.minimum <= group.maximum:
        yield f"{place}.minimum: got {group.minimum}, with a maximum of {group.maximum}"
    if group.channels is not None and len(group.channels[0]) != len(group.channels[1]):
        yield f"{place}.channels: {len(group.channels[0])} lows and {len(group.channels[1])} highs"
    histogram = group.histogram
    if histogram is None:
        return
    yield from _negative(f"{place}.histogram", {"zeros": histogram.zeros})
    if not 0 <= histogram.row < rows:
        yield f"{place}.histogram.row: got {histogram.row}, and there are {rows} histograms of {BINS} bins"
    if histogram.exponent is not None and histogram.exponent not in _EXPONENTS:
        yield f"{place}.histogram.exponent: got {histogram.exponent}, which is the width of no bin"


def _negative(place: str, values: Mapping[str, int]) -> Iterator[str]:
    return (f"{place}.{name}: expected 0 or more, got {value}" for name, value in values.items() if value < 0)
