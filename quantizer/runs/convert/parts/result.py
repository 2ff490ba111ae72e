"""The result of a conversion of a model in parts, as data for config.json, conversion.json and the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantizer.qdq.structure import Signature
from quantizer.report import Score, collect_versions
from quantizer.runs.convert.folder import FORMAT, processor_folder
from quantizer.runs.convert.inputs import ConversionInputs
from quantizer.runs.convert.measure import ShapeLatency
from quantizer.runs.convert.parts.loaded import MODEL
from quantizer.runs.convert.result import QuantizationSummary
from quantizer.runs.outputs.compare_outputs import OutputCheck


@dataclass(frozen=True, kw_only=True)
class PartResult:
    """One part: its inputs and outputs, its checks, and its latency at each shape.

    Attributes:
        serving: the files for servers, by what they are.
    """

    name: str
    signature: Signature
    serving: Mapping[str, str]
    checks: tuple[OutputCheck, ...]
    latency: tuple[ShapeLatency, ...]


@dataclass(frozen=True)
class Agreement:
    """Texts that a model wrote beside those of the float model, on samples that calibrated nothing where there are.

    Attributes:
        rows: their number.
        tokens: the share of places with the same token.
        texts: the share of rows with the same tokens.
    """

    rows: int
    tokens: float
    texts: float


@dataclass(frozen=True)
class WholeLatency:
    """The time to write a number of tokens for a batch, reading included.

    Attributes:
        tokens: how many tokens were written for each row, whatever they are.
        latency: the times of all models and engines.
    """

    tokens: int
    latency: ShapeLatency


@dataclass(frozen=True, kw_only=True)
class PartsResult:
    """The engines of one backend, with their checks, latency and scores.

    Attributes:
        compute_capability: the GPUs that they were built for ahead of time; None: those of this machine, or a CPU.
        not_verified: the reason why they were not run here; None: they ran and were checked.
        chosen_on: the CPU's instruction sets on which they were the fastest; None: they were asked for.
        tolerance: the condition on their outputs.
        steps: the checks of the logits at each token of a text that is read one by one.
        agreement: the texts of each model beside the float model's in PyTorch, by the name of the model.
        whole: the time of a whole text; None: they do not run here.
    """

    backend: str
    compute_capability: str | Sequence[str] | None
    not_verified: str | None
    inference_precision: str | None
    quantization: QuantizationSummary | None
    tolerance: str
    tokens: int
    chosen_on: str | None
    parts: tuple[PartResult, ...]
    steps: tuple[OutputCheck, ...]
    agreement: Mapping[str, Agreement]
    whole: WholeLatency | None
    scores: tuple[Score, ...] = ()


def parts_config(facts: ConversionInputs, result: PartsResult) -> dict[str, Any]:
    """Return the content of config.json: first what a server needs, then how the engines were made."""
    processor = processor_folder(facts.task)
    return {
        "format": FORMAT,
        "name": facts.name,
        "task": facts.task,
        "backend": result.backend,
        "compute_capability": result.compute_capability,
        "inference_precision": result.inference_precision,
        "files": {"model": MODEL, processor: processor},
        "parts": {
            part.name: {
                "onnx": str(Path(MODEL) / f"{part.name}.onnx"),
                "engine": f"{part.name}.engine",
                **part.serving,
                "inputs": [asdict(value) for value in part.signature.inputs],
                "outputs": [asdict(value) for value in part.signature.outputs],
                "checks": [asdict(check) for check in part.checks],
            }
            for part in result.parts
        },
        "dimensions": {name: list(sizes) for name, sizes in facts.dimensions.items()},
        "max_length": None if facts.sequence is None else facts.sequence[2],
        "seconds": facts.seconds,
        "tokens": result.tokens,
        "labels": [],
        "chosen_on": result.chosen_on,
        "quantization": None if result.quantization is None else asdict(result.quantization),
        "verified": result.not_verified or f"outputs agree with PyTorch's: {result.tolerance}; see checks",
        "generated": {
            "checks": [asdict(check) for check in result.steps],
            "agreement": {name: asdict(one) for name, one in result.agreement.items()},
        },
        "versions": collect_versions(),
    }
