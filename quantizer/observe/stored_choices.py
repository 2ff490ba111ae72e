"""Choices made by running batches as bytes, for a store: ranges, factors, integers of weights and shifts of biases."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from quantizer.observe.calibrators import Calibrator
from quantizer.observe.range_group import RoundedWeight
from quantizer.observe.snapshot import restored, snapshot
from quantizer.observe.statistics import BiasShifts, Seen

_DOCUMENT, _STATISTICS = "document", "statistics"


def choices_bytes(seen: Seen) -> bytes:
    """Return the statistics with all choices, as the bytes of a safetensors file."""
    weights = {
        f"{path}.{name}": record.rounded
        for path, site in seen.records.items()
        for name, record in site.operands.items()
        if record.rounded is not None
    }
    tensors = {_STATISTICS: _tensor(snapshot(seen))}
    for name, weight in weights.items():
        tensors |= _named("codes", name, weight.codes) | _named("amax", name, weight.amax)
    shifts = None
    if seen.bias_shifts is not None:
        batches, bias = seen.bias_shifts
        shifts = [batches, dict(bias.notes)]
        for path, shift in bias.shifts.items():
            tensors |= _named("shift", path, shift)
    document = {"rounded": {name: weight.text for name, weight in weights.items()}, "shifts": shifts}
    return save({**tensors, _DOCUMENT: _tensor(json.dumps(document).encode())})


def restored_choices(data: bytes, proxy: nn.Module, paths: Collection[str], make: Callable[[bool], Calibrator]) -> Seen:
    """Return the statistics with all choices from bytes of ``choices_bytes``, for a proxy of the same model."""
    tensors = load(data)
    document = json.loads(tensors[_DOCUMENT].numpy().tobytes())
    seen = restored(tensors[_STATISTICS].numpy().tobytes(), proxy, paths, make)
    for name, text in document["rounded"].items():
        path, _, operand = name.rpartition(".")
        codes, amax = tensors.get(f"codes {name}"), tensors.get(f"amax {name}")
        seen.records[path].operands[operand].rounded = RoundedWeight(codes=codes, text=text, amax=amax)
    if document["shifts"] is not None:
        batches, notes = document["shifts"]
        shifts = {name.removeprefix("shift "): value for name, value in tensors.items() if name.startswith("shift ")}
        seen.bias_shifts = batches, BiasShifts(shifts=shifts, notes=notes)
    return seen


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _named(kind: str, name: str, value: Tensor | None) -> dict[str, Tensor]:
    # A copy, because safetensors does not save shared memory.
    return {} if value is None else {f"{kind} {name}": value.detach().cpu().contiguous().clone()}
