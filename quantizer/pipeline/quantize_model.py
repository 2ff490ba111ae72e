"""``quantize_model``: from a module and its data to a chosen, checked and benchmarked engine in one call.

``QuantizedModel`` is its result, with the engines, the measurements and the report.
"""

from __future__ import annotations

import copy
import os
import shutil
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

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
    ReportConfig,
    RunConfig,
    quantizer_config,
)
from quantizer.config.data_section import MODULE
from quantizer.config.load import engine_config, fallback_config
from quantizer.config.schema import least_opset
from quantizer.diagnose import Diagnoses
from quantizer.engines import load_engine
from quantizer.errors import ConfigError, EngineError, QuantizerError
from quantizer.pipeline.choose_engine import with_backend
from quantizer.pipeline.compare_outputs import refusal
from quantizer.pipeline.context import RunContext
from quantizer.pipeline.diagnose_run import DIAGNOSED_GROUPS, diagnosed, wants_diagnosis
from quantizer.pipeline.engine_module import CallForm, EngineModule
from quantizer.pipeline.function_source import called_form
from quantizer.pipeline.job import QUANTIZER
from quantizer.pipeline.layouts import check_module_layouts, write_module_layouts
from quantizer.pipeline.make_record import write_reports
from quantizer.pipeline.model_graphs import FLOAT_STEM, QUANTIZED_STEM
from quantizer.pipeline.module_feed import ModuleFeed, fitted
from quantizer.pipeline.progress import StageTimer, console_of
from quantizer.pipeline.resume import resume_files
from quantizer.pipeline.run import RUN, carry_out
from quantizer.pipeline.scores import FunctionScorer, ScoreFunction
from quantizer.pipeline.workload import module_batches, module_workload
from quantizer.plan.targets import AUTO
from quantizer.proxy.build import is_proxy, refuse_compiled
from quantizer.quantizer import Quantizer
from quantizer.report import RunRecord, print_record, write_html
from quantizer.report.record import GIVEN_IN_PYTHON
from quantizer.report.tables import plain_text
from quantizer.tasks import Batch
from quantizer.utils.batches import warn_user
from quantizer.utils.distributed import alone
from quantizer.utils.files import Store, scratch_folder, write_folder
from quantizer.utils.lazy import once_property
from quantizer.utils.paths import is_file
from quantizer.utils.sizes import BATCH, SEQUENCE, DataSizes
from quantizer.utils.torch_modes import ordinary_tensors


class QuantizedModel:
    """A quantized model: its engines, the measurements, and the quantizer.

    The files are in a temporary folder, which is removed with this object. ``save`` writes them to a permanent folder,
    from which ``quantizer.load`` loads the engine.

    Attributes:
        record: all measurements, as in ``report.json``.
        model: the float model, in eval mode.
        folder: the temporary folder of the run, as ``quantizer run`` writes it.
        saved: the folder that ``save`` wrote last; None before.
    """

    def __init__(
        self,
        model: nn.Module,
        call: CallForm,
        record: RunRecord,
        folder: Path,
        config: RunConfig,
        batches: Sequence[Batch],
    ) -> None:
        """Wrap the result of a run.

        Args:
            model: the float model, in eval mode.
            call: its arguments and the structure of its output.
            record: all measurements.
            folder: the folder of the run in a temporary folder of its own, which is removed with this object.
            config: the configuration of the run.
            batches: the calibration batches, which ``diagnose`` needs; they are not copied.
        """
        self.model = model
        self.record = record
        self.folder = folder
        self.saved: Path | None = None
        self._call = call
        self._config = config
        self._batches = batches
        is_diagnosed = wants_diagnosis(config) and record.diagnosis_error is None
        self._diagnosed_groups = DIAGNOSED_GROUPS if is_diagnosed else 0
        weakref.finalize(self, shutil.rmtree, folder.parent, ignore_errors=True)

    @once_property
    def engine(self) -> EngineModule:
        """The quantized engine, called like the model.

        Raises:
            EngineError: it runs on another device.
        """
        return self._engine(QUANTIZED_STEM)

    @once_property
    def float_engine(self) -> EngineModule:
        """The engine of the float model with the same backend, called like the model.

        Raises:
            EngineError: it runs on another device, or was refused because its outputs are wrong.
        """
        if self.record.float_engine_refused is not None:
            raise EngineError(f"the float engine is refused: {self.record.float_engine_refused}")
        return self._engine(FLOAT_STEM)

    @once_property
    def quantizer(self) -> Quantizer:
        """The calibrated quantizer with the sensitivities and the fallback of the run.

        ``quantizer.quantize(model)`` returns the quantized model in PyTorch.
        """
        loaded = Quantizer.load(self.folder / QUANTIZER)
        self._rank(loaded)
        return loaded

    def diagnose(self, num: int = DIAGNOSED_GROUPS) -> Diagnoses:
        """Return the groups that reduce the SQNR of the output most, with the cause and the best fix of each.

        Example::

            print(result.diagnose())

        Sensitivity and peak memory are measured as well. All three are added to ``record`` and to the reports, also in
        the folder that ``save`` wrote. The calibration is reused; a few batches measure the groups and their fixes. A
        second call measures nothing again. If the diagnosis fails, it warns, and ``record.diagnosis_error`` has the
        reason.

        Args:
            num: the number of groups.
        """
        if num < 1:
            raise QuantizerError(f"diagnose(num={num}): expected the number of groups, 1 or more")
        if num > self._diagnosed_groups:
            copies = [self.saved] if self.saved is not None and self._is_in(self.saved) else []
            with ordinary_tensors(), alone(), resume_files(self.folder, searches=False, trains=False) as kept:
                timer, feed = StageTimer(console_of(None)), ModuleFeed(self._batches)
                context = RunContext(timer=timer, resume=kept, model=self.model, processor=None, feed=feed)
                config = self._config.model_copy(update={"amp": AmpConfig(batches=SENSITIVITY_BATCHES)})
                self.record = diagnosed(self.record, config, self.folder, context, self._batches, num)
            for folder in copies:
                write_reports(self.record, self._config.report.formats, folder)
            self._rank(self.quantizer)
            self._diagnosed_groups = num if self.record.diagnosis_error is None else 0
        return Diagnoses(self.record.diagnoses[:num])

    def summary(self, width: int = 100) -> str:
        """Return the result as text: choice of the engine, score, outputs, speed, size and verdict.

        Args:
            width: the width of the text in columns.
        """
        return plain_text(partial(print_record, self.record, self.saved), width)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as one self-contained HTML file, and return its path.

        Raises:
            MissingDependencyError: jinja2 is not installed.
            QuantizerError: the file cannot be written.
        """
        return write_html(self.record, Path(path))

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        replace: bool = False,
        deliver: Literal["ultralytics"] | Sequence[Literal["ultralytics"]] = (),
    ) -> Path:
        """Write everything to a folder: engines, ONNX files, the quantizer, the report and the configuration.

        Args:
            folder: the folder.
            replace: replace a folder that ``save`` or ``quantizer run`` wrote and that contains nothing else.
            deliver: a layout for another client, or several, as folders in it. ``ultralytics``: the graph of the
                engine, with the metadata of a model of ultralytics, as ``ultralytics.YOLO`` loads it.

        Raises:
            QuantizerError: the folder already exists or cannot be written, or the model or the backend does not have a
                layout.
        """
        name, layouts = Path(folder).absolute().name, [deliver] if isinstance(deliver, str) else deliver
        check_module_layouts(layouts, self._config, self.model)

        def fill(new: Path) -> None:
            shutil.copytree(self.folder, new, dirs_exist_ok=True)
            write_module_layouts(layouts, self.record, self._config, self.model, new, name)

        self.saved = write_folder(folder, fill, kind=RUN, replace=replace)
        return self.saved

    def __repr__(self) -> str:
        record = self.record
        backend = "no engine" if record.engine is None else record.engine.backend
        place = "not saved" if self.saved is None else f"saved in {self.saved}"
        return f"QuantizedModel({type(self.model).__name__}, {backend}, {place})"

    def _rank(self, quantizer: Quantizer) -> None:
        """Give a quantizer the sensitivities of the run."""
        if self.record.measure is not None:
            quantizer.ranked = Sensitivity(self.record.sensitivity, quantizer.chosen_fallback, self.record.measure)

    def _is_in(self, saved: Path) -> bool:
        """Return whether a folder contains this result."""
        own, other = (folder / "report.json" for folder in (self.folder, saved))
        return is_file(other) and own.read_bytes() == other.read_bytes()

    def _engine(self, stem: str) -> EngineModule:
        assert self.record.engine is not None
        threads = int(self.record.config["engine"]["threads"])
        loaded = load_engine(self.record.engine.backend, self.folder / f"{stem}.engine", threads=threads)
        return EngineModule(loaded, self._call)


_LONGEST_NAME = 100

SENSITIVITY_BATCHES = 2
"""Default number of batches for the measurement of sensitivity."""


def quantize_model(
    model: nn.Module | str | os.PathLike[str],
    data: Any,
    *,
    score: ScoreFunction | None = None,
    higher_is_better: bool = True,
    samples: int | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | QuantizerConfig | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    threads: int = 1,
    optimize_for: Literal["latency", "throughput", "both"] = "both",
    time_budget: float | None = 60.0,
    progress: bool | None = None,
    fallback: Mapping[str, Any] | None = None,
    diagnose: bool = False,
    store: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> QuantizedModel:
    """Quantize a module for the fastest correct engine on this machine, and measure the result.

    The model is calibrated once. INT8 and float engines for this CPU, or INT8, FP8 and float engines for this GPU, are
    built, their outputs are compared with the model, and they are benchmarked in interleaved rounds, at the shape of
    the first batch and with one sample. The fastest engine is kept, together with the fastest float engine of its
    backend. The model itself does not change.

    Example::

        result = quantize_model(model, batches)
        print(result.summary())
        result.save("my-net-int8")

    Args:
        model: the float model; its ``forward`` must name its arguments. Or the path of a float ONNX file; see
            ``from_onnx``.
        data: calibration data, 128 or more samples as in production: a loader or another iterable of batches, with or
            without labels, a ``Dataset``, a tensor or an array, as in ``Quantizer.calibrate``. The samples of a batch
            are along axis 0.
        score: a function that evaluates a model and returns its score. It is called with the float model, the quantized
            model and engines; all are called like ``model``. It may also return one score per sample [N], always for
            the same samples in the same order: their mean is the score, and the report adds a confidence interval.
            None: only outputs are compared.
        higher_is_better: whether a higher score is better.
        samples: the maximum number of samples to read; None for all, and at most 4,096 of a loader without a length.
        config: as in ``Quantizer``; the default backend is ``auto``, the fastest.
        device: ``cpu``, or ``cuda`` for the NVIDIA GPU of this machine: the engines to compare. None: the device of the
            backends that are named, else that of the model's parameters.
        threads: the number of CPU threads of an engine.
        optimize_for: the sizes at which engines are compared: one sample for ``latency``, the first batch for
            ``throughput``, or ``both``.
        time_budget: the seconds after which no further backend is tried, if there is a correct engine, and no third
            size is timed; None: no limit.
        progress: print the stages to stderr; None: at once in a terminal, elsewhere after 10 seconds.
        fallback: the groups to keep in float, as the ``fallback`` section of a run: ``{"max_drop": 0.01}`` in units of
            the score, or ``{"names": ["head"]}``. Unlike ``exclude``, it keeps groups in float that were calibrated, so
            ``result.quantizer.clear_fallback()`` quantizes them again.
        diagnose: also find the groups that cost most accuracy, with fixes, and measure sensitivity and memory. Default:
            only when ``result.diagnose()`` is called.
        store: a folder for the calibration, the plans, the engines and the scores of a search while the call works.
            After an interrupt, a kill or an error, the same call resumes from them. Changed weights, code, samples or
            settings are computed again. Success removes them. One call at a time uses a folder.
        settings: fields of the configuration, such as ``backend="openvino"`` or ``exclude={"names": ["head"]}``, which
            leaves modules out before calibration.

    Returns:
        The chosen engine and the float engine, all measurements, the calibrated quantizer and the report. The files are
        temporary until ``save`` writes them to a folder.

    Raises:
        ConfigError: a list of all problems of the configuration.
        CalibrationError: there is no data, or a batch does not fit the model's arguments.
        TaskError: the model fails on the first batch.
        EngineError: no engine is correct and runs on this machine, or the engine of the named backend is wrong.
        QuantizerError: an ONNX file cannot be read, the model cannot be exported, or ``store`` is a file, is not
            writable or contains other files.
    """
    kept = Store(store).folder
    with ordinary_tensors():
        model = _float_model(model)
        quantizer_settings = _configured(config, settings)
        fallback_section = _fallback(fallback, scored=score is not None)
        batches = module_batches(model, data, samples)
        float_model = _ready(model)
        batches, call = called_form(_first_call(float_model, batches[0]), float_model, batches)
        device = device or _device_of(model, quantizer_settings)
        engine = engine_config(device=device, threads=threads, optimize_for=optimize_for, time_budget=time_budget)
        run_config = _run_config(model, batches, quantizer_settings, engine, fallback_section, diagnose=diagnose)
        parent = scratch_folder()
        try:
            # The name of a class may be too long for a file name.
            folder = parent / type(model).__name__[:_LONGEST_NAME]
            scorer = partial(FunctionScorer, function=score, call=call, higher_is_better=higher_is_better)
            work = partial(module_workload, float_model, run_config.model.source, batches, scorer)
            with alone():
                console, scored = console_of(progress), score is not None
                record = carry_out(run_config, folder, False, console, work, scored=scored, store=kept)
            assert record is not None
            if record.engine_refused is not None:
                raise EngineError(refusal(record.engine_refused, str(record.config["quantizer"]["backend"])))
            run_config = with_backend(run_config, str(record.config["quantizer"]["backend"]))
            return QuantizedModel(float_model, call, record, folder, run_config, batches)
        except BaseException as error:
            shutil.rmtree(parent)
            if isinstance(error, KeyboardInterrupt) and kept is None and not error.args:
                raise type(error)(_NOTHING_KEPT) from error
            raise


_NOTHING_KEPT = "nothing is kept; with store=FOLDER, the same call resumes after an interrupt"


def _configured(
    config: str | os.PathLike[str] | Mapping[str, Any] | QuantizerConfig | None, settings: Mapping[str, Any]
) -> QuantizerConfig:
    """Return the quantizer configuration; the default backend is ``auto``."""
    configured = quantizer_config(config, **settings)
    has_backend = "backend" in configured.model_fields_set
    return configured if has_backend else quantizer_config(config, backend=AUTO, **settings)


def _float_model(model: Any) -> nn.Module:
    """Return the given float module, or the module of an ONNX file."""
    if isinstance(model, str | os.PathLike) and os.fspath(model).endswith(".onnx"):
        # Imported here, because modules do not need it.
        from quantizer.tasks.from_onnx import from_onnx

        return from_onnx(model)
    if not isinstance(model, nn.Module) or is_proxy(model):
        kind = "a proxy; pass the float model that it was made from" if isinstance(model, nn.Module) else repr(model)
        hint = "; the path of an ONNX file ends in .onnx" if isinstance(model, str | os.PathLike) else ""
        raise QuantizerError(f"quantize_model() expects a float torch.nn.Module, but got {kind}{hint}")
    refuse_compiled(model)
    return model


def _device_of(model: nn.Module, settings: QuantizerConfig) -> Literal["cuda"] | None:
    """Return the device of a choice without named backends, if the parameters of a model are on a GPU."""
    chooses = settings.backend == AUTO and not settings.candidates
    is_on_gpu = any(parameter.device.type == "cuda" for parameter in model.parameters())
    return "cuda" if chooses and is_on_gpu else None


def _ready(model: nn.Module) -> nn.Module:
    """Return the model in eval mode on the CPU: itself or a copy.

    Outputs in train mode, with dropout, cannot be compared.
    """
    in_training = any(module.training for module in model.modules())
    if in_training:
        warn_user(["the model is in train mode; a copy in eval mode is quantized: compare results with model.eval()"])
    is_elsewhere = any(parameter.device.type != "cpu" for parameter in model.parameters())
    return copy.deepcopy(model).cpu().eval() if is_elsewhere or in_training else model


def _first_call(model: nn.Module, batch: Batch) -> str:
    """Return a description of the call of a model with its first batch, for messages."""
    shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in batch.items())
    return f"batch 0 ({shapes}): {type(model).__name__}.forward"


def _fallback(values: Mapping[str, Any] | None, *, scored: bool) -> FallbackConfig | None:
    """Return the validated ``fallback`` section."""
    if values is None:
        return None
    section = fallback_config(values)
    if section.max_drop is not None and not scored:
        text = (
            f"fallback.max_drop: {section.max_drop:g} limits the drop of a score; expected score=, a function of "
            "the model"
        )
        raise ConfigError([f"keyword 'fallback': {text}"])
    return section


def _run_config(
    model: nn.Module,
    batches: list[Batch],
    settings: QuantizerConfig,
    engine: EngineConfig,
    fallback: FallbackConfig | None,
    *,
    diagnose: bool,
) -> RunConfig:
    """Return the configuration of a run on Python objects, with sizes from the batches."""
    sizes = DataSizes.of(batches)
    # Placeholders for the record of the run; nothing is read from them.
    examples = DatasetConfig.model_construct(name=GIVEN_IN_PYTHON, samples=sum(sizes.seen[BATCH]))
    source = f"{type(model).__module__}:{type(model).__qualname__}"
    longest = max(sizes.seen.get(SEQUENCE, (1,)))
    ranks = diagnose or (fallback is not None and fallback.names is None)
    config = RunConfig(
        model=ModelConfig.model_construct(source=source, task=MODULE),
        data=DataConfig.model_construct(calibration=examples, evaluation=examples),
        quantizer=settings,
        amp=AmpConfig(batches=SENSITIVITY_BATCHES) if ranks else None,
        export=ExportConfig(opset=max(ExportConfig().opset, least_opset(settings))),
        engine=engine,
        report=ReportConfig(diagnose=diagnose),
    )
    updates = {
        # In a run file, max_drop needs data.tuning; here, the score function has its own samples.
        "fallback": fallback,
        "model": config.model.model_copy(update={"max_length": longest}),
        "data": config.data.model_copy(update={"batch_size": sizes.usual[BATCH]}),
    }
    return fitted(config.model_copy(update=updates), sizes)
