"""The model card of a converted model, beside its engine."""

from __future__ import annotations

from pathlib import Path

from quantizer.common.records import quantized_score
from quantizer.report import collect_machine, text
from quantizer.report.codec import write_text_atomic
from quantizer.report.model_card import CARD, CardFacts, card_text, figure, loading
from quantizer.report.verdict import missed_goals
from quantizer.runs.convert.inputs import ConversionInputs
from quantizer.runs.convert.result import BackendResult
from quantizer.tasks import tasks

_SAMPLE = {"text": "a text", "image": "an-image.png", "audio": "a-recording.wav"}
_SNIPPET = """\
from quantizer.runs.convert import load_converted

model = load_converted({load})
samples = {samples}
print(model{call}(samples))"""


def write_card(facts: ConversionInputs, result: BackendResult, evaluation: str | None, folder: Path) -> None:
    """Write the model card of one backend into its folder."""
    fewest = max(min((sizes["batch"] for sizes in result.only_sizes if "batch" in sizes), default=facts.batch[0]), 1)
    sample = _SAMPLE[tasks[facts.task].reads]
    labelled = len(facts.labels) > 1 and tasks[facts.task].labels == "row"
    card = CardFacts(
        name=f"{facts.name} for {result.backend}",
        source=facts.source,
        task=facts.task,
        backend=result.backend,
        dtype=None if result.quantization is None else result.quantization.dtype,
        score=quantized_score(result.scores),
        dataset=Path(evaluation).name if evaluation else "evaluation rows",
        figures=tuple(_figures(result)),
        machine=str(collect_machine()["cpu"]),
        configuration={},
        snippet=_SNIPPET.format(load=loading(folder), samples=[sample] * fewest, call=".labels" if labelled else ""),
        missed=(
            *(() if result.sizes is None else (result.sizes,)),
            *(() if result.quantization is None else missed_goals(result.quantization.outcome, None)),
        ),
    )
    write_text_atomic(folder / CARD, card_text(card))


def _figures(result: BackendResult) -> list[str]:
    found = []
    for shape in result.latency:
        names = list(shape.milliseconds)
        before, after = shape.milliseconds[names[-2]], shape.milliseconds[names[-1]]
        times = text.milliseconds(before), text.milliseconds(after)
        found.append(figure(f"latency, {shape} ({names[-2]} against engine)", *times, before / after))
    scored = quantized_score(result.scores)
    reference = next((entry for entry in result.scores if entry.which == "float"), None)
    if scored is not None and reference is not None:
        found.append(figure(scored.metric, text.score(reference.value), text.score(scored.value)))
    return found
