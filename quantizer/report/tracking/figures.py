"""A record as flat names and values, the form that experiment trackers take."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quantizer.report.output_record import worst_output
from quantizer.report.record import RunRecord
from quantizer.report.tables.headline import covered_share

_MIB = 2**20


def parameters_of(record: RunRecord) -> dict[str, str]:
    """Return what was set: ``quantizer.activations.percentile: "99.9"`` for each key, and model and CPU.

    A list is one value, in JSON.
    """
    return {
        "model": record.model.source,
        "model.parameters": str(record.model.parameters),
        "machine.cpu": str(record.machine.get("cpu")),
        **_flat(record.config, ""),
    }


def metrics_of(record: RunRecord) -> dict[str, float]:
    """Return what was measured, by names such as ``score.engine.accuracy`` and ``latency_ms.float``.

    Names carry their unit: ``_ms``, ``_mib``, ``_db``. Only what was measured is there.
    """
    found: dict[str, float | None] = {"multiply_adds_quantized": covered_share(record)}
    for score in record.scores:
        found[f"score.{score.which}.{score.metric}"] = score.value
        found[f"score_difference.{score.which}.{score.metric}"] = score.difference
    for entry in record.latency.engines if record.latency else ():
        found[f"latency_ms.{entry.name}"] = entry.median_ms
        found[f"speedup.{entry.name}"] = entry.ratio_to_float
    for size in record.size:
        found[f"size_mib.{size.name}"] = size.bytes / _MIB
    for memory in record.memory:
        found[f"memory_mib.{memory.name}"] = memory.peak_mib
    for name in dict.fromkeys(output.output for output in record.outputs):
        output = worst_output([one for one in record.outputs if one.output == name])
        assert output is not None
        found[f"sqnr_db.{name}"] = output.sqnr_db
        found[f"cosine.{name}"] = output.cosine
    return {name: float(value) for name, value in found.items() if value is not None}


def _flat(values: Mapping[str, Any], path: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{path}{name}.")
        else:
            found[f"{path}{name}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return found
