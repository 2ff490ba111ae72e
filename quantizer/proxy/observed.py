"""What an observation has seen, as bytes: to be saved, and to be told to other processes.

The bytes are those of a safetensors file: ``counts`` int64 [H, BINS], a row for each histogram, and ``document`` uint8,
the rest as JSON. Adding them to an observation is exact, whatever the order: counts are integers, and bins of two
widths merge without error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from safetensors.torch import save
from torch import Tensor
from torch import nn

from quantizer.calibrators import Calibrator
from quantizer.calibrators.histogram import BINS
from quantizer.calibrators.histogram import Histogram
from quantizer.errors import CalibrationError
from quantizer.errors import QuantizerError
from quantizer.plain import json_values
from quantizer.proxy.completeness import CountedProduct
from quantizer.proxy.observe import VARIES
from quantizer.proxy.observe import Observation
from quantizer.proxy.observe import SiteRecord
from quantizer.proxy.observe import one_size
from quantizer.proxy.observe import same_weight
from quantizer.proxy.observed_fields import SeenDocument
from quantizer.proxy.observed_fields import SeenGroup
from quantizer.proxy.observed_fields import SeenSite
from quantizer.proxy.observed_fields import SeenWeight
from quantizer.proxy.observed_fields import seen_document
from quantizer.proxy.range_group import ChannelRange
from quantizer.proxy.range_group import OperandRecord
from quantizer.proxy.range_group import RangeGroup
from quantizer.proxy.regions import Regions
from quantizer.proxy.weight import Weight
from quantizer.proxy.weight import WeightView

__all__ = ["absorb", "snapshot"]

_SITE_FIELDS = ("kind", "calls", "fit", "reasons", "depth", "width", "rows", "head", "sequence", "multiply_adds")


def snapshot(observation: Observation) -> bytes:
    """Everything that a plan depends on; batches that are kept to be run again are not in it."""
    records = [record for site in observation.records.values() for record in site.operands.values()]
    groups = list(dict.fromkeys(record.group for record in records if record.group is not None))
    places = {group: place for place, group in enumerate(groups)}
    rows: list[Tensor] = []
    document = {
        "batches": observation.batches,
        "chosen_at": observation.chosen_at,
        "sites": {path: _plain_site(record, places) for path, record in observation.records.items()},
        "groups": [_plain_group(group, rows) for group in groups],
        "regions": observation.magnitudes.regions().plain(),
        "products": [product.plain() for product in observation.counter.products()],
    }
    text = bytearray(json.dumps(document).encode())
    counts = torch.stack(rows) if rows else torch.zeros(0, BINS, dtype=torch.int64)
    return save({"counts": counts, "document": torch.frombuffer(text, dtype=torch.uint8)})


def absorb(observation: Observation, data: bytes, proxy: nn.Module) -> None:
    """Add what ``snapshot`` gave to an observation of the same model, as if it had seen that too.

    Args:
        observation: of the sites of ``proxy``.
        data: the snapshot.
        proxy: has the parameters that the sites read.

    Raises:
        CalibrationError: the snapshot is of another model.
        QuantizerError: it is damaged.
    """
    try:
        tensors = load(data)
        counts = tensors["counts"]
        if counts.dtype != torch.int64 or counts.shape[1:] != (BINS,) or bool((counts < 0).any()):
            raise ValueError(
                f"counts {counts.dtype} of shape {list(counts.shape)}, expected int64 [.., {BINS}], from 0"
            )
        document = seen_document(json_values(tensors["document"].numpy().tobytes()), len(counts))
        regions = Regions.from_plain(document.regions)
        products = [CountedProduct.from_plain(v, f"products[{n}]") for n, v in enumerate(document.products)]
        lost = [product.site for product in products if product.site not in (None, *document.sites)]
        if lost:
            raise ValueError(f"products of {lost[0]!r}, which is no site")
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise QuantizerError(
            f"what was observed cannot be read, it is damaged: {error}; calibrate afresh, with calib(model)"
        ) from error
    parameters = dict(proxy.named_parameters())
    _require_model(document, observation, parameters)
    # From here on nothing can be refused: half of a snapshot would be worse than none.
    observation.batches += document.batches
    observation.chosen_at = max(observation.chosen_at, document.chosen_at)
    for path, site in document.sites.items():
        _add_site(observation.records[path], site, parameters)
    for group in document.groups:
        _add_group(observation, group, counts)
    observation.magnitudes.add(regions)
    for product in products:
        observation.counter.add(product)


def _require_model(document: SeenDocument, observation: Observation, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse what was seen of another model.

    Raises:
        CalibrationError: it has other sites or parameters.
    """
    different = sorted(set(document.sites) ^ set(observation.records))
    if different:
        raise CalibrationError(
            f"what was observed belongs to another model: {len(different)} sites differ, the first is "
            f"{different[0]!r}; calibrate this model afresh, with calib(model)"
        )
    for path, site in document.sites.items():
        for name, operand in site.operands.items():
            weight = operand.weight
            if weight is None or weight.path is None:
                continue
            parameter = parameters.get(weight.path)
            view = weight.view
            if parameter is None or (view is not None and view[2] + math.prod(view[0]) > parameter.numel()):
                raise CalibrationError(
                    f"what was observed belongs to another model: the weight {weight.path!r} of {path}.{name} is not "
                    "there, or is smaller; calibrate this model afresh, with calib(model)"
                )


def _plain_site(record: SiteRecord, places: Mapping[RangeGroup, int]) -> dict[str, Any]:
    operands = {
        name: {
            "weight": None if seen.weight is None else _plain_weight(seen.weight),
            "axis": seen.axis,
            "inner": seen.inner,
            "softmax": seen.softmax,
            "ends_branch": seen.ends_branch,
            "group": None if seen.group is None else places[seen.group],
        }
        for name, seen in record.operands.items()
    }
    return {
        **{name: getattr(record, name) for name in _SITE_FIELDS},
        "reads": sorted(record.reads),
        "operands": operands,
    }


def _plain_weight(weight: Weight) -> dict[str, Any]:
    view = None if weight.view is None else [weight.view.shape, weight.view.order, weight.view.offset]
    return {"path": weight.path, "view": view}


def _plain_group(group: RangeGroup, rows: list[Tensor]) -> dict[str, Any]:
    calibrator = group.calibrator
    histogram = None
    if calibrator.histogram is not None:
        histogram = {"row": len(rows), "exponent": calibrator.histogram.exponent, "zeros": calibrator.histogram.zeros}
        rows.append(calibrator.histogram.counts)
    return {
        "operands": group.operands,
        "chosen": group.chosen,
        "channels_vary": group.channels_vary,
        "channels": group.channels and [group.channels.low.tolist(), group.channels.high.tolist()],
        "minimum": calibrator.minimum,
        "maximum": calibrator.maximum,
        "count": calibrator.count,
        "histogram": histogram,
    }


def _add_site(record: SiteRecord, seen: SeenSite, parameters: Mapping[str, nn.Parameter]) -> None:
    record.kind = record.kind or seen.kind
    record.calls += seen.calls
    record.fit += seen.fit
    record.multiply_adds += seen.multiply_adds
    record.reads |= set(seen.reads)
    record.depth = one_size(record.depth, seen.depth)
    record.width = one_size(record.width, seen.width)
    record.rows = one_size(record.rows, seen.rows)
    record.head = one_size(record.head, seen.head)
    record.sequence = max(record.sequence, seen.sequence)
    reasons = list(seen.reasons)
    for name, operand in seen.operands.items():
        mine = record.operands.setdefault(name, OperandRecord())
        weight = None if operand.weight is None else _weight(operand.weight, parameters)
        if weight is None and operand.group is None:
            continue
        if mine.weight is None and mine.group is None:
            mine.weight = weight
        elif not same_weight(mine.weight, weight):
            reasons.append(VARIES)
        mine.axis = operand.axis if mine.axis is None else mine.axis
        mine.inner = operand.inner if mine.inner is None else mine.inner
        mine.softmax = mine.softmax or operand.softmax
        mine.ends_branch = mine.ends_branch or operand.ends_branch
    record.reasons += [reason for reason in dict.fromkeys(reasons) if reason not in record.reasons]


def _weight(seen: SeenWeight, parameters: Mapping[str, nn.Parameter]) -> Weight:
    if seen.path is None:
        # No module has registered it: it is quantized nowhere, and what it holds is never asked for.
        return Weight(nn.Parameter(torch.empty(0)), None)
    return Weight(parameters[seen.path], seen.path, None if seen.view is None else WeightView(*seen.view))


def _add_group(observation: Observation, seen: SeenGroup, counts: Tensor) -> None:
    records = []
    for name in seen.operands:
        path, _, operand = name.rpartition(".")
        record = observation.records[path].operands[operand]
        if record.weight is None:
            records.append((name, record))
    added = _calibrator(observation, seen, counts)
    group = next((record.group for _, record in records if record.group is not None), None)
    if group is None:
        group = RangeGroup(calibrator=added)
    else:
        group.calibrator.merge(added)
    if seen.channels is not None:
        group.add_channels(ChannelRange(*(torch.tensor(bound, dtype=torch.float32) for bound in seen.channels)))
    elif seen.channels_vary:
        group.channels, group.channels_vary = None, True
    group.chosen = group.chosen or seen.chosen
    for name, record in records:
        observation.join(record, group, name)


def _calibrator(observation: Observation, seen: SeenGroup, counts: Tensor) -> Calibrator:
    histogram = seen.histogram
    made = observation.make(histogram is not None)
    made.minimum, made.maximum, made.count = seen.minimum, seen.maximum, seen.count
    if histogram is not None:
        made.histogram = Histogram.restored(counts[histogram.row], histogram.exponent, histogram.zeros)
    return made
