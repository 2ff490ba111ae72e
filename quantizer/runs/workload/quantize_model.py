"""``quantize_model``: a module and its data, to an engine that was chosen, checked and timed, in one call."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Callable
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from quantizer.common.data.batches_of import batches_of
from quantizer.config import AmpConfig
from quantizer.config import DataConfig
from quantizer.config import DatasetConfig
from quantizer.config import EngineConfig
from quantizer.config import ExportConfig
from quantizer.config import ModelConfig
from quantizer.config import QuantizerConfig
from quantizer.config import ReportConfig
from quantizer.config import RunConfig
from quantizer.config import quantizer_config
from quantizer.config.schema import DynamicConfig
from quantizer.errors import QuantizerError
from quantizer.proxy.build import is_proxy
from quantizer.runs.progress.stage_timer import StageTimer
from quantizer.runs.run import carry_out
from quantizer.runs.run_context import ResumeFiles
from quantizer.runs.run_context import RunContext
from quantizer.runs.run_context import RunRows
from quantizer.runs.workload.function_scorer import FunctionScorer
from quantizer.runs.workload.module_feed import ModuleFeed
from quantizer.runs.workload.module_feed import named_batches
from quantizer.runs.workload.quantized_model import QuantizedModel
from quantizer.runs.workload.workload import Workload
from quantizer.targets import AUTO
from quantizer.tasks import Batch
from quantizer.tasks import batch_shape
from quantizer.tasks import rows_at

__all__ = ["quantize_model"]

_TASK = "module"
"""The word in a record for the task of a module that was given in Python."""

_SENSITIVITY_BATCHES = 2
_LARGEST_BATCH = 32


def quantize_model(
    model: nn.Module | str | os.PathLike[str],
    data: Any,
    *,
    score: Callable[[nn.Module], float] | None = None,
    higher_is_better: bool = True,
    rows: int | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | QuantizerConfig | None = None,
    threads: int = 1,
    progress: bool | None = None,
    **settings: Any,
) -> QuantizedModel:
    """Quantize a module for the fastest engine that is right on this machine, and measure what came of it.

    The model is calibrated once. The engines for this CPU are built of it in INT8 and in float, their outputs are
    compared with the model's, and they are timed in turns at the shape of the first batch; the fastest is kept, beside
    the fastest in float of its backend. The model itself never changes.

    Args:
        model: the float model, in eval mode, whose ``forward`` names its arguments; or the path of a float ONNX file,
            see ``from_onnx``.
        data: what to calibrate on, 128 rows or more of what the model will see: a loader or another iterable of
            batches, with labels or without, a ``Dataset``, a tensor or an array, as ``Quantizer.calibrate`` takes it.
            The rows of a batch lie along axis 0.
        score: takes the model, or a module that runs an engine and is called as the model is, and returns its score;
            None: the outputs alone are compared.
        higher_is_better: whether a higher score is better.
        rows: how many rows of the data are read; None: all, and at most 4,096 of a loader that states no length.
        config: as for ``Quantizer``; without a backend in it or in ``settings`` it is ``auto``, the fastest.
        threads: the threads that an engine on a CPU runs with.
        progress: whether stages are printed; None: only in a terminal.
        settings: fields of the configuration, such as ``backend="openvino"`` or ``exclude={"names": ["head"]}``.

    Raises:
        ConfigError: the configuration has problems; all of them are listed.
        CalibrationError: there is no data, or a batch does not fit the model.
        QuantizerError: an ONNX file cannot be read, the model cannot be exported, or no engine is right and runs here.
    """
    model = _float_model(model)
    asked = quantizer_config(config, **settings)
    if "backend" not in asked.model_fields_set:
        asked = quantizer_config(config, backend=AUTO, **settings)
    batches = named_batches(model, map(_without_label, batches_of(model, data, rows)))
    # What is returned in train mode, dropout and all, is nothing to compare with; engines run on the CPU.
    is_ready = not any(module.training for module in model.modules()) and not _elsewhere(model)
    plain = model if is_ready else copy.deepcopy(model).cpu().eval()
    console = Console(stderr=True)
    console.quiet = not (console.is_terminal if progress is None else progress)
    wanted, output = _run_config(model, batches, asked, threads), _output(plain, batches[0])
    parent = Path(tempfile.mkdtemp(prefix="quantizer-"))
    try:
        folder = parent / type(model).__name__
        scorer = partial(FunctionScorer, function=score, output=output, higher_is_better=higher_is_better)
        work = partial(_workload, plain, wanted.model.source, batches, scorer)
        return QuantizedModel(plain, output, carry_out(wanted, folder, False, console, work), folder)
    except BaseException:
        shutil.rmtree(parent)
        raise


def _float_model(model: Any) -> nn.Module:
    """Return a float module: the one that was given, or that of an ONNX file."""
    if isinstance(model, str | os.PathLike) and os.fspath(model).endswith(".onnx"):
        # Imported here: a module needs none of it.
        from quantizer.interop.onnx.from_onnx import from_onnx

        return from_onnx(model)
    if not isinstance(model, nn.Module) or is_proxy(model):
        what = "a proxy; pass the float model that it was made from" if isinstance(model, nn.Module) else repr(model)
        hint = ", where a file would end in .onnx" if isinstance(model, str | os.PathLike) else ""
        raise QuantizerError(f"quantize_model() takes a float model, a torch.nn.Module, and this is {what}{hint}")
    return model


def _without_label(batch: Any) -> Any:
    """Return a batch without the labels that a transformers model would compute a loss of."""
    if not hasattr(batch, "keys"):
        return batch
    return {name: batch[name] for name in batch if name not in ("label", "labels")}


def _elsewhere(model: nn.Module) -> bool:
    return any(parameter.device.type != "cpu" for parameter in model.parameters())


def _run_config(model: nn.Module, batches: list[Batch], asked: QuantizerConfig, threads: int) -> RunConfig:
    """Return the configuration of a run whose model and rows are objects, with the shapes of the batches."""
    sizes, lengths = zip(*(batch_shape(batch) for batch in batches), strict=True)
    tokens = [length for length in lengths if length is not None] or [1]
    # Neither is read from anywhere: they are what the record of the run says of them.
    rows = DatasetConfig.model_construct(name="given in Python", rows=sum(sizes))
    source = f"{type(model).__module__}:{type(model).__qualname__}"
    return RunConfig(
        model=ModelConfig.model_construct(source=source, task=_TASK, max_length=max(tokens)),
        data=DataConfig.model_construct(calibration=rows, evaluation=rows, batch_size=sizes[0]),
        quantizer=asked,
        amp=AmpConfig(batches=_SENSITIVITY_BATCHES),
        export=ExportConfig(
            dynamic=DynamicConfig(
                batch=(1, sizes[0], max(_LARGEST_BATCH, *sizes)), sequence=(min(tokens), tokens[0], max(tokens))
            )
        ),
        engine=EngineConfig(threads=threads),
        report=ReportConfig(latency_batch=sizes[0], latency_sequence=tokens[0]),
    )


def _workload(
    model: nn.Module,
    source: str,
    batches: list[Batch],
    scorer: Callable[[RunContext], FunctionScorer],
    timer: StageTimer,
    kept: ResumeFiles,
    folder: Path,
) -> Workload:
    context = RunContext(timer=timer, resume=kept, model=model, processor=None, feed=ModuleFeed(batches))
    return Workload(
        context=context,
        rows=RunRows(calibration=batches, evaluation=batches),
        scorer=scorer(context),
        info=context.info(source, _TASK),
        check=lambda: None,
    )


def _output(model: nn.Module, batch: Batch) -> Any:
    """Return what a model returns for one row, to know its kind."""
    with torch.no_grad():
        return model(**rows_at(batch, (0,)))
