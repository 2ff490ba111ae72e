"""The command ``quantizer convert``: from a checkpoint to ONNX files and engines, checked against PyTorch and timed.

The output folder is complete or absent: it is filled under a temporary name and renamed at the end.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from quantizer.engines import BuildOptions
from quantizer.engines import BuildResult
from quantizer.engines import Engine
from quantizer.engines import load_engine
from quantizer.engines import runs_here
from quantizer.export import export_onnx
from quantizer.files import said_complete
from quantizer.files import write_folder
from quantizer.qdq.signature import read_signature
from quantizer.quantizer import Quantizer
from quantizer.report import Score
from quantizer.report import collect_machine
from quantizer.report import collect_versions
from quantizer.report.record import EngineCheck
from quantizer.runs.convert.compare_outputs import Reference
from quantizer.runs.convert.compare_outputs import Tolerance
from quantizer.runs.convert.compare_outputs import check_engine
from quantizer.runs.convert.compare_outputs import reference_outputs
from quantizer.runs.convert.compare_outputs import tolerance
from quantizer.runs.convert.data import Samples
from quantizer.runs.convert.data import read_calibration
from quantizer.runs.convert.data import read_labelled
from quantizer.runs.convert.folder import CONFIG
from quantizer.runs.convert.folder import ENGINE
from quantizer.runs.convert.folder import ONNX
from quantizer.runs.convert.folder import processor_folder
from quantizer.runs.convert.folder import write_json
from quantizer.runs.convert.inputs import ConversionInputs
from quantizer.runs.convert.inputs import conversion_inputs
from quantizer.runs.convert.measure import ShapeLatency
from quantizer.runs.convert.measure import measure_latency
from quantizer.runs.convert.request import CONVERSION
from quantizer.runs.convert.request import ConversionRequest
from quantizer.runs.convert.result import BackendResult
from quantizer.runs.convert.result import backend_config
from quantizer.runs.convert.result import quantization_facts
from quantizer.runs.convert.summary import print_result
from quantizer.runs.convert.summary import print_summary
from quantizer.runs.engine_budget import EngineBudget
from quantizer.runs.preflight import check_rows
from quantizer.runs.preflight import require_tools
from quantizer.runs.run_context import ResumeFiles
from quantizer.runs.run_context import StageTimer
from quantizer.runs.run_context import load_context
from quantizer.runs.run_context import predict
from quantizer.runs.run_context import resume_files
from quantizer.runs.run_context import score_record
from quantizer.runs.search import measure_sensitivity
from quantizer.runs.search import search_fallback
from quantizer.runs.task_metric import TaskMetric
from quantizer.targets import profile
from quantizer.tasks import Predictions

__all__ = ["convert"]

_AMP_BATCHES = 4
_RESAMPLES = 1000


def convert(asked: ConversionRequest, console: Console) -> Path:
    """Carry out a conversion, and return the folder that was written.

    Args:
        console: where stages and results are printed.

    Raises:
        QuantizerError: a stage failed; nothing was written.
    """
    folder = asked.output.absolute()
    # Data first: reading it is fast, and a mistake in it should be reported before the model is loaded.
    data = None if asked.calibration is None else read_calibration(asked.calibration, asked.rows, asked.column)
    facts = conversion_inputs(asked, folder.name)
    results: list[BackendResult] = []
    with resume_files(folder, searches=asked.max_drop is not None, trains=False) as kept:
        write_folder(
            folder,
            lambda target: results.extend(_Run(asked, facts, data, target, kept, console).run()),
            kind=CONVERSION,
            replace=asked.force,
        )
    with said_complete(folder):
        print_summary(facts, results, folder, console)
    return folder


class _Run:
    """One conversion in progress; ``target`` is the folder that is being filled."""

    def __init__(
        self,
        asked: ConversionRequest,
        facts: ConversionInputs,
        data: Samples | None,
        target: Path,
        kept: ResumeFiles,
        console: Console,
    ) -> None:
        self.asked = asked
        self.facts = facts
        self.target = target
        self.console = console
        self.stage = StageTimer(console)
        self.tuning = read_labelled(asked.tuning, "--tuning")
        self.evaluation = read_labelled(asked.evaluation, "--evaluation")
        with self.stage("load the model"):
            sizes = facts.sequence
            lengths = {} if sizes is None else {"min_length": sizes[0], "max_length": sizes[2]}
            self.context = load_context(
                self.stage,
                kept,
                target,
                asked.model,
                facts.task,
                # An ONNX file and an engine for each backend, in which integers take a quarter.
                copies=len(asked.backends) / (2 if asked.quantization else 1),
                needed_for="what is written for this model",
                sizes={"batch_size": facts.batch[1], **lengths},
            )
        self.model, self.task = self.context.model, self.context.task
        # Errors that would otherwise come after minutes of calibration.
        require_tools({name: self._options(name) for name in asked.backends}, html=False)
        check_rows(self.task, [*self.tuning, *self.evaluation], [] if data is None else data.rows)
        self.calibration, held_out = ([], []) if data is None else data.of(self.task)
        self.batches = self.task.sample_batches(self.calibration)
        self.check_batches = [self.task.inputs.filled(held_out or self.calibration, *shape) for shape in facts.shapes]
        self.float_predictions: Predictions | None = None

    def run(self) -> list[BackendResult]:
        """Carry out all stages, in order."""
        asked = self.asked
        quantizers = self._quantizers() if asked.quantization else dict.fromkeys(asked.backends)
        # In the folder itself, so that after a kill both are removed together.
        with tempfile.TemporaryDirectory(dir=self.target) as scratch:
            results = [self._backend(name, quantizers[name], Path(scratch)) for name in asked.backends]
        document = {
            "model": asdict(self.facts),
            "backends": [asdict(result) for result in results],
            "stages": [asdict(stage) for stage in self.stage.done],
            "versions": collect_versions(),
            "machine": collect_machine(),
        }
        write_json(self.target / "conversion.json", document)
        return results

    def _quantizers(self) -> Mapping[str, Quantizer]:
        """Return a quantizer for each backend, all of them from one calibration."""
        first, *others = self.asked.backends
        quantizer = Quantizer(backend=first, dtype=self.asked.dtype or "int8")
        with self.stage(f"calibrate on {len(self.calibration)} {self.task.reads}s"):
            quantizer.calibrate(self.model, self.batches)
            quantizer.save(self.target / "quantizer")
        return {first: quantizer, **{name: quantizer.for_backend(name) for name in others}}

    def _backend(self, name: str, quantizer: Quantizer | None, scratch: Path) -> BackendResult:
        """Quantize, export, build and check for one backend, and return the results."""
        folder = self.target / name
        folder.mkdir()
        self.console.print(f"[bold]{name}[/bold]")
        float_dtype, quantized, facts = profile(name).torch_dtype, None, None
        if quantizer is None:
            with self.stage("export"):
                self._export_float(name, folder / ONNX, float_dtype)
            built = self._built(name, folder)
        else:
            quantized, built, checks = self._quantized(name, quantizer, folder)
            facts = quantization_facts(quantizer, checks, str(self.asked.calibration), len(self.calibration))
        self.context.processor.save_pretrained(folder / processor_folder(self.facts.task))
        seen = self._seen(name, built, quantized, float_dtype, scratch) if runs_here(name) else {}
        result = BackendResult(
            backend=name,
            float_dtype=profile(name).float_dtype,
            compute_capability=self._capability(name),
            inference_precision=self._precision(name),
            quantization=facts,
            signature=read_signature(folder / ONNX),
            onnx_bytes=(folder / ONNX).stat().st_size,
            engine_bytes=built.size_bytes,
            build_seconds=built.seconds,
            not_verified=None if seen else "not verified: built ahead of time, and there is no GPU here",
            tolerance=str(self._tolerance(name, quantized, float_dtype)),
            **seen,
        )
        write_json(folder / CONFIG, backend_config(self.facts, result))
        print_result(result, self.console)
        return result

    def _quantized(
        self, name: str, quantizer: Quantizer, folder: Path
    ) -> tuple[nn.Module, BuildResult, list[EngineCheck]]:
        """Quantize, export and build, with ``max_drop`` again until the engine meets it, too.

        Return the frozen proxy, the engine, and the checks of engines against ``max_drop``.
        """
        allowed, amp = self.asked.max_drop, None
        budget = EngineBudget(self.context, allowed, self.tuning, checked=runs_here(name))
        read = (self.facts.source, self.facts.task, self.facts.batch[1], self.facts.sequence)
        metric = TaskMetric(read, self.task, budget.searched, [], self.stage.tell)
        while True:
            if allowed is not None:
                if amp is None:
                    amp = quantizer.amp(self.model)
                    measure_sensitivity(self.context, quantizer, amp, self.batches[:_AMP_BATCHES])
                search_fallback(self.context, quantizer, amp, metric, allowed)
            with self.stage("quantize"):
                quantized = quantizer.quantize(self.model)
            with self.stage("export"):
                quantizer.export(quantized, folder / ONNX, self.task.example())
            built, chosen = self._built(name, folder), quantizer.chosen_fallback
            checked = load_engine(name, built.path, threads=self.asked.threads) if runs_here(name) else None
            allowed = budget.next_drop(checked, 0 if chosen is None else len(chosen.groups))
            if allowed is None:
                return quantized, built, budget.checks

    def _built(self, name: str, folder: Path) -> BuildResult:
        with self.stage("build the engine"):
            return self._build(name, folder / ONNX, folder / ENGINE)

    def _seen(
        self, name: str, built: BuildResult, quantized: nn.Module | None, float_dtype: torch.dtype, scratch: Path
    ) -> dict[str, Any]:
        """Return the checks, latency and scores of an engine that runs here."""
        engine = load_engine(name, built.path, threads=self.asked.threads)
        bound = self._tolerance(name, quantized, float_dtype)
        with self.stage("check the outputs against PyTorch"):
            plain = reference_outputs(self.model, self.check_batches, engine.output_names)
            expected: list[Reference] = plain
            if quantized is not None:
                expected = reference_outputs(quantized, self.check_batches, engine.output_names)
            checks = check_engine(engine, expected, plain, bound)
        models: dict[str, nn.Module | Engine] = {"PyTorch float": self.model}
        if quantized is None:
            models["engine"] = engine
        else:
            models["float engine"] = self._float_engine(name, float_dtype, scratch)
            models["engine"] = engine
        latency = self._latency(models)
        return {"checks": tuple(checks), "latency": latency, "scores": self._scored(engine, quantized)}

    def _latency(self, models: Mapping[str, nn.Module | Engine]) -> tuple[ShapeLatency, ...]:
        with self.stage("measure latency"):
            return tuple(measure_latency(models, batch, self.asked.threads) for batch in self.check_batches)

    def _scored(self, engine: Engine, quantized: nn.Module | None) -> tuple[Score, ...]:
        """Return the task's scores of the float model, the proxy and the engine on the evaluation rows."""
        if not self.evaluation:
            return ()
        if self.float_predictions is None:
            self.float_predictions = self._predict("float model", self.model)
        scores = [self._score("float", self.float_predictions)]
        if quantized is not None:
            scores.append(self._score("proxy", self._predict("proxy", quantized)))
        scores.append(self._score("engine", self._predict("engine", engine)))
        return tuple(scores)

    def _predict(self, which: str, model: nn.Module | Engine) -> Predictions:
        return predict(self.context, which, model, self.evaluation)

    def _score(self, which: str, predictions: Predictions) -> Score:
        base = self.float_predictions or predictions
        return score_record(which, self.task, base, predictions, self.evaluation, _RESAMPLES)

    def _float_engine(self, name: str, float_dtype: torch.dtype, scratch: Path) -> Engine:
        """Return the float model's engine, to compare with; its file is not kept."""
        onnx = scratch / f"{str(float_dtype).removeprefix('torch.')}-{profile(name).opset}.onnx"
        with self.stage("build the float engine, to compare with"):
            if not onnx.exists():
                self._export_float(name, onnx, float_dtype)
            built = self._build(name, onnx, scratch / f"{name}.engine")
        return load_engine(name, built.path, threads=self.asked.threads)

    def _export_float(self, name: str, path: Path, dtype: torch.dtype) -> None:
        export_onnx(self.model, path, self.task.example(), opset=profile(name).opset, dtype=dtype)

    def _build(self, name: str, onnx: Path, engine: Path) -> BuildResult:
        return self.stage.build(name, onnx, engine, self._options(name))

    def _options(self, name: str) -> BuildOptions:
        return BuildOptions(
            dynamic=self.facts.dimensions,
            compute_capability=self._capability(name),
            inference_precision=self._precision(name),
        )

    def _capability(self, name: str) -> str | None:
        return self.asked.compute_capability if profile(name).capabilities else None

    def _precision(self, name: str) -> str | None:
        return self.asked.inference_precision if profile(name).inference_precisions else None

    def _tolerance(self, name: str, quantized: nn.Module | None, float_dtype: torch.dtype) -> Tolerance:
        """Return the tolerance of an engine, by the precision in which it computes floats."""
        told = self._precision(name)
        return tolerance(
            self.asked.tolerance, quantized is not None, float_dtype if told is None else getattr(torch, told)
        )
