"""The diagnosis of a run, within it or later: sensitivity, the groups that cost most accuracy, and memory."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from quantizer.algorithms.sensitivity import GroupSensitivity
from quantizer.algorithms.sensitivity.latency_costs import GroupLatency, LatencyCosts
from quantizer.config import AmpConfig, RunConfig, load_run
from quantizer.errors import QuantizerError
from quantizer.pipeline.benchmark import measure_memory
from quantizer.pipeline.context import RunContext, RunExamples
from quantizer.pipeline.job import QUANTIZER
from quantizer.pipeline.latency_fallback import latency_fallback_record
from quantizer.pipeline.load_workload import configured_workload
from quantizer.pipeline.make_record import write_reports
from quantizer.pipeline.model_graphs import FLOAT_STEM, QUANTIZED_STEM
from quantizer.pipeline.open_axes import adopt_axes
from quantizer.pipeline.progress import StageTimer
from quantizer.pipeline.resume import resume_files
from quantizer.pipeline.search_max_drop import measure_sensitivity
from quantizer.quantizer import Quantizer
from quantizer.report import RunRecord, read_record
from quantizer.report.compare import run_folders
from quantizer.report.page import require_html
from quantizer.report.record import LatencyFallback, is_from_python
from quantizer.tasks import Batch, rows_at
from quantizer.utils.batches import in_several
from quantizer.utils.files import require_sole_writer, require_writable
from quantizer.utils.paths import is_file, is_folder

DIAGNOSE = "diagnose"
"""The name of the stage of the diagnosis."""

DIAGNOSED_GROUPS = 3
"""Default number of groups of a diagnosis."""

_BATCHES, _ROWS = 2, 8
"""Number of batches, and of samples per batch, for the diagnosis, which calibrates each tried setting on them."""


def wants_diagnosis(config: RunConfig) -> bool:
    """Return whether a run is diagnosed: if it asks for it, quantizes, and trains nothing."""
    return config.report.diagnose and config.quantize and config.qat is None


def with_diagnosis(
    record: RunRecord,
    context: RunContext,
    quantizer: Quantizer,
    batches: Sequence[Batch],
    num: int = DIAGNOSED_GROUPS,
) -> RunRecord:
    """Return a record with the ``num`` groups that cost most accuracy, or with the error that ended the diagnosis."""

    def measured() -> RunRecord:
        samples = batches[:_BATCHES]
        if context.feed.samples_independent:
            samples = [_beginning(batch) for batch in samples]
        return replace(record, diagnoses=quantizer.diagnose(context.model, samples, num=num).rows)

    with context.timer(DIAGNOSE):
        return _without_loss(record, measured)


def diagnosed(
    record: RunRecord,
    config: RunConfig,
    folder: Path,
    context: RunContext,
    batches: Sequence[Batch],
    num: int = DIAGNOSED_GROUPS,
) -> RunRecord:
    """Diagnose a finished run, rewrite the reports in its folder, and return its record.

    Sensitivity and memory are measured unless the record has them. The saved quantizer is used as it is.

    Args:
        record: the record of the run.
        config: its configuration.
        folder: its folder, with the saved quantizer and the engines.
        context: its model; the timer has no stages yet.
        batches: its calibration batches.
        num: the number of groups.
    """
    quantizer = Quantizer.load(folder / QUANTIZER)
    adopt_axes(context, folder)
    record = replace(record, diagnosis_error=None)
    if record.measure is None:
        before = record
        record = _without_loss(before, lambda: _with_sensitivity(before, config, context, quantizer, batches))
    if record.diagnosis_error is None:
        record = with_diagnosis(record, context, quantizer, batches, num)
    if engines := {} if record.memory else _engines(record, folder):
        record = replace(record, memory=measure_memory(context, config, engines))
    record = replace(record, stages=(*record.stages, *context.timer.done))
    write_reports(record, config.report.formats, folder)
    return record


def diagnose_folder(folder: Path, console: Console) -> RunRecord:
    """Diagnose the run in a folder with its model and data, and return its record; a diagnosed run is only read.

    Raises:
        QuantizerError: the folder contains no run that can be diagnosed, or its model or data cannot be loaded.
    """
    record = _finished_run(folder)
    if record.diagnoses:
        return record
    config, timer = load_run(folder / "config.yaml"), StageTimer(console)
    require_sole_writer(folder)
    require_writable(folder)
    if "html" in config.report.formats:
        require_html()
    # Only calibration samples are needed.
    unused = dict.fromkeys(("head", "tuning", "training", "evaluation", "check"))
    config = config.model_copy(update={"data": config.data.model_copy(update=unused)})
    with resume_files(folder, searches=False, trains=False) as kept:
        try:
            with timer("load model and data"):
                work = configured_workload(config, RunExamples.of(config.data), timer, kept, folder)
        except QuantizerError as error:
            raise QuantizerError(
                f"{folder} cannot be diagnosed, because the model or the data in its config.yaml cannot be loaded "
                f"again: {error}"
            ) from error
        batches = work.graphs.calibration(in_several(work.context.feed.batches, work.examples.calibration))
        return diagnosed(record, config, folder, work.context, batches)


def _finished_run(folder: Path) -> RunRecord:
    """Return the record of the run in a folder; raise if it cannot be diagnosed."""
    if runs := run_folders(folder):
        commands = ", ".join(f"`quantizer diagnose {shlex.quote(str(run))}`" for run in runs)
        raise QuantizerError(f"{folder} is not a run, but contains {len(runs)}; expected one of them: {commands}")
    if not is_file(folder / "report.json"):
        problem = "does not contain report.json" if is_folder(folder) else "is not a folder"
        raise QuantizerError(f"{folder} {problem}; expected the folder of a finished run, such as runs/NAME")
    record = read_record(folder / "report.json")
    reason = None
    if is_from_python(record):
        reason = (
            "its model and data were given in Python, or as an ONNX file; call result.diagnose() in Python, or "
            "quantize again with diagnose=True (`quantizer convert`: --diagnose)"
        )
    elif not record.config["quantize"]:
        reason = "it quantized nothing (quantize: false); run it with quantize: true, or convert with --quantization"
    elif record.config["qat"] is not None:
        reason = (
            "training changed its weights (qat), and the diagnosis needs those of the float model; diagnose a run "
            "without qat, for example with the override ~qat"
        )
    elif not is_folder(folder / QUANTIZER):
        reason = (
            f"{folder / QUANTIZER} is missing; expected the quantizer that the run saved: run the configuration again"
        )
    if reason is not None:
        raise QuantizerError(f"{folder} cannot be diagnosed: {reason}")
    return record


def _with_sensitivity(
    record: RunRecord, config: RunConfig, context: RunContext, quantizer: Quantizer, batches: Sequence[Batch]
) -> RunRecord:
    amp = config.amp or AmpConfig()
    proxy = quantizer.amp(context.model, measure=amp.measure, granularity=amp.granularity)
    measure_sensitivity(context, quantizer, proxy, batches[: amp.batches])
    ranking = quantizer.sensitivity
    latency_fallback = record.latency_fallback and _with_frontier(record.latency_fallback, ranking.rows)
    return replace(record, sensitivity=ranking.rows, measure=ranking.measure, latency_fallback=latency_fallback)


def _with_frontier(times: LatencyFallback, ranking: Sequence[GroupSensitivity]) -> LatencyFallback:
    """Return the latency costs of a run with the plans that a ranking suggests."""
    groups = {
        entry.group: GroupLatency(group=entry.group, low_us=entry.low_us, float_us=entry.float_us)
        for entry in times.groups
    }
    low_us, float_us = 1000 * times.low_ms, 1000 * times.float_ms
    costs = LatencyCosts(groups=groups, low_us=low_us, float_us=float_us, where=times.conditions)
    return replace(times, frontier=latency_fallback_record(costs, ranking, None).frontier)


def _without_loss(record: RunRecord, measured: Callable[[], RunRecord]) -> RunRecord:
    """Return the measured record; after an error, the given record with the error, and warn."""
    try:
        return measured()
    except Exception as error:  # noqa: BLE001 - the result is complete without them: no diagnosis may cost it
        problem = f"{type(error).__name__}: {error}"
    warnings.warn(f"the diagnosis failed; the result is complete without it: {problem}", stacklevel=2)
    return replace(record, diagnosis_error=problem)


def _engines(record: RunRecord, folder: Path) -> Mapping[str, Path]:
    """Return the engine files of a run by name; empty unless both exist and run on this machine."""
    stems = {"float": FLOAT_STEM, "engine": QUANTIZED_STEM}
    files = {name: folder / f"{stem}.engine" for name, stem in stems.items()}
    return files if record.latency is not None and all(map(is_file, files.values())) else {}


def _beginning(batch: Batch) -> Batch:
    return rows_at(batch, range(min(_ROWS, len(next(iter(batch.values()))))))
