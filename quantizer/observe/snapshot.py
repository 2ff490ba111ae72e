"""Statistics as bytes: to save them, and to send them to other processes.

The bytes are a safetensors file: ``counts`` int64 [H, BINS], one row per histogram, and ``document`` uint8, all other
values as JSON. Adding snapshots is exact in any order: counts are integers, and bins of two widths merge without error.
Dataclasses define the fields of the document; loading checks their types and values.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from quantizer.errors import CalibrationError, QuantizerError
from quantizer.observe.calibrators import BINS, Calibrator, Histogram
from quantizer.observe.completeness import CountedProduct
from quantizer.observe.float16_modules import Float32Modules
from quantizer.observe.range_group import ChannelRange, Migration, OperandRecord, RangeGroup
from quantizer.observe.statistics import Seen, SiteStatistics
from quantizer.proxy.site import OUTPUT
from quantizer.proxy.weight import Computation, Weight, WeightView, named_tensors
from quantizer.rewrite.operations import Kind
from quantizer.utils.distributed import all_gather_bytes, get_world_size
from quantizer.utils.plain_values import decoded, json_values
from quantizer.utils.sizes import InputShapes

_SITE_FIELDS = tuple(
    name for name in SiteStatistics.__slots__ if name not in ("reads", "operands", "experts", "follows")
)


def snapshot(seen: Seen) -> bytes:
    """Return all statistics that a plan depends on, as bytes; batches stored for replay are not included."""
    records = [record for site in seen.records.values() for record in site.operands.values()]
    # A smoothed range has its own group, besides the observed one.
    all_groups = [*(record.group for record in records), *(record.smoothed for record in records)]
    groups = list(dict.fromkeys(group for group in all_groups if group is not None))
    places = {group: place for place, group in enumerate(groups)}
    rows: list[Tensor] = []
    document = {
        "batches": seen.batches,
        "rows": seen.rows,
        "chosen_at": seen.chosen_at,
        "only_zeros": seen.only_zeros,
        # Inputs of one size need no record.
        **({"inputs": seen.inputs} if len(seen.inputs) > 1 else {}),
        "sites": {
            path: _plain_site(record, places) for path, record in seen.records.items() if _is_saved(path, record)
        },
        "groups": [_plain_group(group, rows) for group in groups],
        "regions": seen.regions.plain(),
        "read_outside": seen.read_outside,
        "products": [product.plain() for product in seen.counted()],
    }
    text = bytearray(json.dumps(document).encode())
    counts = torch.stack(rows) if rows else torch.zeros(0, BINS, dtype=torch.int64)
    return save({"counts": counts, "document": torch.frombuffer(text, dtype=torch.uint8)})


def restored(data: bytes, proxy: nn.Module, paths: Collection[str], make: Callable[[bool], Calibrator]) -> Seen:
    """Return the statistics of a snapshot, for a proxy of the same model."""
    with _read(data) as (document, counts):
        regions = Float32Modules.from_plain(document.regions)
        products = [CountedProduct.from_plain(v, f"products[{n}]") for n, v in enumerate(document.products)]
        lost = [product.site for product in products if product.site not in (None, *document.sites)]
        if lost:
            raise ValueError(f"products of {lost[0]!r}, which is not a site")
    parameters = named_tensors(proxy)
    _require_model(document, paths, parameters)
    statistics = Seen(
        # The observed outputs depend on the target: others are dropped, and missing ones count as unobserved.
        records={path: SiteStatistics() for path in paths}
        | {path: _site(site, parameters) for path, site in document.sites.items() if path in paths},
        batches=document.batches,
        rows=document.rows,
        chosen_at=document.chosen_at,
        products=Counter({replace(product, multiply_adds=0): product.multiply_adds for product in products}),
        regions=regions,
        only_zeros=document.only_zeros,
        inputs=tuple(document.inputs),
        read_outside=dict(document.read_outside),
    )
    for group in document.groups:
        _add_group(statistics, group, counts, make)
    return statistics


def seen_inputs(data: bytes) -> tuple[InputShapes, ...]:
    """Return the shapes of the inputs in a snapshot; empty if all batches had one size."""
    with _read(data) as (document, _):
        return tuple(document.inputs)


@contextmanager
def _read(data: bytes) -> Iterator[tuple[SeenDocument, Tensor]]:
    """Yield the document and the counts of a snapshot."""
    try:
        tensors = load(data)
        counts = tensors["counts"]
        if counts.dtype != torch.int64 or counts.shape[1:] != (BINS,) or bool((counts < 0).any()):
            raise ValueError(
                f"counts: expected non-negative int64 [.., {BINS}], got {counts.dtype} {list(counts.shape)}"
            )
        yield seen_document(json_values(tensors["document"].numpy().tobytes()), len(counts)), counts
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise QuantizerError(
            f"the saved statistics are damaged: {error}; calibrate again, with calib(model)"
        ) from error


def add_over_ranks(calibrators: Sequence[Calibrator]) -> None:
    """Replace the statistics of each calibrator by the sum over all ranks; all ranks must pass as many."""
    if get_world_size() == 1:
        return
    rows: list[Tensor] = []
    text = bytearray(json.dumps([_plain_calibrator(calibrator, rows) for calibrator in calibrators]).encode())
    counts = torch.stack(rows) if rows else torch.zeros(0, BINS, dtype=torch.int64)
    parts = [
        load(data)
        for data in all_gather_bytes(save({"counts": counts, "document": torch.frombuffer(text, dtype=torch.uint8)}))
    ]
    documents: list[tuple[SeenCalibrator, ...]] = [
        decoded(tuple[SeenCalibrator, ...], json.loads(part["document"].numpy().tobytes()), "calibrators")
        for part in parts
    ]
    for place, calibrator in enumerate(calibrators):
        first, *others = (
            _filled(calibrator.copy(), document[place], part["counts"])
            for document, part in zip(documents, parts, strict=True)
        )
        for other in others:
            first.merge(other)
        calibrator.minimum, calibrator.maximum, calibrator.count = first.minimum, first.maximum, first.count
        calibrator.histogram = first.histogram


def _require_model(document: SeenDocument, paths: Collection[str], parameters: Mapping[str, Tensor]) -> None:
    """Raise if a snapshot belongs to another model."""
    different = sorted(path for path in set(document.sites) ^ set(paths) if not path.endswith(f".{OUTPUT}"))
    if different:
        raise CalibrationError(
            f"the statistics belong to another model: {len(different)} sites differ, the first is "
            f"{different[0]!r}; calibrate this model again, with calib(model)"
        )
    for path, site in document.sites.items():
        for name, operand in site.operands.items():
            weight = operand.weight
            if weight is None or weight.path is None:
                continue
            parameter = parameters.get(weight.path)
            view, computation = weight.view, weight.computation
            lost = computation is not None and not set(computation.inputs) <= set(parameters)
            if lost or parameter is None or (view is not None and view[2] + math.prod(view[0]) > parameter.numel()):
                raise CalibrationError(
                    f"the statistics belong to another model: the weight {weight.path!r} of {path}.{name} is missing "
                    "or smaller; calibrate this model again, with calib(model)"
                )


def _is_saved(path: str, record: SiteStatistics) -> bool:
    """Return whether a site belongs into a snapshot: output sites only if they were observed."""
    return bool(record.operands) or not path.endswith(f".{OUTPUT}")


def _plain_site(record: SiteStatistics, places: Mapping[RangeGroup, int]) -> dict[str, Any]:
    operands = {
        name: {
            "weight": None if operand.weight is None else _plain_weight(operand.weight),
            "axis": operand.axis,
            "inner": operand.inner,
            "softmax": bool(operand.softmax),
            "ends_branch": operand.ends_branch,
            "left": operand.left,
            "group": None if operand.group is None else places[operand.group],
            **_plain_equalized(operand),
            **({"tensors": operand.tensors} if _has_own_tensors(operand) else {}),
        }
        for name, operand in record.operands.items()
    }
    return {
        **{name: getattr(record, name) for name in _SITE_FIELDS},
        "reads": sorted(record.reads),
        "operands": operands,
        **({"experts": record.experts} if record.experts else {}),
        **({"follows": sorted(record.follows)} if record.follows else {}),
    }


def _has_own_tensors(operand: OperandRecord) -> bool:
    return operand.tensors not in (None, (0,)) and operand.group is not None and operand.group.together is None


def _plain_equalized(operand: OperandRecord) -> dict[str, Any]:
    """Return the fields that cross-layer equalization adds."""
    spread = None if operand.spread is None else operand.spread.tolist()
    return {
        name: value for name, value in (("layer_before", operand.layer_before), ("spread", spread)) if value is not None
    }


def _plain_weight(weight: Weight) -> dict[str, Any]:
    view = None if weight.view is None else [weight.view.shape, weight.view.order, weight.view.offset]
    computed = {} if weight.computation is None else {"computation": weight.computation.plain()}
    return {"path": weight.path, "view": view, **computed}


def _plain_group(group: RangeGroup, rows: list[Tensor]) -> dict[str, Any]:
    return {
        "operands": group.operands,
        "chosen": group.chosen,
        "channels_vary": group.channels_vary,
        "channels": group.channels and [group.channels.low.tolist(), group.channels.high.tolist()],
        "migration": group.migration and [group.migration.alpha, group.migration.factors.tolist()],
        **({} if group.migration is None else {"migration_axes": list(group.migration.axes)}),
        **({} if not group.parts else {"parts": [_plain_part(part, rows) for part in group.parts]}),
        **({"together": group.together} if group.together else {}),
        **({"results": list(group.results)} if group.results else {}),
        **_plain_calibrator(group.calibrator, rows),
    }


def _plain_part(part: RangeGroup, rows: list[Tensor]) -> dict[str, Any]:
    return {
        "chosen": part.chosen,
        "channels_vary": part.channels_vary,
        "channels": part.channels and [part.channels.low.tolist(), part.channels.high.tolist()],
        **_plain_calibrator(part.calibrator, rows),
    }


def _plain_calibrator(calibrator: Calibrator, rows: list[Tensor]) -> dict[str, Any]:
    histogram = None
    if calibrator.histogram is not None:
        histogram = {"row": len(rows), "exponent": calibrator.histogram.exponent, "zeros": calibrator.histogram.zeros}
        rows.append(calibrator.histogram.counts)
    return {
        "minimum": calibrator.minimum,
        "maximum": calibrator.maximum,
        "count": calibrator.count,
        "histogram": histogram,
    }


def _site(site: SeenSite, parameters: Mapping[str, Tensor]) -> SiteStatistics:
    operands = {
        name: OperandRecord(
            weight=None if operand.weight is None else _weight(operand.weight, parameters),
            axis=operand.axis,
            inner=operand.inner,
            softmax=operand.softmax,
            ends_branch=operand.ends_branch,
            left=operand.left,
            layer_before=operand.layer_before,
            tensors=operand.tensors if operand.tensors is not None or operand.group is None else (0,),
            spread=None if operand.spread is None else torch.tensor(operand.spread, dtype=torch.float32),
        )
        for name, operand in site.operands.items()
    }
    known = {name: getattr(site, name) for name in _SITE_FIELDS}
    known |= {"reasons": list(site.reasons), "experts": list(site.experts)}
    return SiteStatistics(**known, reads=set(site.reads), follows=set(site.follows), operands=operands)


def _weight(saved: SeenWeight, parameters: Mapping[str, Tensor]) -> Weight:
    if saved.path is None:
        # An unregistered parameter is never quantized, so its values are not needed.
        return Weight((nn.Parameter(torch.empty(0)),), ())
    if saved.computation is not None:
        inputs = saved.computation.inputs
        return Weight(tuple(parameters[path] for path in inputs), inputs, computation=saved.computation)
    return Weight((parameters[saved.path],), (saved.path,), None if saved.view is None else WeightView(*saved.view))


def _add_group(seen: Seen, saved: SeenGroup, counts: Tensor, make: Callable[[bool], Calibrator]) -> None:
    migration = saved.migration
    group = RangeGroup(
        calibrator=_filled(make(saved.histogram is not None), saved, counts),
        operands=list(saved.operands),
        chosen=saved.chosen,
        channels=_channels(saved.channels),
        channels_vary=saved.channels_vary,
        together=saved.together,
        results=saved.results,
        parts=[
            RangeGroup(
                calibrator=_filled(make(part.histogram is not None), part, counts),
                chosen=part.chosen,
                channels=_channels(part.channels),
                channels_vary=part.channels_vary,
            )
            for part in saved.parts
        ],
        migration=migration
        and Migration(
            alpha=migration[0],
            factors=torch.tensor(migration[1], dtype=torch.float32),
            axis=saved.migration_axes[0],
            weight_axis=saved.migration_axes[1],
        ),
    )
    for name in saved.operands:
        path, _, operand = name.rpartition(".")
        if path not in seen.records:
            group.operands.remove(name)
            continue
        record = seen.records[path].operands[operand]
        if migration is None:
            record.group = group
        else:
            record.smoothed = group


def _channels(saved: tuple[tuple[float, ...], tuple[float, ...]] | None) -> ChannelRange | None:
    return saved and ChannelRange(*(torch.tensor(bound, dtype=torch.float32) for bound in saved))


def _filled(calibrator: Calibrator, saved: SeenCalibrator, counts: Tensor) -> Calibrator:
    histogram = saved.histogram
    calibrator.minimum, calibrator.maximum, calibrator.count = saved.minimum, saved.maximum, saved.count
    if histogram is not None:
        calibrator.histogram = Histogram.restored(counts[histogram.row], histogram.exponent, histogram.zeros)
    return calibrator


_EXPONENTS = range(-200, 1100)
"""Allowed values of log2 of a bin width: from far below the smallest float to the largest double."""


@dataclass(frozen=True, kw_only=True)
class SeenWeight:
    """A parameter: its path (None: no module registered it), and shape, order and offset of a view.

    ``computation``: how it is computed from parameters and buffers.
    """

    path: str | None
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None
    computation: Computation | None = None


@dataclass(frozen=True, kw_only=True)
class SeenOperand:
    """An operand of a site, see ``OperandRecord``; ``group`` is the index of its group."""

    weight: SeenWeight | None
    axis: int | None
    inner: int | None
    softmax: bool
    group: int | None
    ends_branch: bool
    left: str | None
    layer_before: str | None = None
    spread: tuple[float, ...] | None = None
    tensors: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class SeenSite:
    """A site, see ``SiteStatistics``."""

    kind: Kind | None
    calls: int
    fit: int
    reasons: tuple[str, ...]
    reads: Collection[str]
    depth: int | None
    width: int | None
    multiply_adds: int
    operands: Mapping[str, SeenOperand]
    rows: int | None
    head: int | None
    sequence: int
    left: str | None
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
    """The range of one tensor of a pass, see ``RangeGroup.parts``."""

    chosen: tuple[float, str] | None
    channels_vary: bool
    channels: tuple[tuple[float, ...], tuple[float, ...]] | None


@dataclass(frozen=True, kw_only=True)
class SeenGroup(SeenCalibrator):
    """Operands with one range, see ``RangeGroup``.

    ``migration`` is alpha and the factors; ``migration_axes`` are the axes of x and W for cross-layer equalization.
    """

    operands: tuple[str, ...]
    chosen: tuple[float, str] | None
    channels_vary: bool
    channels: tuple[tuple[float, ...], tuple[float, ...]] | None
    migration: tuple[float | None, tuple[float, ...]] | None
    migration_axes: tuple[int, int | None] = (-1, None)
    parts: tuple[SeenPart, ...] = ()
    together: str | None = None
    results: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SeenDocument:
    """The document of a snapshot; other classes decode ``regions`` and ``products``."""

    batches: int
    chosen_at: int
    sites: Mapping[str, SeenSite]
    groups: tuple[SeenGroup, ...]
    products: tuple[Any, ...]
    regions: Any
    only_zeros: bool
    rows: int
    read_outside: Mapping[str, str]
    inputs: tuple[tuple[tuple[str, bool, tuple[int, ...]], ...], ...] = ()


def seen_document(values: Any, rows: int) -> SeenDocument:
    """Return the document of a snapshot from plain values."""
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
        for operand, record in site.operands.items():
            if record.group is not None and not 0 <= record.group < len(document.groups):
                known = f"there are {len(document.groups)} groups"
                yield f"{place}.operands.{operand}.group: got {record.group}, but {known}"
            if min(record.tensors or (0,)) < -1:
                yield f"{place}.operands.{operand}.tensors: expected numbers >= -1, got {list(record.tensors or ())}"
            view = None if record.weight is None else record.weight.view
            if view is not None and (sorted(view[1]) != list(range(len(view[0]))) or min((*view[0], view[2])) < 0):
                yield f"{place}.operands.{operand}.weight.view: {view} is not a view of a parameter"
            computation = None if record.weight is None else record.weight.computation
            for fault in () if computation is None else computation.faults():
                yield f"{place}.operands.{operand}.weight.computation.{fault}"
    for number, group in enumerate(document.groups):
        yield from _group_faults(f"observed.groups[{number}]", group, document, rows)


def _group_faults(place: str, group: SeenGroup, document: SeenDocument, rows: int) -> Iterator[str]:
    yield from _range_faults(place, group, rows)
    for number, part in enumerate(group.parts):
        yield from _range_faults(f"{place}.parts[{number}]", part, rows)
    if group.results and (
        len(group.results) != len(group.parts) or not set(group.results) <= {*range(len(group.parts))}
    ):
        yield f"{place}.results: expected a number of a part for each of {len(group.parts)}, got {list(group.results)}"
    for name in group.operands:
        path, _, operand = name.rpartition(".")
        if path not in document.sites or operand not in document.sites[path].operands:
            yield f"{place}.operands: {name!r} is not an operand of a site"


def _range_faults(place: str, group: SeenGroup | SeenPart, rows: int) -> Iterator[str]:
    yield from _negative(place, {"count": group.count})
    if group.count and not group.minimum <= group.maximum:
        yield f"{place}.minimum: {group.minimum} is above the maximum {group.maximum}"
    if group.channels is not None and len(group.channels[0]) != len(group.channels[1]):
        yield f"{place}.channels: {len(group.channels[0])} minima, but {len(group.channels[1])} maxima"
    histogram = group.histogram
    if histogram is None:
        return
    yield from _negative(f"{place}.histogram", {"zeros": histogram.zeros})
    if not 0 <= histogram.row < rows:
        yield f"{place}.histogram.row: got {histogram.row}, but there are {rows} histograms of {BINS} bins"
    if histogram.exponent is not None and histogram.exponent not in _EXPONENTS:
        yield f"{place}.histogram.exponent: got {histogram.exponent}, which is not the exponent of a bin width"


def _negative(place: str, values: Mapping[str, int]) -> Iterator[str]:
    return (f"{place}.{name}: expected 0 or more, got {value}" for name, value in values.items() if value < 0)
