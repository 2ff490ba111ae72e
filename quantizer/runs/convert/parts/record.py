"""The report of a converted model in parts: the record that ``quantizer run`` writes, of the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from quantizer.engines import InputSizes, observe_engine
from quantizer.quantizer import Quantizer
from quantizer.report import RunRecord, collect_machine, collect_versions
from quantizer.report.record import EngineChoice, Latency, OutputDistance, latency_entries, size_entries
from quantizer.runs.convert.choose import PYTORCH
from quantizer.runs.convert.parts.loaded import MODEL
from quantizer.runs.convert.parts.part_maker import PartMaker, PartsMade
from quantizer.runs.convert.parts.result import PartsResult, WholeLatency
from quantizer.runs.measure import engine_file
from quantizer.runs.outputs.compare_outputs import distances_of, output_distances
from quantizer.runs.plan_records import site_records
from quantizer.tasks.seq2seq.parts import WITH_PAST, parts_of


def parts_record(
    maker: PartMaker,
    made: PartsMade,
    plain: PartsMade | None,
    result: PartsResult,
    quantizer: Quantizer,
    *,
    folder: Path,
    choice: EngineChoice | None,
) -> RunRecord:
    """Return the record of quantized engines: outputs of all parts, the time of a whole text, and the step's layers."""
    asked, facts, context, coverage = maker.asked, maker.facts, maker.context, quantizer.coverage
    step = replace(made.parts[WITH_PAST].built, path=Path(f"{WITH_PAST}.engine"))
    batch, sequence = facts.shapes[facts.usual]
    pair = {} if plain is None else {"float": plain, "engine": made}
    reference = PYTORCH if plain is None else plain.variant.name
    return RunRecord(
        name=f"{facts.name} for {result.backend}",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        config=asked.described(made.variant, quantizer),
        model=context.info(facts.source, facts.task),
        scores=result.scores,
        outputs=tuple(_outputs_of_proxy(maker, made) if made.model is None else _outputs(result, batch, sequence)),
        latency=None if result.whole is None else _latency(result.whole, asked.threads, reference),
        size=size_entries({name: _bytes(one) for name, one in pair.items()}) if pair else (),
        coverage=site_records(coverage),
        covered_share=coverage.share,
        escaped=coverage.escaped.rows,
        choice=choice,
        engine=engine_file(result.backend, step, ran=made.model is not None, scored=bool(result.scores)),
        inspection=observe_engine(
            result.backend,
            folder / step.path,
            folder / MODEL / f"{WITH_PAST}.onnx",
            threads=asked.threads,
            sizes=InputSizes(batch, sequence or batch),
            required=False,
        ),
        diff=quantizer.diff(context.model),
        versions=collect_versions(),
        machine=collect_machine(),
        stages=tuple(context.timer.done),
    )


def _outputs(result: PartsResult, batch: int, sequence: int | None) -> Iterator[OutputDistance]:
    """Yield how far the outputs of all parts are from the float model's, at the usual shape."""
    for name, checks in [*((part.name, part.checks) for part in result.parts), ("token by token", result.steps)]:
        shapes = list(dict.fromkeys((check.batch, check.sequence) for check in checks if check.batch == batch))
        # A decoder reads tokens of its own, whose number is not that of the text that is read.
        shape = (batch, sequence) if (batch, sequence) in shapes else shapes[0]
        usual = [check for check in checks if (check.batch, check.sequence) == shape]
        named = [replace(check, output=f"{name}: {check.output}") for check in usual]
        yield from distances_of(named, engine=True)


def _outputs_of_proxy(maker: PartMaker, made: PartsMade) -> Iterator[OutputDistance]:
    """Yield how far the outputs of the parts of the proxy are from the float model's, at the usual shape."""
    assert made.quantized is not None
    batches = maker.checked_on[maker.facts.usual].parts
    for name, module in parts_of(made.quantized).items():
        for one in output_distances(maker.parts[name], module, None, [batches[name]]):
            yield replace(one, output=f"{name}: {one.output}")


def _latency(whole: WholeLatency, threads: int, reference: str) -> Latency:
    """Return the time of a whole text in the engines, and in those of the float model or, if they failed, PyTorch."""
    shape = whole.latency
    *_, plain, low = shape.milliseconds
    entries = latency_entries(shape.named({plain: "float", low: "engine"}).times_ms)
    return Latency(batch=shape.batch, sequence=shape.sequence, threads=threads, reference=reference, engines=entries)


def _bytes(made: PartsMade) -> int:
    return sum(part.built.size_bytes for part in made.parts.values())
