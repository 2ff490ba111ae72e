"""The model card of a converted model in parts, beside its engines."""

from __future__ import annotations

from pathlib import Path

from quantizer.common.records import quantized_score
from quantizer.report import collect_machine, text
from quantizer.report.codec import write_text_atomic
from quantizer.report.model_card import CARD, CardFacts, card_text, figure, loading
from quantizer.runs.convert.inputs import ConversionInputs
from quantizer.runs.convert.measure import ShapeLatency
from quantizer.runs.convert.parts.result import PartsResult
from quantizer.tasks import tasks

_SAMPLE = {"text": "a text", "audio": "a-recording.wav"}
_SNIPPET = """\
from quantizer.runs.convert import load_converted

model = load_converted({load})
print(model.generate({samples}))"""


def write_card(facts: ConversionInputs, result: PartsResult, evaluation: str | None, folder: Path) -> None:
    """Write the model card of one backend into its folder; see ``quantizer.runs.convert.card.write_card``."""
    scored = quantized_score(result.scores)
    found = [_figure(f"{part.name}, {shape}", shape) for part in result.parts for shape in part.latency]
    if (whole := result.whole) is not None:
        found.append(_figure(f"{whole.tokens} tokens in all, {whole.latency}", whole.latency))
    reference = next((entry for entry in result.scores if entry.which == "float"), None)
    if scored is not None and reference is not None:
        found.append(figure(scored.metric, text.score(reference.value), text.score(scored.value)))
    samples = [_SAMPLE[tasks[facts.task].reads]] * max(facts.batch[0], 1)
    card = CardFacts(
        name=f"{facts.name} for {result.backend}",
        source=facts.source,
        task=facts.task,
        backend=result.backend,
        dtype=None if result.quantization is None else result.quantization.dtype,
        score=scored,
        dataset=Path(evaluation).name if evaluation else "evaluation rows",
        figures=tuple(found),
        machine=str(collect_machine()["cpu"]),
        configuration={},
        snippet=_SNIPPET.format(load=loading(folder), samples=samples),
        missed=(),
    )
    write_text_atomic(folder / CARD, card_text(card))


def _figure(title: str, shape: ShapeLatency) -> str:
    names = list(shape.milliseconds)
    before, after = shape.milliseconds[names[-2]], shape.milliseconds[names[-1]]
    times = text.milliseconds(before), text.milliseconds(after)
    return figure(f"latency, {title} ({names[-2]} against engine)", *times, before / after)
