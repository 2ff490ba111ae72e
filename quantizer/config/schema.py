"""The configuration of one run: ``RunConfig``, and the sections without a file of their own.

Checks of a configuration against a target's profile, before anything is loaded.

The ``qat:`` section: training of the model with rounded operands, on the outputs of the float model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from quantizer.config.data_section import DataConfig, ModelConfig
from quantizer.config.quantizer_section import (
    AmpConfig,
    AxisRange,
    Expects,
    FallbackConfig,
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
from quantizer.plan.targets.base import engine_problems

_HALF_SCALES_OPSET = 19
"""The first opset in which QuantizeLinear accepts half scales."""


class DynamicConfig(Section):
    """Sizes of the dynamic axes, as [min, opt, max]."""

    batch: AxisRange = Field(default=(1, 8, 32), description="Samples in a batch.")
    sequence: AxisRange = Field(default=(16, 128, 512), description="Tokens in a sample of text; images have none.")


class ExportConfig(Section):
    """The form of the ONNX file."""

    opset: int = Field(
        default=20,
        ge=18,
        le=24,
        description="ONNX operator set: 18 is the first that torch's exporter writes, 24 the last that TensorRT reads.",
    )
    dynamic: DynamicConfig = Field(
        default=DynamicConfig(),
        description="Sizes of the dynamic axes. TensorRT's engines take these alone; OpenVINO's have models of their "
        "own for those in the middle, and for the fewest rows.",
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
    """The build and the run of the engine."""

    compute_capability: Annotated[
        str | tuple[str, ...] | None,
        WrapValidator(lambda value, _: _capability(value)),
        Expects("a compute capability such as 'sm89', or a list of such"),
    ] = Field(
        default=None,
        description="GPUs that the engine is built for ahead of time: 'sm89', or a list for several in one engine; "
        "null: the one in this machine.",
    )
    inference_precision: Literal["float32", "bfloat16"] | None = Field(
        default=None,
        description="What OpenVINO computes in where nothing is quantized; null: float32. Other backends take the "
        "types of the ONNX file.",
    )
    compiled: bool | None = Field(
        default=None,
        description="Whether Inductor compiles the graph of a torch engine; null: where there is a C++ compiler and "
        "that is faster.",
    )
    strip_weights: bool = Field(
        default=False,
        description="Write TensorRT engines without weights: loading one reads them from the ONNX file beside it.",
    )
    threads: int = Field(default=1, ge=1, description="CPU threads that the engine runs with.")


class ReportConfig(Section):
    """The measurements at the end, and the form of the report."""

    formats: Annotated[
        tuple[Literal["json", "html"], ...],
        BeforeValidator(tuple_from_list),
        AfterValidator(some_and_unique),
    ] = Field(default=("json", "html"), description="Files to write.")
    latency_batch: int = Field(
        default=8,
        ge=1,
        description="Samples in a batch when latency is measured. The usual ones of export.dynamic.batch if 8 are "
        "not in "
        "its range.",
    )
    latency_sequence: int = Field(
        default=128,
        ge=1,
        description="Tokens in a sample of text when latency is measured; images have none. The usual ones of "
        "export.dynamic.sequence if 128 are not in its range.",
    )
    latency_shapes: Literal["usual", "all"] = Field(
        default="usual",
        description="Sizes at which latency is measured: 'usual', those of latency_batch and latency_sequence, or "
        "'all', the least, the usual and the largest of export.dynamic, with the float model in PyTorch beside.",
    )
    tolerance: float | None = Field(
        default=None,
        description="The least SQNR of an engine's outputs against PyTorch's, in dB; null: 30 for a quantized engine, "
        "60 for one in float32 and 30 in half precision.",
    )
    bootstrap: int = Field(default=1000, ge=1, description="Resamples behind each confidence interval.")
    track: Literal["mlflow", "tensorboard", "wandb"] | None = Field(
        default=None,
        description="Where the results are sent too: files beside the run's folder, or what the tracker's own "
        "environment variables name; null: nowhere.",
    )


_Kind = Literal["fixed", "average", "learned"]


def _scales(value: Any) -> str | dict[str, str]:
    kinds = get_args(_Kind)
    given = list(value.values()) if isinstance(value, dict) else [value]
    named = not isinstance(value, dict) or all(isinstance(pattern, str) for pattern in value)
    if not given or not named or not all(isinstance(kind, str) and kind in kinds for kind in given):
        raise PydanticCustomError("scales", f"Input should be one of {', '.join(kinds)}, or such by pattern")
    return value  # type: ignore[no-any-return]


class QatConfig(Section):
    """A short training on data.training towards the outputs of the float model; labels are not used."""

    epochs: float = Field(
        default=0.5,
        gt=0,
        description="Passes over data.training: a tenth, or some more, of those that the model was fine-tuned with.",
    )
    learning_rate: float = Field(
        default=2e-5,
        gt=0,
        lt=1,
        description="The highest rate, about 1% of that of a training from scratch; it rises over the first tenth of "
        "the steps and falls with a cosine.",
    )
    scale_learning_rate: float = Field(
        default=0.2,
        gt=0,
        lt=1,
        description="The highest rate of learned scales of activations: how far a step moves one at most, as a share "
        "of it. Learned scales of weights have the rate of the weights.",
    )
    scales: Annotated[
        _Kind | dict[str, _Kind],
        WrapValidator(lambda value, _: _scales(value)),
        Expects("fixed, average or learned, or a mapping of patterns to these"),
    ] = Field(
        default="learned",
        description="What becomes of the scales: 'fixed' as calibrated, 'average' follows the values, 'learned' is "
        "trained; or these by pattern of sites and operands ('**.weight': fixed), of which the last that matches "
        "decides.",
    )
    freeze_scales: float = Field(default=0.8, ge=0, le=1, description="Share of the steps after which scales stay.")
    temperature: float = Field(
        default=1.0, gt=0, description="Both models' logits are divided by it before they are compared."
    )
    hidden: float = Field(
        default=10.0, ge=0, description="Weight of the hidden states beside the output; 0: the output alone."
    )
    evaluations: int = Field(
        default=5, ge=1, description="How often the score on data.tuning is taken, with a checkpoint each time."
    )
    tolerance: float = Field(
        default=0.005,
        ge=0,
        description="The state that is kept is the last whose score is at most so much worse than the best: scores of "
        "some hundred rows differ by that much by chance, and the later state is nearer to the float model.",
    )
    patience: int | None = Field(
        default=None, ge=1, description="Stop after so many scores that are none to keep; null: never."
    )
    seed: int = Field(default=0, ge=0, lt=2**47, description="Decides the order of the rows; below 2^47.")


Delivery: TypeAlias = Literal["processor", "triton", "gpu_check"]
"""What a folder may hold for those who serve its engine."""


class RunConfig(Section):
    """One run: one model, one data set, one engine, one report."""

    model: ModelConfig = Field(description="The float model and its task.")
    quantize: bool = Field(
        default=True, description="Quantize the model; false: the engine is that of the float model."
    )
    data: DataConfig = Field(description="The rows of each stage; none where model.source is a function.")
    quantizer: QuantizerConfig = Field(default=QuantizerConfig(), description="What is quantized, and how.")
    amp: AmpConfig | None = Field(default=None, description="Measure what each group costs; null: do not.")
    fallback: FallbackConfig | None = Field(
        default=None,
        description="Put groups back to the fallback type; null: none. All but names measure amp, with the defaults "
        "of that where a file has none.",
    )
    qat: QatConfig | None = Field(
        default=None, description="Train the model with rounded operands before it is exported; null: do not."
    )
    export: ExportConfig = Field(default=ExportConfig(), description="How the ONNX file is written.")
    engine: EngineConfig = Field(default=EngineConfig(), description="How the engine is built and run.")
    report: ReportConfig = Field(default=ReportConfig(), description="What is measured at the end.")
    deliver: Annotated[tuple[Delivery, ...], BeforeValidator(tuple_from_list), AfterValidator(unique)] = Field(
        default=(),
        description="What the folder holds besides, for those who serve the engine of a checkpoint: 'processor', the "
        "tokenizer or image processor with config.json, for quantizer.load_converted; 'triton', a model "
        "repository; 'gpu_check', a script that checks an engine that was built for a GPU elsewhere.",
    )
    output: Text = Field(
        default="runs/run", description="Folder of the run; a file's default is runs/ and the file's own name."
    )

    @model_validator(mode="before")
    @classmethod
    def _sizes_fit(cls, values: Any) -> Any:
        """Let sizes that are not set fit those of the engine that are."""
        sections: dict[str, type[Section]] = {"data": DataConfig, "model": ModelConfig, "report": ReportConfig}
        defaults = {
            (name, key): field.default
            for name, section in sections.items()
            for key, field in section.model_fields.items()
        }
        return with_fitted_sizes(values, defaults) if isinstance(values, Mapping) else values

    # Sections are checked against each other field by field: a validator of the whole run would run only if every
    # section is valid, and so would not report its problems together with others. `info.data` has the valid sections
    # above.

    @field_validator("data")
    @classmethod
    def _rows_fit(cls, data: DataConfig, info: ValidationInfo) -> DataConfig:
        model = info.data.get("model")
        problems = data.problems_with(model, quantize=info.data.get("quantize", True))
        if isinstance(model, ModelConfig) and model.task is not None:
            needs_head = model.task == "embedding-classification"
            if needs_head and data.head is None:
                text = f"is missing; expected the rows to fit the classifier of model.task {model.task!r} on"
                problems.append(("head", text))
            if not needs_head and data.head is not None:
                problems.append(("head", f"is not used by model.task {model.task!r}; remove it"))
        other_rows = "expected other samples, by path, split, or offset and rows"
        for name, rows, place, judged in (
            ("tuning", data.tuning, "evaluation", data.evaluation),
            ("training", data.training, "evaluation", data.evaluation),
            ("training", data.training, "tuning", data.tuning),
        ):
            if rows is not None and judged is not None and rows.overlaps(judged):
                used = "the choice was made on" if name == "tuning" else "the model was trained on"
                text = f"has rows of data.{place}: a score on rows that {used} is better than the model; {other_rows}"
                problems.append((name, text))
        if problems:
            reject(*problems)
        return data

    @field_validator("qat")
    @classmethod
    def _choices_have_what_they_need(cls, qat: QatConfig | None, info: ValidationInfo) -> QatConfig | None:
        """Return ``qat`` if amp, and rows to tune and train on, are configured if needed and only then."""
        problems = []
        model, data, amp, fallback = (info.data.get(name) for name in ("model", "data", "amp", "fallback"))
        if isinstance(fallback, FallbackConfig) and fallback.names is None and "amp" in info.data and amp is None:
            text = "needs the ranking that amp measures; expected an amp section, such as amp: {}"
            problems.append(("/fallback", text))
        users = ["fallback.max_drop"] if isinstance(fallback, FallbackConfig) and fallback.max_drop is not None else []
        users += ["amp.measure 'metric'"] if isinstance(amp, AmpConfig) and amp.measure == "metric" else []
        if isinstance(model, ModelConfig) and model.task is None:
            if users and model.metric is None:
                text = "is missing; expected the function that scores, such as 'my_pkg.data:score', for "
                problems.append(("/model.metric", text + " and ".join(users)))
            if qat is not None:
                text = "trains checkpoints; remove it: a module of one's own is trained in Python, by Quantizer.qat"
                problems.append(("", text))
            if problems:
                reject(*problems)
            return qat
        users += ["qat"] if qat is not None else []
        if isinstance(data, DataConfig) and users and data.tuning is None:
            text = f"is missing; expected the rows to score on for {' and '.join(users)}, none of them of evaluation"
            problems.append(("/data.tuning", text))
        known = "amp" in info.data and "fallback" in info.data
        if isinstance(data, DataConfig) and known and not users and data.tuning is not None:
            way = "" if fallback is None else ", and this fallback has no max_drop"
            text = f"is used by fallback.max_drop, amp.measure 'metric' and qat only{way}; remove it"
            text += "" if fallback is None else " (~data.tuning on the command line)"
            problems.append(("/data.tuning", text))
        if isinstance(data, DataConfig) and qat is not None and data.training is None:
            problems.append(("/data.training", "is missing; expected the rows that qat trains on"))
        if isinstance(data, DataConfig) and qat is None and data.training is not None:
            problems.append(("/data.training", "is used by qat only; remove it, or add qat: {}"))
        if problems:
            reject(*problems)
        return qat

    @field_validator("amp", "fallback", "qat")
    @classmethod
    def _is_of_a_quantized_model(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None and not info.data.get("quantize", True):
            reject(("", "is for a quantized model, and quantize is false; remove it"))
        return value

    @field_validator("export")
    @classmethod
    def _engine_takes_the_data(cls, export: ExportConfig, info: ValidationInfo) -> ExportConfig:
        problems = []
        data, model, quantizer = (info.data.get(name) for name in ("data", "model", "quantizer"))
        if isinstance(quantizer, QuantizerConfig) and export.opset < _HALF_SCALES_OPSET:
            half = quantizer.target.float_dtype
            if half != "float32":
                text = f"got {export.opset}; expected {_HALF_SCALES_OPSET} or later, the first with {half} scales"
                problems.append(("opset", text))
        rows, tokens = export.dynamic.batch[2], export.dynamic.sequence[2]
        reads = isinstance(model, ModelConfig) and model.task is not None
        if reads and isinstance(data, DataConfig) and data.batch_size > rows:
            problems.append(("dynamic.batch", f"max is {rows}; expected at least data.batch_size, {data.batch_size}"))
        if reads and isinstance(model, ModelConfig) and model.max_length > tokens:
            text = f"max is {tokens}; expected at least model.max_length, {model.max_length}"
            problems.append(("dynamic.sequence", text))
        if problems:
            reject(*problems)
        return export

    @field_validator("deliver")
    @classmethod
    def _is_of_a_checkpoint(cls, deliver: tuple[Delivery, ...], info: ValidationInfo) -> tuple[Delivery, ...]:
        model = info.data.get("model")
        if deliver and isinstance(model, ModelConfig) and model.task is None:
            reject(("", "is for checkpoints; remove it: quantizer.load reads the folder of a module"))
        return deliver

    @field_validator("report")
    @classmethod
    def _latency_is_in_range(cls, report: ReportConfig, info: ValidationInfo) -> ReportConfig:
        problems = []
        model, export = info.data.get("model"), info.data.get("export")
        batches = isinstance(model, ModelConfig) and model.task is None
        if isinstance(export, ExportConfig):
            for key, size, axis in (
                ("latency_batch", report.latency_batch, "batch"),
                ("latency_sequence", report.latency_sequence, "sequence"),
            ):
                # What is not set comes from the batches of a function.
                if batches and not (key in report.model_fields_set and axis in export.dynamic.model_fields_set):
                    continue
                low, _, high = export.dynamic.batch if axis == "batch" else export.dynamic.sequence
                if not low <= size <= high:
                    problems.append((key, f"got {size}; expected {low} to {high}, the export.dynamic.{axis} range"))
        if problems:
            reject(*problems)
        return report


def check_formats(config: QuantizerConfig) -> None:
    """Raise if the target does not support all formats.

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
    """Return the first opset with all formats, and the key of one that needs it."""
    return max((least_opset_of(entry), entry.rule or "dtype") for entry in formats)


def check_run(config: RunConfig) -> None:
    """Raise if the target of a run does not support its settings, before anything is loaded.

    Raises:
        ConfigError: a list of all formats that the target or the opset lacks, and of an inference precision, a compute
            capability (or its formats) or engines without weights if the target does not support them.
    """
    target = config.quantizer.target
    default, rules = default_format(config.quantizer), rule_formats(config.quantizer)
    formats = [default, *rules]
    problems = impossible(default, rules, target)
    least, which = _least_opset(formats)
    if config.export.opset < least:
        problems.append(
            f"export.opset: got {config.export.opset}; expected {least} or later, the first with the formats of "
            f"quantizer.{which}"
        )
    names = {dtype.name for entry in formats for dtype in (entry.activations, entry.weights) if dtype is not None}
    wanted = config.engine.compute_capability or ()
    found = engine_problems(
        [target],
        formats=names,
        capabilities=[wanted] if isinstance(wanted, str) else wanted,
        precision=config.engine.inference_precision,
        strip_weights=config.engine.strip_weights,
    )
    problems += [f"engine.{problem.place}: {problem.text}" for problem in found]
    if problems:
        raise ConfigError(problems)


def default_format(config: QuantizerConfig) -> Format:
    """Return the format of sites that no rule matches."""
    dynamic = config.activations.ranges == "dynamic"
    return Format(activations=_activations(config, None, dynamic), weights=qtype(config.dtype), dynamic=dynamic)


def rule_formats(config: QuantizerConfig) -> list[Format]:
    """Return the format of each rule of ``formats``, in their order."""
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


def _activations(config: QuantizerConfig, wanted: str | None, dynamic: bool) -> QType | None:
    """Return the format of activations, by the name that a rule gives it; None: they are not quantized."""
    if dynamic:
        kernels = config.target.dynamic
        # Without kernels the format is refused, whatever its codes.
        return UINT8 if kernels is None else qtype(kernels.dtype)
    return None if wanted == "float" else qtype(wanted or config.dtype)
