"""``QuantizedModel``: what ``quantize_model`` returns, with the engines, the measurements and the report.

``quantize_model``: a module and its data, to an engine that was chosen, checked and timed, in one call.
"""

from __future__ import annotations

import copy
import os
import shutil
import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from quantizer.algorithms.sensitivity.session import Sensitivity
from quantizer.config import (
    AmpConfig,
    DataConfig,
    DatasetConfig,
    EngineConfig,
    ExportConfig,
    FallbackConfig,
    ModelConfig,
    QuantizerConfig,
    RunConfig,
    quantizer_config,
)
from quantizer.config.data_section import MODULE
from quantizer.config.load import fallback_config
from quantizer.config.schema import least_opset
from quantizer.engines import load_engine
from quantizer.errors import ConfigError, EngineError, QuantizerError
from quantizer.pipeline.compare_outputs import refusal
from quantizer.pipeline.engine_module import CallForm, EngineModule
from quantizer.pipeline.function_source import called
from quantizer.pipeline.model_graphs import FLOAT_STEM, QUANTIZED_STEM
from quantizer.pipeline.module_feed import fitted
from quantizer.pipeline.run import RUN, carry_out
from quantizer.pipeline.scores import FunctionScorer, ScoreFunction
from quantizer.pipeline.workload import module_batches, module_workload, output_of
from quantizer.plan.targets import AUTO
from quantizer.proxy.build import is_proxy, refuse_compiled
from quantizer.quantizer import Quantizer
from quantizer.report import RunRecord, print_record, write_html
from quantizer.report.record import GIVEN_IN_PYTHON
from quantizer.report.tables import plain_text
from quantizer.tasks import Batch
from quantizer.utils.batches import warn_user
from quantizer.utils.distributed import alone
from quantizer.utils.files import scratch_folder, write_folder
from quantizer.utils.lazy import once_property
from quantizer.utils.sizes import BATCH, SEQUENCE, DataSizes
from quantizer.utils.torch_modes import ordinary_tensors


class QuantizedModel:
    """A quantized model: two engines, what was measured, and the quantizer that made them.

    Its files lie in a temporary folder, which goes with this object; ``save`` writes them to a folder of yours, from
    which ``quantizer.load`` loads the engine.

    Attributes:
        record: all measurements, as in ``report.json``.
        model: the float model, in eval mode.
        folder: the temporary folder of the run, as ``quantizer run`` writes it.
        saved: the folder that ``save`` wrote last; None: none yet.
    """

    def __init__(self, model: nn.Module, call: CallForm, record: RunRecord, folder: Path) -> None:
        """
        Args:
            model: the float model, in eval mode.
            call: how it is called, and what it returns.
            record: all measurements.
            folder: the folder of the run, alone in a temporary folder, which is removed with this object.
        """
        self.model = model
        self.record = record
        self.folder = folder
        self.saved: Path | None = None
        self._call = call
        weakref.finalize(self, shutil.rmtree, folder.parent, ignore_errors=True)

    @once_property
    def engine(self) -> EngineModule:
        """The INT8 engine, called as the model is.

        Raises:
            EngineError: it runs on another device.
        """
        return self._engine(QUANTIZED_STEM)

    @once_property
    def float_engine(self) -> EngineModule:
        """The engine of the float model, of the same backend, called as the model is.

        Raises:
            EngineError: it runs on another device, or was refused as it is wrong.
        """
        if self.record.float_engine_refused is not None:
            raise EngineError(f"the float engine is refused: {self.record.float_engine_refused}")
        return self._engine(FLOAT_STEM)

    @once_property
    def quantizer(self) -> Quantizer:
        """The calibrated quantizer, with the ranking and the fallback of the run.

        ``quantizer.quantize(model)`` returns the quantized model in PyTorch.
        """
        loaded = Quantizer.load(self.folder / "quantizer")
        if self.record.measure is not None:
            loaded.ranked = Sensitivity(self.record.sensitivity, loaded.chosen_fallback, self.record.measure)
        return loaded

    def summary(self, width: int = 100) -> str:
        """Return the result as text: the choice of the engine, score, outputs, speed, size, and what to do.

        Args:
            width: the columns of the text.
        """
        return plain_text(partial(print_record, self.record, self.saved), width)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as one HTML file that opens offline, and return its path.

        Raises:
            MissingDependencyError: jinja2 is not installed.
            QuantizerError: the file cannot be written.
        """
        return write_html(self.record, Path(path))

    def save(self, folder: str | os.PathLike[str], *, replace: bool = False) -> Path:
        """Write everything to a folder: both engines and ONNX files, the quantizer, report and configuration.

        Args:
            folder: the folder.
            replace: replace a folder that ``save`` or ``quantizer run`` wrote and that holds nothing else.

        Raises:
            QuantizerError: the folder exists already or cannot be written.
        """
        self.saved = write_folder(
            folder, lambda new: shutil.copytree(self.folder, new, dirs_exist_ok=True), kind=RUN, replace=replace
        )
        return self.saved

    def __repr__(self) -> str:
        record = self.record
        backend = "no engine" if record.engine is None else record.engine.backend
        place = "not saved" if self.saved is None else f"saved in {self.saved}"
        return f"QuantizedModel({type(self.model).__name__}, {backend}, {place})"

    def _engine(self, stem: str) -> EngineModule:
        assert self.record.engine is not None
        threads = int(self.record.config["engine"]["threads"])
        loaded = load_engine(self.record.engine.backend, self.folder / f"{stem}.engine", threads=threads)
        return EngineModule(loaded, self._call)


_LONGEST_NAME = 100

SENSITIVITY_BATCHES = 2
"""Sensitivity is measured on so many batches unless somebody says otherwise."""


def quantize_model(
    model: nn.Module | str | os.PathLike[str],
    data: Any,
    *,
    score: ScoreFunction | None = None,
    higher_is_better: bool = True,
    samples: int | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | QuantizerConfig | None = None,
    threads: int = 1,
    progress: bool | None = None,
    fallback: Mapping[str, Any] | None = None,
    **settings: Any,
) -> QuantizedModel:
    """Quantize a module for the fastest engine that is right on this machine, and measure what came of it.

    The model is calibrated once. The engines for this CPU are built of it in INT8 and in float, their outputs are
    compared with the model's, and they are timed in interleaved rounds at the shape of the first batch; the fastest
    is kept, beside the fastest in float of its backend. The model itself never changes.

    Args:
        model: the float model, in eval mode, whose ``forward`` names its arguments; or the path of a float ONNX file,
            see ``from_onnx``.
        data: what to calibrate on, 128 rows or more of what the model will see: a loader or another iterable of
            batches, with labels or without, a ``Dataset``, a tensor or an array, as ``Quantizer.calibrate`` takes it.
            The rows of a batch lie along axis 0.
        score: takes the model, or a module that runs an engine and is called as the model is, and returns its score, or
            those of its samples [N], always the same ones in one order: the score is their mean, and has an interval.
            None: the outputs alone are compared.
        higher_is_better: whether a higher score is better.
        samples: how many samples of the data are read; None: all, and at most 4,096 of a loader that states no length.
        config: as for ``Quantizer``; without a backend in it or in ``settings`` it is ``auto``, the fastest.
        threads: the threads that an engine on a CPU runs with.
        progress: whether stages are printed; None: only in a terminal.
        fallback: what falls back to float, as the section of a run: ``{"max_drop": 0.01}`` of the score, or ``names``.
        settings: fields of the configuration, such as ``backend="openvino"`` or ``exclude={"names": ["head"]}``.

    Raises:
        ConfigError: the configuration has problems; all of them are listed.
        CalibrationError: there is no data, or a batch does not fit the model's arguments.
        TaskError: the model fails on the first batch.
        EngineError: no engine is right and runs here; or that of the backend that was named is wrong.
        QuantizerError: an ONNX file cannot be read, or the model cannot be exported.
    """
    with ordinary_tensors():
        model = _float_model(model)
        asked = _configured(config, settings)
        back = _fallback(fallback, scored=score is not None)
        batches = module_batches(model, data, samples)
        plain = _ready(model)
        console = Console(stderr=True)
        console.quiet = not (console.is_terminal if progress is None else progress)
        call = _call_form(plain, batches[0])
        wanted = _run_config(model, batches, asked, threads, back)
        parent = scratch_folder()
        try:
            # A class may have a longer name than a file.
            folder = parent / type(model).__name__[:_LONGEST_NAME]
            scorer = partial(FunctionScorer, function=score, call=call, higher_is_better=higher_is_better)
            work = partial(module_workload, plain, wanted.model.source, batches, scorer)
            with alone():
                record = carry_out(wanted, folder, False, console, work)
            assert record is not None
            if record.engine_refused is not None:
                raise EngineError(refusal(record.engine_refused))
            return QuantizedModel(plain, call, record, folder)
        except BaseException:
            shutil.rmtree(parent)
            raise


def _configured(
    config: str | os.PathLike[str] | Mapping[str, Any] | QuantizerConfig | None, settings: Mapping[str, Any]
) -> QuantizerConfig:
    """Return the configuration of the quantizer, for the fastest backend if none is named."""
    asked = quantizer_config(config, **settings)
    named = "backend" in asked.model_fields_set
    return asked if named else quantizer_config(config, backend=AUTO, **settings)


def _float_model(model: Any) -> nn.Module:
    """Return a float module: the one that was given, or that of an ONNX file."""
    if isinstance(model, str | os.PathLike) and os.fspath(model).endswith(".onnx"):
        # Imported here: a module needs none of it.
        from quantizer.tasks.from_onnx import from_onnx

        return from_onnx(model)
    if not isinstance(model, nn.Module) or is_proxy(model):
        what = "a proxy; pass the float model that it was made from" if isinstance(model, nn.Module) else repr(model)
        hint = ", where a file would end in .onnx" if isinstance(model, str | os.PathLike) else ""
        raise QuantizerError(f"quantize_model() takes a float model, a torch.nn.Module, and this is {what}{hint}")
    refuse_compiled(model)
    return model


def _ready(model: nn.Module) -> nn.Module:
    """Return the model in eval mode on the CPU, where engines run: itself or a copy.

    What it returns in train mode, dropout and all, is nothing to compare with.
    """
    in_training = any(module.training for module in model.modules())
    if in_training:
        warn_user(["the model is in train mode, and a copy of it in eval mode is quantized: compare with model.eval()"])
    is_elsewhere = any(parameter.device.type != "cpu" for parameter in model.parameters())
    return copy.deepcopy(model).cpu().eval() if is_elsewhere or in_training else model


def _call_form(model: nn.Module, batch: Batch) -> CallForm:
    """Return how a model is called and what it returns; raise ``TaskError`` if it fails on the batch, the first one."""
    shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in batch.items())
    where = f"batch 0 ({shapes}): {type(model).__name__}.forward"
    return CallForm.of(model, called(where, output_of, model, batch))


def _fallback(given: Mapping[str, Any] | None, *, scored: bool) -> FallbackConfig | None:
    """Return the section of what falls back to float."""
    if given is None:
        return None
    wanted = fallback_config(given)
    if wanted.max_drop is not None and not scored:
        text = f"fallback.max_drop: {wanted.max_drop:g} is a drop of a score; expected score=, a function of a model"
        raise ConfigError([f"keyword 'fallback': {text}"])
    return wanted


def _run_config(
    model: nn.Module, batches: list[Batch], asked: QuantizerConfig, threads: int, fallback: FallbackConfig | None
) -> RunConfig:
    """Return the configuration of a run whose model and rows are objects, with the shapes of the batches."""
    sizes = DataSizes.of(batches)
    # Neither is read from anywhere: they are what the record of the run says of them.
    rows = DatasetConfig.model_construct(name=GIVEN_IN_PYTHON, samples=sum(sizes.seen[BATCH]))
    source = f"{type(model).__module__}:{type(model).__qualname__}"
    longest = max(sizes.seen.get(SEQUENCE, (1,)))
    config = RunConfig(
        model=ModelConfig.model_construct(source=source, task=MODULE),
        data=DataConfig.model_construct(calibration=rows, evaluation=rows),
        quantizer=asked,
        amp=AmpConfig(batches=SENSITIVITY_BATCHES),
        export=ExportConfig(opset=max(ExportConfig().opset, least_opset(asked))),
        engine=EngineConfig(threads=threads),
    )
    said = {
        # A run from a file takes its budget on rows of data.tuning; here the score has its own.
        "fallback": fallback,
        "model": config.model.model_copy(update={"max_length": longest}),
        "data": config.data.model_copy(update={"batch_size": sizes.usual[BATCH]}),
    }
    return fitted(config.model_copy(update=said), sizes)
