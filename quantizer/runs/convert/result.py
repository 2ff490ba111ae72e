"""The result of a conversion as data, for config.json, conversion.json and the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quantizer.common.records import BudgetOutcome, EngineCheck
from quantizer.qdq.structure import Signature
from quantizer.quantizer import Quantizer
from quantizer.report import Score, collect_versions
from quantizer.runs.convert.folder import ENGINE, FORMAT, ONNX, processor_folder
from quantizer.runs.convert.inputs import ConversionInputs
from quantizer.runs.convert.measure import ShapeLatency
from quantizer.runs.outputs.compare_outputs import OutputCheck
from quantizer.runs.outputs.right_engine import OnlySizes
from quantizer.sensitivity.fallback import budget_outcome, fallback_reason


@dataclass(frozen=True, kw_only=True)
class QuantizationSummary:
    """The quantization for one backend, in figures.

    Attributes:
        dtype: the number format.
        ranges: where those of activations come from, ``static`` (calibration) or ``dynamic`` (each run).
        sites: the number of quantized sites and of sites that ran in calibration, by kind.
        multiply_adds: the share of multiply-adds in low precision; None: none were counted.
        put_back: the groups of sites that fell back to float.
        reason: the reason for the choice of these groups; None if none fell back.
        budget: the engines that were checked against ``max_drop``, the last of them delivered; empty if none was.
        outcome: whether ``max_drop`` is met in the end; None: there was none.
        calibration: the source of the calibration data.
        rows: the number of its texts or images that were used.
    """

    dtype: str
    ranges: str
    sites: dict[str, tuple[int, int]]
    multiply_adds: float | None
    put_back: tuple[str, ...]
    reason: str | None
    budget: tuple[EngineCheck, ...]
    outcome: BudgetOutcome | None
    calibration: str
    rows: int


@dataclass(frozen=True, kw_only=True)
class BackendResult:
    """One engine, with its output checks, latency and scores.

    Attributes:
        chosen_on: the CPU's instruction sets on which this engine was the fastest; None: it was asked for.
        not_verified: the reason why the engine was not run here; None: it ran and was checked.
        tolerance: the condition on its outputs.
        serving: the files for servers.
        sizes: the sizes that the engine takes alone, in a sentence; None: it takes all.
        only_sizes: these; empty: it takes all.
    """

    backend: str
    float_dtype: str
    compute_capability: str | None
    inference_precision: str | None
    quantization: QuantizationSummary | None
    signature: Signature
    serving: Mapping[str, str]
    engine_bytes: int
    chosen_on: str | None
    not_verified: str | None
    tolerance: str
    sizes: str | None = None
    only_sizes: OnlySizes = ()
    checks: tuple[OutputCheck, ...] = ()
    latency: tuple[ShapeLatency, ...] = ()
    scores: tuple[Score, ...] = ()


def quantization_facts(
    quantizer: Quantizer, checks: Sequence[EngineCheck], scores: Sequence[Score], calibration: str, rows: int
) -> QuantizationSummary:
    """Return the figures of a calibrated quantizer, and of the checks and scores of its engines against a budget."""
    coverage, chosen = quantizer.coverage, quantizer.chosen_fallback
    told = [row for row in coverage if row.ran and not row.quiet]
    every, quantized = (Counter(row.kind for row in some) for some in (told, [row for row in told if row.quantized]))
    return QuantizationSummary(
        dtype=quantizer.config.dtype,
        ranges=quantizer.config.activations.ranges,
        sites={kind: (quantized[kind], count) for kind, count in every.items()},
        multiply_adds=coverage.share,
        put_back=() if chosen is None else chosen.groups,
        reason=None if chosen is None else fallback_reason(chosen),
        budget=tuple(checks),
        outcome=None if chosen is None else budget_outcome(chosen, None, checks, scores),
        calibration=calibration,
        rows=rows,
    )


def backend_config(facts: ConversionInputs, result: BackendResult) -> dict[str, Any]:
    """Return the content of config.json: first what a server needs, then how the engine was made."""
    return {
        "format": FORMAT,
        "name": facts.name,
        "task": facts.task,
        "backend": result.backend,
        "compute_capability": result.compute_capability,
        "inference_precision": result.inference_precision,
        "files": {
            "onnx": ONNX,
            "engine": ENGINE,
            (processor := processor_folder(facts.task)): processor,
            **result.serving,
        },
        "inputs": [asdict(value) for value in result.signature.inputs],
        "outputs": [asdict(value) for value in result.signature.outputs],
        "dimensions": {name: list(sizes) for name, sizes in facts.dimensions.items()},
        "only_sizes": [dict(sizes) for sizes in result.only_sizes],
        "max_length": None if facts.sequence is None else facts.sequence[2],
        "seconds": facts.seconds,
        "labels": list(facts.labels),
        "float_dtype": result.float_dtype,
        "chosen_on": result.chosen_on,
        "quantization": None if result.quantization is None else asdict(result.quantization),
        "verified": result.not_verified or f"outputs agree with PyTorch's: {result.tolerance}; see checks",
        "checks": [asdict(check) for check in result.checks],
        "versions": collect_versions(),
    }
