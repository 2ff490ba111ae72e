"""The model card of a run: metadata in YAML, figures, the configuration, and how to run the engine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from quantizer import __version__
from quantizer.errors import DISTRIBUTION
from quantizer.plan.targets import profile
from quantizer.report import text
from quantizer.report.record import RunRecord, write_text_atomic
from quantizer.report.verdict import missed_goals
from quantizer.utils.cpu import native_code
from quantizer.utils.records import Score

CARD = "README.md"
"""The name of the file, as expected by the hub."""

_PIPELINES = {
    "depth-estimation": "depth-estimation",
    "embedding-classification": "feature-extraction",
    "fill-mask": "fill-mask",
    "image-classification": "image-classification",
    "image-feature-extraction": "image-feature-extraction",
    "object-detection": "object-detection",
    "question-answering": "question-answering",
    "retrieval": "sentence-similarity",
    "semantic-segmentation": "image-segmentation",
    "sentence-similarity": "sentence-similarity",
    "sequence-classification": "text-classification",
    "text-generation": "text-generation",
    "token-classification": "token-classification",
}
"""Task names of the hub by our names."""

_OTHER = "other"
"""The task of a score without a name on the hub."""


@dataclass(frozen=True, kw_only=True)
class CardClient:
    """Another library that loads the folder of a card.

    Attributes:
        library: its name on the hub.
        layout: the layout of the folder.
        needs: what to install, in words.
        language: the language of the snippet.
    """

    library: str
    layout: str
    needs: str
    language: str = "python"


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """The content of a model card.

    Attributes:
        name: the name of the model.
        source: the source of the float model.
        task: our name of its task, or another word, which the metadata omits.
        backend: the backend of the engine.
        dtype: the number format; None: nothing is quantized.
        score: the score of the delivered model, or of the form nearest to it; None without a score.
        dataset: the name of the evaluation samples.
        figures: rows of the table, made by ``figure``.
        machine: the machine of the measurements.
        configuration: the settings of the quantizer; empty: nothing was quantized.
        snippet: Python that runs the engine from its folder.
        missed: sentences on goals that are not reached, and on sizes that the engine does not accept.
        client: the library that loads the folder, if it is the layout of another client.
    """

    name: str
    source: str
    task: str
    backend: str
    dtype: str | None
    score: Score | None
    dataset: str
    figures: tuple[str, ...]
    machine: str
    configuration: Mapping[str, Any]
    snippet: str
    missed: tuple[str, ...] = ()
    client: CardClient | None = None


def loading(folder: Path) -> str:
    """Return the arguments of ``load`` for an engine in the current folder; native code requires trust."""
    native = any(native_code(engine) is not None for engine in folder.glob("*.engine"))
    return '".", trust=True' if native else '"."'


def figure(name: str, before: str, after: str) -> str:
    """Return a row of the table of figures: float and engine."""
    return f"| {name} | {before} | {after} |"


def card_text(facts: CardFacts) -> str:
    """Return the card of an engine, in Markdown with metadata before it."""
    metadata = yaml.safe_dump(_metadata(facts), sort_keys=False, allow_unicode=True)
    what, made_for = ("engine", facts.backend) if facts.client is None else ("model", facts.client.library)
    form = f"{facts.dtype.upper()} {what}" if facts.dtype else what.capitalize()
    parts = [
        f"---\n{metadata}---\n\n# {facts.name}\n",
        f"{form} of `{facts.source}` for {made_for}, made with quantizer.\n",
    ]
    # Missed goals come before all figures.
    parts[1:1] = [f"**{goal[:1].upper()}{goal[1:]}.**\n" for goal in facts.missed]
    if facts.figures:
        table = "\n".join(["| | float | engine |", "|---|---|---|", *facts.figures])
        of_engine = "" if facts.client is None else f", with the {facts.backend} engine of quantizer"
        parts.append(f"## Measured\n\nOn {facts.machine}{of_engine}.\n\n{table}\n")
    if facts.client is None:
        needed, language = _needed(facts.backend), "python"
    else:
        needed, language = f"Needs {facts.client.needs}.", facts.client.language
    parts.append(f"## How to run\n\n{needed}\n\nIn this folder:\n\n```{language}\n{facts.snippet.rstrip()}\n```\n")
    if facts.configuration:
        settings = yaml.safe_dump(dict(facts.configuration), sort_keys=False, allow_unicode=True)
        parts.append(f"## Configuration\n\n```yaml\n{settings}```\n")
    return "\n".join(parts)


def _needed(backend: str) -> str:
    """Return the required installation in words."""
    extra = profile(backend).library or backend
    # torch needs no extra.
    library = "" if extra == "torch" else f" with the extra `{extra}`"
    return (
        f"Needs the Python package `quantizer`, distribution `{DISTRIBUTION}` {__version__} or later{library}, "
        "installed from its wheel or its repository; see docs/install.md."
    )


def _metadata(facts: CardFacts) -> dict[str, Any]:
    client = facts.client
    tags = [
        "quantizer",
        client.layout if client else facts.backend,
        *([facts.dtype, "quantized"] if facts.dtype else []),
    ]
    metadata: dict[str, Any] = {"library_name": client.library if client else "quantizer", "tags": tags}
    if (base := _hub_name(facts.source)) is not None:
        metadata["base_model"] = base
        if facts.dtype:
            metadata["base_model_relation"] = "quantized"
    if facts.task in _PIPELINES:
        metadata["pipeline_tag"] = _PIPELINES[facts.task]
    if facts.score is not None:
        metric = {
            "type": facts.score.metric,
            "value": round(facts.score.value, 6),
            "name": f"{facts.score.metric} ({facts.score.form})",
        }
        slug = re.sub(r"[^\w.-]+", "-", facts.dataset).strip("-")
        results = {
            "task": {"type": _PIPELINES.get(facts.task, _OTHER)},
            "dataset": {"name": facts.dataset, "type": slug},
            "metrics": [metric],
        }
        metadata["model-index"] = [{"name": facts.name, "results": [results]}]
    return metadata


def _hub_name(source: str) -> str | None:
    """Return the source if it can only be a model on the hub: ``bert-base-uncased``, ``OWNER/NAME``."""
    name = re.fullmatch(r"(?:[\w-][\w.-]*/)?[\w-][\w.-]*", source)
    return source if name is not None and not Path(source).exists() else None


_SNIPPET = """\
import numpy as np
import torch

import quantizer

model = quantizer.load({load})  # runs {path}; takes the tensors of the model, by position or by name
{sizes}
made_up = {{}}
for spec in model.engine.inputs:
    print(spec)  # name, type and shape; ? is a dynamic size
    shape = [sizes[min(axis, 1)] if size is None else size for axis, size in enumerate(spec.shape)]
    made_up[spec.name] = torch.from_numpy(np.ones(shape, spec.dtype))
print(model(**made_up))"""


def write_run_card(record: RunRecord, folder: Path, snippet: str | None = None) -> None:
    """Write the model card of a run with an engine into its folder."""
    if record.engine is not None:
        write_text_atomic(folder / CARD, card_text(_facts(record, folder, snippet)))


def write_layout_card(
    record: RunRecord, folder: Path, client: CardClient, snippet: str, *, of: Literal["engine", "float", "weights"]
) -> None:
    """Write the model card of a layout into its folder.

    ``of``: the layout has the graph of the engine, that of the float engine, or no graph, so that nothing was measured.
    """
    facts = replace(_facts(record, folder, snippet), client=client)
    if of == "weights":
        facts = replace(facts, score=None, figures=())
    elif of == "float":
        facts = replace(facts, score=record.float_score, figures=(), dtype=None, configuration={})
    write_text_atomic(folder / CARD, card_text(facts))


def _facts(record: RunRecord, folder: Path, snippet: str | None) -> CardFacts:
    assert record.engine is not None
    settings = record.config.get("quantizer") or {}
    evaluation = (record.config.get("data") or {}).get("evaluation") or {}
    function = (record.config.get("model") or {}).get("metric")
    latency = record.latency
    return CardFacts(
        name=record.name,
        source=record.model.source,
        task=record.model.task,
        backend=record.engine.backend,
        dtype=settings.get("dtype") if any(site.quantized for site in record.coverage) else None,
        score=record.score,
        dataset=Path(evaluation.get("path") or evaluation.get("name") or function or "evaluation samples").name,
        figures=tuple(_figures(record)),
        machine=str(record.machine.get("cpu") or "an unknown machine"),
        configuration=settings,
        snippet=snippet
        or _SNIPPET.format(
            path=record.engine.path,
            load=loading(folder),
            sizes=_sizes(latency.batch if latency else 8, latency.sequence if latency else None),
        ),
        missed=(
            *record.fixed_sizes,
            *missed_goals(record.fallback.outcome if record.fallback else None, record.latency_fallback),
        ),
    )


def _sizes(batch: int, tokens: int | None) -> str:
    """Return the line of the snippet with the dynamic sizes: samples, and tokens or values of a sample."""
    if tokens:
        return f"sizes = ({batch}, {tokens})  # samples, and tokens or values of a sample"
    return f"sizes = ({batch}, 1)  # samples"


def _figures(record: RunRecord) -> list[str]:
    rows = []
    for timed in filter(None, (record.latency, *record.other_latencies)):
        entries = {entry.name: entry for entry in timed.engines}
        before, after = entries.get("float"), entries.get("engine")
        if before is not None and after is not None:
            shape = text.shape(timed.batch, timed.sequence)
            graph = "" if timed.graph is None else f" of {timed.graph}"
            name = f"median latency{graph}, batch {shape}, threads: {timed.threads}, float is {timed.reference}"
            faster = f"{text.milliseconds(after.median_ms)} ({text.compared(after.ratio_to_float, 'faster', 'slower')})"
            rows.append(figure(name, text.milliseconds(before.median_ms), faster))
    if record.sizes is not None:
        small, large = record.sizes
        rows.append(figure("size", text.file_size(large.bytes), text.size_words(small.bytes, small.ratio)))
    if record.peaks is not None:
        little, much = record.peaks
        lower = text.memory_words(little.peak_mib, little.ratio)
        rows.append(figure("peak memory", f"{much.peak_mib:,.0f} MiB", lower))
    if record.score is not None and record.float_score is not None:
        name = f"{record.score.metric} ({record.score.form})"
        rows.append(figure(name, text.score(record.float_score.value), text.score(record.score.value)))
    return rows
