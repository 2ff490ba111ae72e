"""The configuration of one run: ``RunConfig`` with its ``qat``, ``export``, ``engine`` and ``report`` sections.

The file also checks a configuration against the profile of its target, before anything is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    ValidationInfo,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from quantizer.config.data_section import DataConfig, ModelConfig
from quantizer.config.layouts import LAYOUTS, forget_alpha, layout_problems, without_factors
from quantizer.config.quantizer_section import (
    AmpConfig,
    AxisRange,
    Expects,
    FallbackConfig,
    OneOf,
    QuantizerConfig,
    Section,
    Text,
    reject,
    some_and_unique,
    tuple_from_list,
    unique,
    with_fitted_sizes,
)
from quantizer.errors import ConfigError
from quantizer.numerics.formats import UINT8, Format, QType, impossible, least_opset_of, qtype
from quantizer.plan.reasons import RuleKind
from quantizer.plan.targets.base import AUTO, engine_problems, profile
from quantizer.plan.targets.clients import OF_MODULES
from quantizer.utils.registry import TASKS_OF_RECORDINGS

_HALF_SCALES_OPSET = 19
"""The first opset in which QuantizeLinear accepts half-precision scales."""


class DynamicConfig(Section):
    """Sizes of the dynamic axes as [min, opt, max]."""

    batch: AxisRange = Field(default=(1, 8, 32), description="Samples per batch.")
    sequence: AxisRange = Field(
        default=(16, 128, 512),
        description="Tokens per text, or values per recording, such as 16000 for one "
        "second at 16 kHz; image models have no such axis. The default for recordings: the shortest that the model "
        "accepts, the median of the calibration samples, and model.seconds.",
    )


class ExportConfig(Section):
    """Export to ONNX."""

    opset: int = Field(
        default=20,
        ge=18,
        le=24,
        description="ONNX opset: 18 is the first that torch's exporter writes, 24 the last that TensorRT reads.",
    )
    dynamic: DynamicConfig = Field(
        default=DynamicConfig(),
        description="Sizes of the dynamic axes. TensorRT engines accept only sizes in these ranges. OpenVINO "
        "engines add fixed-shape models for the opt size and for the minimum batch.",
    )


def _capability(value: Any) -> str | tuple[str, ...] | None:
    if value is None:
        return None
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(
        isinstance(name, str) and re.fullmatch("sm[0-9]{2,3}", name) for name in names
    ):
        raise PydanticCustomError("capability", "Input should be a compute capability or a list of them")
    return tuple(some_and_unique(names)) if isinstance(value, list | tuple) else value


class EngineConfig(Section):
    """Build and execution of the engine."""

    compute_capability: Annotated[
        str | tuple[str, ...] | None,
        WrapValidator(lambda value, _: _capability(value)),
        Expects("a compute capability such as 'sm89', or a list of such"),
    ] = Field(
        default=None,
        description="Compute capability of the GPUs to build for ahead of time, such as 'sm89', or a list for one "
        "engine with several. null: the GPU of this machine.",
    )
    device: Literal["cpu", "cuda"] | None = Field(
        default=None,
        description="Device of the engines that backend 'auto' compares: 'cpu', or 'cuda' for the NVIDIA GPU of this "
        "machine. null: the device of the named backends, else the CPU; in quantize_model the device of the model's "
        "parameters.",
    )
    inference_precision: Literal["float16", "bfloat16", "float32"] | None = Field(
        default=None,
        description="Precision of non-quantized operations. OpenVINO: 'float32' or 'bfloat16'; null: float32. "
        "torch-cuda: 'float16' or 'bfloat16'; null: float16, or bfloat16 for a file in bfloat16. Others use the types "
        "of the ONNX file.",
    )
    compiled: bool | None = Field(
        default=None,
        description="Compile the graph of a torch engine with Inductor. null: compile if a C++ compiler exists and the "
        "compiled engine is faster.",
    )
    strip_weights: bool = Field(
        default=False,
        description="Write TensorRT engines without weights. Loading such an engine reads the weights from the ONNX "
        "file next to it.",
    )
    threads: int = Field(default=1, ge=1, description="Number of CPU threads of the engine.")
    optimize_for: Literal["latency", "throughput", "both"] = Field(
        default="both",
        description="Sizes at which backend 'auto' compares the engines. 'latency': the smallest batch of "
        "export.dynamic, which is one sample by default. 'throughput': the usual batch. 'both': all sizes of "
        "report.latency_shapes.",
    )
    time_budget: float | None = Field(
        default=60.0,
        ge=0,
        description="Seconds after which backend 'auto' tries no further backend, if it has a correct engine, and "
        "times no third size. null: no limit.",
    )


class ReportConfig(Section):
    """Final measurements and the form of the report."""

    formats: Annotated[
        tuple[Literal["json", "html"], ...],
        BeforeValidator(tuple_from_list),
        AfterValidator(some_and_unique),
    ] = Field(default=("json", "html"), description="Formats of the report.")
    latency_batch: int = Field(
        default=8,
        ge=1,
        description="Samples per batch in latency benchmarks. If 8 is outside the range of export.dynamic.batch, "
        "the default is its opt size.",
    )
    latency_sequence: int = Field(
        default=128,
        ge=1,
        description="Tokens per text, or values per recording, in latency benchmarks. If 128 is outside the range of "
        "export.dynamic.sequence, the default is its opt size.",
    )
    latency_shapes: Literal["usual", "one_and_usual", "all"] = Field(
        default="one_and_usual",
        description="Sizes of the latency benchmarks. 'usual': latency_batch and latency_sequence. 'one_and_usual': "
        "also the smallest batch of export.dynamic, which is one sample by default. 'all': latency_batch and "
        "latency_sequence, and the min, opt and max sizes of export.dynamic, with the PyTorch float model as an "
        "additional baseline at the usual size.",
    )
    tolerance: float | None = Field(
        default=None,
        description="Minimum SQNR of an engine's outputs relative to PyTorch, in dB. null: 30 for quantized and "
        "half-precision engines, 60 for float32 engines.",
    )
    bootstrap: int = Field(default=1000, ge=1, description="Number of bootstrap resamples per confidence interval.")
    diagnose: bool = Field(
        default=False,
        description="Find the groups that cost most accuracy, their causes and fixes, and measure sensitivity and "
        "memory. Sensitivity is measured with the defaults of amp if the section is missing. With qat, only memory is "
        "measured. `quantizer diagnose FOLDER` adds the same to a finished run. The run itself "
        "also scores the quantized model in PyTorch, as `proxy`.",
    )
    track: Literal["mlflow", "tensorboard", "wandb"] | None = Field(
        default=None,
        description="Experiment tracker that also receives the results. It writes files next to the run folder, or "
        "where the tracker's own environment variables say. null: none.",
    )


_Kind = Literal["fixed", "average", "learned"]


def _scales(value: Any) -> str | dict[str, str]:
    kinds = get_args(_Kind)
    values = list(value.values()) if isinstance(value, dict) else [value]
    named = not isinstance(value, dict) or all(isinstance(pattern, str) for pattern in value)
    if not values or not named or not all(isinstance(kind, str) and kind in kinds for kind in values):
        raise PydanticCustomError("scales", f"Input should be one of {', '.join(kinds)}, or such by pattern")
    return value  # type: ignore[no-any-return]


class QatConfig(Section):
    """Quantization-aware training (QAT): distillation from the float model on data.training, without labels."""

    epochs: float = Field(
        default=0.5,
        gt=0,
        description="Number of passes over data.training. Use a tenth of the epochs of the original fine-tuning, or "
        "slightly more.",
    )
    learning_rate: float = Field(
        default=2e-5,
        gt=0,
        lt=1,
        description="Peak learning rate; use about 1% of a rate for training from scratch. It warms up during the "
        "first tenth of the steps and follows a cosine decay.",
    )
    scale_learning_rate: float = Field(
        default=0.2,
        gt=0,
        lt=1,
        description="Peak learning rate of learned activation scales, as the maximum relative change per step. "
        "Learned weight scales use learning_rate.",
    )
    scales: Annotated[
        _Kind | dict[str, _Kind],
        WrapValidator(lambda value, _: _scales(value)),
        Expects("fixed, average or learned, or a mapping of patterns to these"),
    ] = Field(
        default="learned",
        description="'fixed' keeps the calibrated scales, 'average' follows the activations, 'learned' trains the "
        "scales. A mapping sets this by pattern of sites and operands, such as {'**.weight': fixed}; the last "
        "matching pattern applies.",
    )
    freeze_scales: float = Field(
        default=0.8, ge=0, le=1, description="Fraction of the steps after which scales no longer change."
    )
    temperature: float = Field(
        default=1.0, gt=0, description="Divisor of both models' logits in the distillation loss."
    )
    hidden: float = Field(
        default=10.0, ge=0, description="Loss weight of the hidden states relative to the output. 0: the output only."
    )
    evaluations: int = Field(
        default=5, ge=1, description="Number of evaluations on data.tuning; each one writes a checkpoint."
    )
    tolerance: float = Field(
        default=0.005,
        ge=0,
        description="Maximum score difference to the best checkpoint, in units of the metric. The last checkpoint "
        "within this difference is kept: it is closer to the float model, and smaller differences are chance on "
        "a few hundred samples.",
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        description="Stop after this many evaluations in a row without a checkpoint worth keeping. null: do not "
        "stop early.",
    )
    seed: int = Field(default=0, ge=0, lt=2**47, description="Seed of the sample order; below 2^47.")


_DELIVERIES = OneOf(("processor", "triton", "gpu_check", *LAYOUTS))
Delivery: TypeAlias = Annotated[str, AfterValidator(_DELIVERIES.check), _DELIVERIES]
"""Additional files for serving the engine."""


class RunConfig(Section):
    """One run: one model, one data set, one engine, one report."""

    model: ModelConfig = Field(description="The float model and its task.")
    quantize: bool = Field(default=True, description="Quantize the model. false: build the engine of the float model.")
    data: DataConfig = Field(description="Samples of each stage; empty if model.source is a function.")
    quantizer: QuantizerConfig = Field(default=QuantizerConfig(), description="What is quantized, and how.")
    amp: AmpConfig | None = Field(
        default=None,
        description="Measurement of the sensitivity of each group. null: not measured, unless fallback or "
        "report.diagnose needs it.",
    )
    fallback: FallbackConfig | None = Field(
        default=None,
        description="Groups to keep in float. null: none. Every choice except names measures amp, with its defaults "
        "if the section is missing.",
    )
    qat: QatConfig | None = Field(default=None, description="Quantization-aware training before export. null: none.")
    export: ExportConfig = Field(default=ExportConfig(), description="Export to ONNX.")
    engine: EngineConfig = Field(default=EngineConfig(), description="Build and execution of the engine.")
    report: ReportConfig = Field(default=ReportConfig(), description="Measurements and the form of the report.")
    deliver: Annotated[tuple[Delivery, ...], BeforeValidator(tuple_from_list), AfterValidator(unique)] = Field(
        default=(),
        description="Additional files for serving the engine of a checkpoint. 'processor': the tokenizer or image "
        "processor and config.json, for quantizer.load_converted. 'triton': a Triton model repository. "
        "'gpu_check': a script that checks an engine that was built for the GPU of another machine. The others "
        "are layouts: folders that this client loads, see docs/how-to/serve-with.md. 'ultralytics' alone is for a "
        "module that a function returns.",
    )
    output: Text = Field(
        default="runs/run",
        description="Folder of the run. The default of a run file is runs/ plus the name of the file.",
    )

    @model_validator(mode="wrap")
    @classmethod
    def _sizes_fit(cls, values: Any, handler: ModelWrapValidatorHandler[RunConfig]) -> RunConfig:
        """Move default sizes into the ranges of ``export.dynamic``, and leave out what a layout cannot express."""
        sections: dict[str, type[Section]] = {"data": DataConfig, "model": ModelConfig, "report": ReportConfig}
        defaults = {
            (name, key): field.default
            for name, section in sections.items()
            for key, field in section.model_fields.items()
        }
        if not isinstance(values, Mapping):
            return handler(values)
        complete = without_factors(values)
        config = handler(with_fitted_sizes(complete, defaults))
        if complete is not values:
            forget_alpha(config)
        return config

    # Field validators check the sections against each other. A validator of the whole run would only run if every
    # section is valid, and could not report its problems with the others. `info.data` holds the valid sections above.

    @field_validator("data")
    @classmethod
    def _rows_fit(cls, data: DataConfig, info: ValidationInfo) -> DataConfig:
        model = info.data.get("model")
        problems = data.problems_with(model, quantize=info.data.get("quantize", True))
        if isinstance(model, ModelConfig) and model.task is not None:
            needs_head = model.task == "embedding-classification"
            if needs_head and data.head is None:
                text = f"is missing; expected samples to fit the classifier of model.task {model.task!r}"
                problems.append(("head", text))
            if not needs_head and data.head is not None:
                problems.append(("head", f"is not used by model.task {model.task!r}; remove it"))
        remedy = "expected other samples, by path, split, or offset and samples"
        for name, samples, other, other_samples in (
            ("tuning", data.tuning, "evaluation", data.evaluation),
            ("training", data.training, "evaluation", data.evaluation),
            ("training", data.training, "tuning", data.tuning),
        ):
            if samples is not None and other_samples is not None and samples.overlaps(other_samples):
                used = "the search was scored on" if name == "tuning" else "the model was trained on"
                text = f"shares samples with data.{other}; a score on samples that {used} is too good; {remedy}"
                problems.append((name, text))
        if problems:
            reject(*problems)
        return data

    @field_validator("qat")
    @classmethod
    def _choices_have_what_they_need(cls, qat: QatConfig | None, info: ValidationInfo) -> QatConfig | None:
        """Check that ``amp``, ``data.tuning`` and ``data.training`` are set exactly if they are needed."""
        problems = []
        model, data, amp, fallback = (info.data.get(name) for name in ("model", "data", "amp", "fallback"))
        if isinstance(fallback, FallbackConfig) and fallback.names is None and "amp" in info.data and amp is None:
            text = "needs the sensitivities that amp measures; expected an amp section, such as amp: {}"
            problems.append(("/fallback", text))
        users = ["fallback.max_drop"] if isinstance(fallback, FallbackConfig) and fallback.max_drop is not None else []
        users += ["amp.measure 'metric'"] if isinstance(amp, AmpConfig) and amp.measure == "metric" else []
        if isinstance(model, ModelConfig) and model.task is None:
            if users and model.metric is None:
                text = "is missing; expected a function that returns a score, such as 'my_pkg.data:score', for "
                problems.append(("/model.metric", text + " and ".join(users)))
            if qat is not None:
                text = "trains only checkpoints; remove it, and train your module in Python with Quantizer.qat"
                problems.append(("", text))
            if problems:
                reject(*problems)
            return qat
        users += ["qat"] if qat is not None else []
        if isinstance(data, DataConfig) and users and data.tuning is None:
            text = f"is missing; expected labelled samples for {' and '.join(users)} that are not in evaluation"
            problems.append(("/data.tuning", text))
        known = "amp" in info.data and "fallback" in info.data
        if isinstance(data, DataConfig) and known and not users and data.tuning is not None:
            condition = "" if fallback is None else ", but this fallback has no max_drop"
            text = f"is only used by fallback.max_drop, amp.measure 'metric' and qat{condition}; remove it"
            text += "" if fallback is None else " (~data.tuning on the command line)"
            problems.append(("/data.tuning", text))
        if isinstance(data, DataConfig) and qat is not None and data.training is None:
            problems.append(("/data.training", "is missing; expected the training samples of qat"))
        if isinstance(data, DataConfig) and qat is None and data.training is not None:
            problems.append(("/data.training", "is only used by qat; remove it, or add qat: {}"))
        if problems:
            reject(*problems)
        return qat

    @field_validator("amp", "fallback", "qat")
    @classmethod
    def _is_of_a_quantized_model(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None and not info.data.get("quantize", True):
            reject(("", "is not used, because quantize is false; remove it"))
        return value

    @field_validator("export")
    @classmethod
    def _engine_takes_the_data(cls, export: ExportConfig, info: ValidationInfo) -> ExportConfig:
        problems = []
        data, model, quantizer = (info.data.get(name) for name in ("data", "model", "quantizer"))
        if isinstance(quantizer, QuantizerConfig) and export.opset < _HALF_SCALES_OPSET:
            half = quantizer.target.float_dtype
            if half != "float32":
                text = f"got {export.opset}; expected {_HALF_SCALES_OPSET} or later, because {half} scales need it"
                problems.append(("opset", text))
        rows, tokens = export.dynamic.batch[2], export.dynamic.sequence[2]
        reads = isinstance(model, ModelConfig) and model.task is not None
        if reads and isinstance(data, DataConfig) and data.batch_size > rows:
            problems.append(
                ("dynamic.batch", f"the maximum is {rows}; expected at least data.batch_size, {data.batch_size}")
            )
        if reads and isinstance(model, ModelConfig) and model.max_length > tokens:
            text = f"the maximum is {tokens}; expected at least model.max_length, {model.max_length}"
            problems.append(("dynamic.sequence", text))
        if problems:
            reject(*problems)
        return export

    @field_validator("deliver")
    @classmethod
    def _is_of_a_checkpoint(cls, deliver: tuple[Delivery, ...], info: ValidationInfo) -> tuple[Delivery, ...]:
        model = info.data.get("model")
        others = [name for name in deliver if name not in OF_MODULES]
        if others and isinstance(model, ModelConfig) and model.task is None:
            text = "is only for checkpoints; remove it, and load the folder of your module with quantizer.load"
            reject(("", f"{others[0]!r} {text}"))
        return deliver

    @field_validator("report")
    @classmethod
    def _latency_is_in_range(cls, report: ReportConfig, info: ValidationInfo) -> ReportConfig:
        problems = []
        model, export = info.data.get("model"), info.data.get("export")
        task = model.task if isinstance(model, ModelConfig) else ""
        if isinstance(export, ExportConfig):
            for key, size, axis in (
                ("latency_batch", report.latency_batch, "batch"),
                ("latency_sequence", report.latency_sequence, "sequence"),
            ):
                # Sizes that are not set come from the batches of a function, and from recordings.
                in_data = task is None or (axis == "sequence" and task in TASKS_OF_RECORDINGS)
                if in_data and not (key in report.model_fields_set and axis in export.dynamic.model_fields_set):
                    continue
                low, _, high = export.dynamic.batch if axis == "batch" else export.dynamic.sequence
                if not low <= size <= high:
                    problems.append((key, f"got {size}; expected {low} to {high}, the range of export.dynamic.{axis}"))
        if problems:
            reject(*problems)
        return report


def check_formats(config: QuantizerConfig) -> None:
    """Check that the target supports all formats.

    Raises:
        ConfigError: a list of all formats that the target does not support.
    """
    problems = impossible(default_format(config), rule_formats(config), config.target)
    if problems:
        raise ConfigError(problems)


def least_opset(config: QuantizerConfig) -> int:
    """Return the first ONNX opset that can represent all formats of a configuration."""
    return _least_opset([default_format(config), *rule_formats(config)])[0]


def _least_opset(formats: Iterable[Format]) -> tuple[int, str]:
    """Return the first opset with all formats, and the key of a format that requires it."""
    return max((least_opset_of(entry), entry.rule or "dtype") for entry in formats)


def check_run(config: RunConfig) -> None:
    """Check that the target of a run supports its settings, before anything is loaded.

    Raises:
        ConfigError: a list of all formats, precisions, compute capabilities, options and layouts that the target, the
            opset or the task does not support.
    """
    named = config.quantizer.candidates
    target = config.quantizer.target if named else config.quantizer.target_on(config.engine.device or "cpu")
    default, rules = default_format(config.quantizer), rule_formats(config.quantizer)
    formats = [default, *rules]
    problems = impossible(default, rules, target)
    least, which = _least_opset(formats)
    if config.export.opset < least:
        problems.append(
            f"export.opset: got {config.export.opset}; expected {least} or later, because the formats of "
            f"quantizer.{which} need it"
        )
    names = {dtype.name for entry in formats for dtype in (entry.activations, entry.weights) if dtype is not None}
    capabilities = config.engine.compute_capability or ()
    unsupported = engine_problems(
        [target],
        formats=names,
        capabilities=[capabilities] if isinstance(capabilities, str) else capabilities,
        precision=config.engine.inference_precision,
        strip_weights=config.engine.strip_weights,
    )
    problems += [f"engine.{problem.place}: {problem.text}" for problem in unsupported]
    problems += [*_device_problems(config), *layout_problems(config)]
    if problems:
        raise ConfigError(problems)


def _device_problems(config: RunConfig) -> Iterator[str]:
    """Yield a problem if the named backends run on another device than ``engine.device``."""
    device, settings = config.engine.device, config.quantizer
    names = settings.candidates or (() if settings.backend == AUTO else (settings.backend,))
    others = [name for name in names if device is not None and profile(name).device != device]
    if others:
        where = "an NVIDIA GPU" if device == "cpu" else "the CPU"
        also = ", such as torch-cuda for torch" if device == "cuda" else ""
        yield (
            f"engine.device: got {device!r}, but {' and '.join(others)} runs on {where}; remove it, or name backends "
            f"of that device{also}"
        )


def default_format(config: QuantizerConfig) -> Format:
    """Return the format of sites that no rule matches."""
    dynamic = config.activations.ranges == "dynamic"
    return Format(activations=_activations(config, None, dynamic), weights=qtype(config.dtype), dynamic=dynamic)


def rule_formats(config: QuantizerConfig) -> list[Format]:
    """Return the format of each rule in ``formats``, in order."""
    default = config.activations.ranges if config.activations.ranges == "dynamic" else None
    return [
        Format(
            activations=_activations(config, rule.activations, (rule.activations or default) == "dynamic"),
            weights=qtype(rule.weights or config.dtype),
            dynamic=(rule.activations or default) == "dynamic",
            block_size=rule.block_size,
            rule=RuleKind.FORMAT.text(key=number),
        )
        for number, rule in enumerate(config.formats)
    ]


def _activations(config: QuantizerConfig, name: str | None, dynamic: bool) -> QType | None:
    """Return the format of activations; None if they are not quantized."""
    if dynamic:
        kernels = config.target.dynamic
        # Without kernels, the format is rejected later, whatever its type.
        return UINT8 if kernels is None else qtype(kernels.dtype)
    return None if name == "float" else qtype(name or config.dtype)
