"""What was seen, as bytes: to be saved, and to be told to other processes.

The bytes are those of a safetensors file: ``counts`` int64 [H, BINS], a row for each histogram, and ``document`` uint8,
the rest as JSON. Adding up what they say is exact, whatever the order: counts are integers, and bins of two widths
merge without error.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
from dataclasses import replace
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
from quantizer.proxy.range_group import ChannelRange
from quantizer.proxy.range_group import OperandRecord
from quantizer.proxy.range_group import RangeGroup
from quantizer.proxy.regions import Regions
from quantizer.proxy.seen import Seen
from quantizer.proxy.site_record import SiteRecord
from quantizer.proxy.weight import Weight
from quantizer.proxy.weight import WeightView

__all__ = ["restored", "snapshot"]

_LATER_FIELDS = ("rows", "head", "sequence")
_SITE_FIELDS = ("kind", "calls", "fit", "reasons", "depth", "width", "rows", "head", "sequence", "multiply_adds")


def snapshot(seen: Seen) -> bytes:
    """Everything that a plan depends on; batches that are kept to be run again are not in it."""
    records = [record for site in seen.records.values() for record in site.operands.values()]
    groups = list(dict.fromkeys(record.group for record in records if record.group is not None))
    places = {group: place for place, group in enumerate(groups)}
    rows: list[Tensor] = []
    document = {
        "batches": seen.batches,
        "chosen_at": seen.chosen_at,
        "only_zeros": seen.only_zeros,
        "sites": {path: _plain_site(record, places) for path, record in seen.records.items()},
        "groups": [_plain_group(group, rows) for group in groups],
        "regions": seen.regions.plain(),
        "read_outside": seen.read_outside,
        "products": [product.plain() for product in seen.counted()],
    }
    text = bytearray(json.dumps(document).encode())
    counts = torch.stack(rows) if rows else torch.zeros(0, BINS, dtype=torch.int64)
    return save({"counts": counts, "document": torch.frombuffer(text, dtype=torch.uint8)})


def restored(data: bytes, proxy: nn.Module, paths: Collection[str], make: Callable[[bool], Calibrator]) -> Seen:
    """What ``snapshot`` gave the bytes of, for a proxy of the same model.

    Args:
        data: the snapshot.
        proxy: has the parameters that the sites read.
        paths: of its sites.
        make: makes a calibrator; its argument asks for a histogram.

    Raises:
        CalibrationError: the snapshot is of another model.
        QuantizerError: it is damaged.
    """
    try:
        tensors = load(data)
        document, counts = json.loads(tensors["document"].numpy().tobytes()), tensors["counts"]
        if counts.dtype != torch.int64 or counts.shape[1:] != (BINS,):
            raise ValueError(f"counts of shape {list(counts.shape)}, expected int64 [.., {BINS}]")
        different = sorted(set(document["sites"]) ^ set(paths))
        if different:
            raise CalibrationError(
                f"what was observed belongs to another model: {len(different)} sites differ, the first is "
                f"{different[0]!r}; calibrate this model afresh, with calib(model)"
            )
        parameters = dict(proxy.named_parameters())
        products = [CountedProduct.from_plain(values) for values in document["products"]]
        seen = Seen(
            records={path: _site(values, parameters) for path, values in document["sites"].items()},
            batches=document["batches"],
            chosen_at=document["chosen_at"],
            products=Counter({replace(product, multiply_adds=0): product.multiply_adds for product in products}),
            regions=Regions.from_plain(document.get("regions")),
            # Files from before it was kept do not say.
            only_zeros=document.get("only_zeros", False),
            read_outside=document.get("read_outside", {}),
        )
        for values in document["groups"]:
            _add_group(seen, values, counts, make)
        return seen
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
            "softmax": bool(seen.softmax),
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


def _site(values: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> SiteRecord:
    operands = {
        name: OperandRecord(
            weight=None if operand["weight"] is None else _weight(operand["weight"], parameters),
            axis=operand["axis"],
            inner=operand["inner"],
            softmax=operand["softmax"],
            ends_branch=operand.get("ends_branch", False),
        )
        for name, operand in values["operands"].items()
    }
    # Files from before some of them were kept do not have these.
    known = {name: values[name] for name in _SITE_FIELDS if name not in _LATER_FIELDS or name in values}
    return SiteRecord(**{**known, "reasons": list(values["reasons"])}, reads=set(values["reads"]), operands=operands)


def _weight(values: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> Weight:
    if values["path"] is None:
        # No module has registered it: it is quantized nowhere, and what it holds is never asked for.
        return Weight(nn.Parameter(torch.empty(0)), None)
    view = values["view"] and WeightView(tuple(values["view"][0]), tuple(values["view"][1]), values["view"][2])
    return Weight(parameters[values["path"]], values["path"], view)


def _add_group(seen: Seen, values: Mapping[str, Any], counts: Tensor, make: Callable[[bool], Calibrator]) -> None:
    channels = values["channels"]
    group = RangeGroup(
        calibrator=_calibrator(values, counts, make),
        operands=list(values["operands"]),
        chosen=values["chosen"] and (values["chosen"][0], values["chosen"][1]),
        channels=channels and ChannelRange(*(torch.tensor(bound, dtype=torch.float32) for bound in channels)),
        channels_vary=values["channels_vary"],
    )
    for name in values["operands"]:
        path, _, operand = name.rpartition(".")
        seen.records[path].operands[operand].group = group


def _calibrator(values: Mapping[str, Any], counts: Tensor, make: Callable[[bool], Calibrator]) -> Calibrator:
    histogram = values["histogram"]
    made = make(histogram is not None)
    made.minimum, made.maximum, made.count = values["minimum"], values["maximum"], values["count"]
    if histogram is not None:
        made.histogram = Histogram.restored(counts[histogram["row"]], histogram["exponent"], histogram["zeros"])
    return made
