"""The model card of a run, from its record."""

from __future__ import annotations

from pathlib import Path

from quantizer.report.card.model_card import CARD, CardFacts, card_text, figure, loading
from quantizer.report.json_file import write_text_atomic
from quantizer.report.ratios import quantized_entry, reference_entry
from quantizer.report.record import RunRecord
from quantizer.report.tables import text
from quantizer.report.tables.headline import quantized_score
from quantizer.report.verdict import missed_goals

_SNIPPET = """\
import numpy as np
import torch

import quantizer

model = quantizer.load({load})  # runs {path}; tensors go in as they go into the model, by position or by name
{sizes}
made_up = {{}}
for spec in model.engine.inputs:
    print(spec)  # name, type and shape; ? is a size that may vary
    shape = [sizes[min(axis, 1)] if size is None else size for axis, size in enumerate(spec.shape)]
    made_up[spec.name] = torch.from_numpy(np.ones(shape, spec.dtype))
print(model(**made_up))"""


def write_run_card(record: RunRecord, folder: Path) -> None:
    """Write the model card of a run into its folder, if it has an engine."""
    if record.engine is None:
        return
    settings = record.config.get("quantizer") or {}
    evaluation = (record.config.get("data") or {}).get("evaluation") or {}
    function = (record.config.get("model") or {}).get("metric")
    latency = record.latency
    facts = CardFacts(
        name=record.name,
        source=record.model.source,
        task=record.model.task,
        backend=record.engine.backend,
        dtype=settings.get("dtype") if any(site.quantized for site in record.coverage) else None,
        score=quantized_score(record.scores),
        dataset=Path(evaluation.get("path") or evaluation.get("name") or function or "evaluation rows").name,
        figures=tuple(_figures(record)),
        machine=str(record.machine.get("cpu") or "a machine that did not say its name"),
        configuration=settings,
        snippet=_SNIPPET.format(
            path=record.engine.path,
            load=loading(folder),
            sizes=_sizes(latency.batch if latency else 8, latency.sequence if latency else None),
        ),
        missed=missed_goals(record.fallback.outcome if record.fallback else None, record.placement),
    )
    write_text_atomic(folder / CARD, card_text(facts))


def _sizes(batch: int, tokens: int | None) -> str:
    """Return the line of the snippet with the sizes that may vary: an image has rows alone."""
    return f"sizes = ({batch}, {tokens})  # rows, and tokens of a row" if tokens else f"sizes = ({batch}, 1)  # rows"


def _figures(record: RunRecord) -> list[str]:
    found = []
    if record.latency is not None:
        before, after = reference_entry(record.latency.engines), quantized_entry(record.latency.engines)
        if before is not None and after is not None:
            shape = text.shape(record.latency.batch, record.latency.sequence)
            told = "" if record.latency.reference is None else f", float is {record.latency.reference}"
            name = f"latency, median, batch {shape}, threads: {record.latency.threads}{told}"
            times = text.milliseconds(before.median_ms), text.milliseconds(after.median_ms)
            found.append(figure(name, *times, after.ratio_to_float))
    small, large = quantized_entry(record.size), reference_entry(record.size)
    if small is not None and large is not None:
        found.append(figure("size", text.file_size(large.bytes), text.file_size(small.bytes), small.ratio))
    little, much = quantized_entry(record.memory), reference_entry(record.memory)
    if little is not None and much is not None:
        found.append(figure("peak memory", f"{much.peak_mib:,.0f} MiB", f"{little.peak_mib:,.0f} MiB", little.ratio))
    scored = quantized_score(record.scores)
    reference = next((entry for entry in record.scores if entry.which == "float"), None)
    if scored is not None and reference is not None:
        name = f"{scored.metric} ({scored.which})"
        found.append(figure(name, text.score(reference.value), text.score(scored.value)))
    return found
