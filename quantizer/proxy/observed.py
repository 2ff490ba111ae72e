"""What an observation has seen, as bytes: to be saved, and to be told to other processes.

The bytes are those of a safetensors file: ``counts`` int64 [H, BINS], a row for each histogram, and ``document`` uint8,
the rest as JSON. Adding them to an observation is exact, whatever the order: counts are integers, and bins of two
widths merge without error.
"""

from __future__ import annotations

import json
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
from quantizer.proxy.completeness import CountedProduct
from quantizer.proxy.observe import VARIES
from quantizer.proxy.observe import Observation
from quantizer.proxy.observe import SiteRecord
from quantizer.proxy.observe import one_size
from quantizer.proxy.observe import same_weight
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
        "read_outside": observation.read_outside,
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
        document, counts = json.loads(tensors["document"].numpy().tobytes()), tensors["counts"]
        if counts.dtype != torch.int64 or counts.shape[1:] != (BINS,):
            raise ValueError(f"counts of shape {list(counts.shape)}, expected int64 [.., {BINS}]")
        different = sorted(set(document["sites"]) ^ set(observation.records))
        if different:
            raise CalibrationError(
                f"what was observed belongs to another model: {len(different)} sites differ, the first is "
                f"{different[0]!r}; calibrate this model afresh, with calib(model)"
            )
        parameters = dict(proxy.named_parameters())
        observation.batches += document["batches"]
        observation.chosen_at = max(observation.chosen_at, document["chosen_at"])
        for path, values in document["sites"].items():
            _add_site(observation.records[path], values, parameters)
        for values in document["groups"]:
            _add_group(observation, values, counts)
        observation.read_outside = {**document.get("read_outside", {}), **observation.read_outside}
        observation.magnitudes.add(Regions.from_plain(document.get("regions")))
        for values in document["products"]:
            observation.counter.add(CountedProduct.from_plain(values))
    except (SafetensorError, KeyError, TypeError, ValueError, IndexError) as error:
        raise QuantizerError(
            f"what was observed cannot be read, it is damaged: {error!r}; calibrate afresh, with calib(model)"
        ) from error


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


def _add_site(record: SiteRecord, values: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> None:
    record.kind = record.kind or values["kind"]
    record.calls += values["calls"]
    record.fit += values["fit"]
    record.multiply_adds += values["multiply_adds"]
    record.reads |= set(values["reads"])
    record.depth = one_size(record.depth, values["depth"])
    record.width = one_size(record.width, values["width"])
    # Files from before they were kept have none.
    record.rows = one_size(record.rows, values.get("rows"))
    record.head = one_size(record.head, values.get("head"))
    record.sequence = max(record.sequence, values.get("sequence", 0))
    reasons = list(values["reasons"])
    for name, operand in values["operands"].items():
        mine = record.operands.setdefault(name, OperandRecord())
        weight = None if operand["weight"] is None else _weight(operand["weight"], parameters)
        if weight is None and operand["group"] is None:
            continue
        if mine.weight is None and mine.group is None:
            mine.weight = weight
        elif not same_weight(mine.weight, weight):
            reasons.append(VARIES)
        mine.axis = operand["axis"] if mine.axis is None else mine.axis
        mine.inner = operand["inner"] if mine.inner is None else mine.inner
        mine.softmax = mine.softmax or operand["softmax"]
        mine.ends_branch = mine.ends_branch or operand.get("ends_branch", False)
    record.reasons += [reason for reason in dict.fromkeys(reasons) if reason not in record.reasons]


def _weight(values: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> Weight:
    if values["path"] is None:
        # No module has registered it: it is quantized nowhere, and what it holds is never asked for.
        return Weight(nn.Parameter(torch.empty(0)), None)
    view = values["view"] and WeightView(tuple(values["view"][0]), tuple(values["view"][1]), values["view"][2])
    return Weight(parameters[values["path"]], values["path"], view)


def _add_group(observation: Observation, values: Mapping[str, Any], counts: Tensor) -> None:
    seen = []
    for name in values["operands"]:
        path, _, operand = name.rpartition(".")
        record = observation.records[path].operands[operand]
        if record.weight is None:
            seen.append((name, record))
    added = _calibrator(observation, values, counts)
    group = next((record.group for _, record in seen if record.group is not None), None)
    if group is None:
        group = RangeGroup(calibrator=added)
    else:
        group.calibrator.merge(added)
    if values["channels"] is not None:
        channels = ChannelRange(*(torch.tensor(bound, dtype=torch.float32) for bound in values["channels"]))
        group.add_channels(channels)
    elif values["channels_vary"]:
        group.channels, group.channels_vary = None, True
    group.chosen = group.chosen or (values["chosen"] and (values["chosen"][0], values["chosen"][1]))
    for name, record in seen:
        observation.join(record, group, name)


def _calibrator(observation: Observation, values: Mapping[str, Any], counts: Tensor) -> Calibrator:
    histogram = values["histogram"]
    made = observation.make(histogram is not None)
    made.minimum, made.maximum, made.count = values["minimum"], values["maximum"], values["count"]
    if histogram is not None:
        made.histogram = Histogram.restored(counts[histogram["row"]], histogram["exponent"], histogram["zeros"])
    return made
