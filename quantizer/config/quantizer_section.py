"""The ``quantizer:`` section: quantized sites, formats, calibrators and the backend.

The file also holds the ``amp:`` and ``fallback:`` sections, the presets, and the base class and field types of all
sections.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NoReturn

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from quantizer.plan.targets.base import AUTO, TargetProfile, profile, profiles
from quantizer.utils.registry import CALIBRATORS, Registry


class Section(BaseModel):
    """A mapping in the YAML file: frozen, without unknown keys, and without type conversion."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)


@dataclass(frozen=True)
class Expects:
    """The accepted values of a field in words, if its type does not describe them.

    Attributes:
        words: the text that follows "expected ..." in error messages.
    """

    words: str


@dataclass(frozen=True)
class OneOf:
    """Validator of a field that accepts the names in a registry, including names added later, or some fixed names."""

    registry: Registry[Any] | tuple[str, ...]

    def check(self, name: str) -> str:
        """Return the name if the registry has it.

        Raises:
            PydanticCustomError: the name is not in the registry.
        """
        if name not in self.registry:
            known = ", ".join(map(repr, self.registry))
            raise PydanticCustomError("one_of", "Input should be one of {known}", {"known": known})
        return name


def reject(*problems: tuple[str, str]) -> NoReturn:
    """Raise a validation error for values that contradict each other.

    Args:
        problems: path and text of each problem. A path is relative to the validated value: "latency_batch", or "" for
            the value itself. A path such as "/data.head" starts at the top of the file.
    """
    summary = "; ".join(f"{path.lstrip('/')}: {text}" if path else text for path, text in problems)
    raise PydanticCustomError("cross_field", "{summary}", {"summary": summary, "problems": list(problems)})


def tuple_from_list(value: Any) -> Any:
    """Return a list as a tuple, and any other value unchanged for the type check to reject."""
    return tuple(value) if isinstance(value, list) else value


def _check_range(value: tuple[int, int, int]) -> tuple[int, int, int]:
    low, best, high = value
    if not 1 <= low <= best <= high:
        reject(("", f"got {list(value)}; expected [min, opt, max] with 1 <= min <= opt <= max"))
    return value


def some_and_unique(value: Sequence[Any]) -> Sequence[Any]:
    """Return a sequence without changes; raise if it is empty or has duplicates."""
    if not value:
        reject(("", "is an empty list; expected at least one entry"))
    return unique(value)


def unique(value: Sequence[Any]) -> Sequence[Any]:
    """Return a sequence without changes; raise if it has duplicates."""
    duplicates = sorted({entry for entry in value if value.count(entry) > 1})
    if duplicates:
        reject(("", f"{duplicates[0]!r} is listed twice; expected each entry once"))
    return value


Text = Annotated[str, StringConstraints(min_length=1)]
"""A string that is not empty."""

TextList = Annotated[tuple[Text, ...], BeforeValidator(tuple_from_list)]
"""A YAML list of strings, as a tuple so that a configuration is immutable."""

AxisRange = Annotated[
    tuple[int, int, int],
    BeforeValidator(tuple_from_list),
    AfterValidator(_check_range),
    Expects("three whole numbers [min, opt, max]"),
]
"""The sizes of a dynamic axis: [min, opt, max]."""


_BY_OUTPUT = {"calibrator": "output", "smoothquant_alpha": "auto", "zero_point": True}

_NO_SEARCH = {"weights": {"rounding": "nearest"}, "bias_correction": False}
"""Weights and biases without a search."""

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "plain": {
        "activations": {
            "calibrator": "percentile",
            "percentile": 99.99,
            "smoothquant_alpha": None,
            "zero_point": False,
        },
        **_NO_SEARCH,
    },
    # SmoothQuant removes the outliers that other calibrators clip.
    "fast": {"activations": {"calibrator": "max", "smoothquant_alpha": 0.8, "zero_point": True}, **_NO_SEARCH},
    "balanced": {"activations": _BY_OUTPUT, "weights": {"rounding": "nearest"}, "bias_correction": True},
    "accurate": {"activations": _BY_OUTPUT, "weights": {"rounding": "gptq"}, "bias_correction": True},
}
"""Values of keys of the ``quantizer`` section and its subsections; other keys have the default of the schema."""

DEFAULT: Literal["balanced"] = "balanced"

_LINKED = {"calibrator": ("calibrator", "percentile"), "percentile": ("calibrator", "percentile")}
"""Keys that belong together: if a configuration sets one of them, the preset sets none."""

_SIZE_KEYS = {"batch": ("data", "batch_size"), "sequence": ("model", "max_length")}
"""The key with the size of a batch or text, by the axis of ``export.dynamic`` that must contain it."""


def with_preset(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a ``quantizer`` section, completed by its preset.

    Values of a wrong type stay unchanged for the validation to reject.
    """
    completed = dict(values)
    preset = completed.get("preset", DEFAULT)
    for name, default in PRESETS.get(preset, {}).items() if isinstance(preset, str) else ():
        if not isinstance(default, Mapping):
            completed.setdefault(name, default)
            continue
        section = completed.get(name, {})
        if isinstance(section, Mapping):
            free = {key: value for key, value in default.items() if not set(_LINKED.get(key, (key,))) & set(section)}
            completed[name] = {**free, **section}
    return completed


def preset_keys(section: str) -> frozenset[str]:
    """Return the keys that any preset sets in ``quantizer`` or in one of its subsections."""
    sections = (preset if section == "quantizer" else preset.get(section, {}) for preset in PRESETS.values())
    return frozenset(key for keys in sections for key, value in keys.items() if not isinstance(value, Mapping))


def with_fitted_sizes(values: Mapping[str, Any], defaults: Mapping[tuple[str, str], int]) -> dict[str, Any]:
    """Return the values of a run with default sizes moved into the ranges of ``export.dynamic``.

    ``data.batch_size`` and ``model.max_length`` shrink to the maximum of the range. The sizes of latency benchmarks
    become the opt size if they are outside the range. Values of a wrong type stay unchanged for the validation to
    reject.

    Args:
        values: the sections of a run.
        defaults: the default of each size, by section and key.
    """
    fitted = dict(values)
    model = _section(values, "model")
    if model is None or model.get("task") is None:
        # The batches of a function decide the sizes.
        return fitted
    dynamic = _section(_section(values, "export") or {}, "dynamic") or {}
    for axis, read in _SIZE_KEYS.items():
        sizes = dynamic.get(axis)
        if not isinstance(sizes, list | tuple) or [type(size) for size in sizes] != [int] * 3:
            continue
        low, usual, high = sizes
        for key, minimum, fallback in ((read, 0, high), (("report", f"latency_{axis}"), low, usual)):
            section = _section(fitted, key[0])
            if section is not None and not minimum <= defaults[key] <= high:
                fitted[key[0]] = {key[1]: fallback, **section}
    return fitted


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Return a section, empty for a missing key; None for other values than mappings."""
    section = values.get(name, {})
    return section if isinstance(section, Mapping) else None


_MAX_EVALUATIONS = 25
_CHOICES = ("num", "ratio", "names", "max_drop", "min_speedup")


class AmpConfig(Section):
    """Measurement of the sensitivity of each precision group."""

    measure: Literal["gradient", "output", "local", "metric"] = Field(
        default="gradient",
        description="How the sensitivity of a group is measured. 'gradient': estimated error of the model's output, "
        "from one backward pass for all groups. 'output': computed error of the output, with one forward pass "
        "per group. 'local': error at the group's own sites. 'metric': drop of the score on data.tuning, with "
        "one evaluation per group.",
    )
    granularity: Literal["group", "layer", "block"] = Field(
        default="group",
        description="What is measured and kept in float as one unit. 'group' is the smallest unit that can change "
        "precision.",
    )
    # All 128 calibration samples of our example files. 'gradient' needs a few runs per batch for any number of groups.
    batches: int = Field(
        default=4, ge=1, description="Number of calibration batches to measure on; 'metric' uses data.tuning instead."
    )


class FallbackConfig(Section):
    """Choice of the groups to keep in float. Exactly one of the first five keys must be set."""

    num: int | None = Field(
        default=None, ge=1, description="Number of groups to keep in float, the most sensitive first."
    )
    ratio: float | None = Field(
        default=None, gt=0, le=1, description="Fraction of all groups to keep in float, the most sensitive first."
    )
    names: Annotated[TextList, AfterValidator(some_and_unique)] | None = Field(
        default=None,
        description="Groups, modules, sites or operands to keep in float; '*' matches one segment and '**' any "
        "number. Does not need amp.",
    )
    max_drop: float | None = Field(
        default=None,
        ge=0,
        description="Maximum drop of the score on data.tuning below the float model's score, in units of the "
        "metric. As few groups as possible are kept in float. In Python, Quantizer.fallback also accepts a "
        "negative drop, which is a gain.",
    )
    min_speedup: float | None = Field(
        default=None,
        gt=0,
        description="Minimum speed of the engine relative to the float engine, such as 2.0 for twice as fast. The most "
        "sensitive groups are kept in float as long as the engine stays this fast.",
    )
    # Null, because a file with all defaults filled in must be valid without a search.
    max_evaluations: int | None = Field(
        default=None,
        ge=2,
        description=f"Maximum number of scores that a max_drop search measures, including the float model's. null: "
        f"{_MAX_EVALUATIONS}.",
    )
    costs: Literal["multiply_adds"] | None = Field(
        default=None,
        description="Cost of keeping a group in float; groups with the most accuracy per cost are kept in float "
        "first. null: with max_drop, the measured latency cost if the engine runs on this machine; otherwise "
        "all groups cost the same.",
    )

    @property
    def evaluations(self) -> int:
        """The maximum number of scores that a search measures."""
        return _MAX_EVALUATIONS if self.max_evaluations is None else self.max_evaluations

    @model_validator(mode="after")
    def _fit_together(self) -> FallbackConfig:
        problems = []
        chosen = [name for name in _CHOICES if getattr(self, name) is not None]
        if not chosen:
            known = f"{', '.join(_CHOICES[:-1])} and {_CHOICES[-1]}"
            problems.append(("", f"none of {known} is set; expected exactly one, such as num: 4"))
        elif len(chosen) > 1:
            settings = [f"{name} is {_shown(getattr(self, name))}" for name in chosen]
            others = "the other" if len(chosen) == 2 else "the others"
            both = f"{', '.join(settings[:-1])} and {settings[-1]}"
            problems.append(("", f"{both}; expected exactly one: remove {others}"))
        if chosen and "max_drop" not in chosen and self.max_evaluations is not None:
            problems.append(("max_evaluations", "is only for max_drop, which is not set; remove it"))
        if chosen == ["names"] and self.costs is not None:
            problems.append(("costs", "is not used, because names selects the groups; remove it"))
        if chosen == ["min_speedup"] and self.costs is not None:
            problems.append(("costs", "is not used, because min_speedup uses measured latencies; remove it"))
        if problems:
            reject(*problems)
        return self


def _shown(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _percentile(value: Any) -> float | tuple[float, ...]:
    if isinstance(value, list | tuple):
        if not value:
            reject(("", "is an empty list; expected at least one number"))
        return tuple(_percentile_number(entry) for entry in value)
    return _percentile_number(value)


def _plain_percentile(value: float | tuple[float, ...]) -> float | list[float]:
    return list(value) if isinstance(value, tuple) else value


def _percentile_number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 100:
        raise PydanticCustomError("percentile", "Input should be a number above 0 and at most 100")
    return float(value)


def _smooth(value: Any) -> float | str | None:
    if value is None or value == "auto":
        return value  # type: ignore[no-any-return]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise PydanticCustomError("smooth", "Input should be a number above 0 and at most 1, 'auto' or null")
    return float(value)


_CALIBRATORS = OneOf(CALIBRATORS)


class ActivationsConfig(Section):
    """Estimation of activation ranges."""

    ranges: Literal["static", "dynamic"] = Field(
        default="static",
        description="'static': ranges come from calibration. 'dynamic': each run computes the range of each tensor; "
        "only sites with such kernels are quantized (linear layers on CPUs).",
    )
    calibrator: Annotated[str, AfterValidator(_CALIBRATORS.check), _CALIBRATORS] = Field(
        default="percentile",
        description="Method that estimates the range of an activation. 'auto' chooses a method for each site; 'output' "
        "chooses one method for all sites, by the error of the model's output.",
    )
    percentile: Annotated[
        float | tuple[float, ...],
        WrapValidator(lambda value, _: _percentile(value)),
        Expects("a number, above 0 and at most 100, or a list of such numbers"),
    ] = Field(
        default=99.99,
        description="Percentage of the absolute values that the range covers, for calibrator 'percentile'. From a "
        "list, the value with the smallest error of the model's output is chosen.",
    )
    smoothquant_alpha: Annotated[
        float | Literal["auto"] | None,
        WrapValidator(lambda value, _: _smooth(value)),
        Expects("a number, above 0 and at most 1, or 'auto'"),
    ] = Field(
        default=None,
        description="Migration strength (alpha) of SmoothQuant: how much of the activation outliers moves into the "
        "weights of linear layers, such as 0.5. 'auto' chooses it by the error of the model's output; null "
        "turns SmoothQuant off. Consecutive convolutions are also equalized if their weights have one scale per "
        "tensor or their channels differ much.",
    )

    zero_point: bool = Field(
        default=False,
        description="Quantize activations to UINT8 with a zero point where the backend's kernels support it at no "
        "cost: on CPUs, everywhere except in attention.",
    )

    all_experts: bool = Field(
        default=False,
        description="Calibrate every expert of a mixture-of-experts model on every token, not only on the tokens "
        "routed to it. Each group of experts needs one more pass through the experts.",
    )

    @property
    def percentiles(self) -> tuple[float, ...]:
        """The percentiles to compare; one entry if there is no search."""
        return self.percentile if isinstance(self.percentile, tuple) else (self.percentile,)


class WeightsConfig(Section):
    """Ranges and rounding of weights."""

    granularity: Literal["per_channel", "per_tensor"] = Field(
        default="per_channel", description="One scale per output channel, or one scale for the whole weight."
    )
    calibrator: Literal["max", "mse", "percentile"] = Field(
        default="max",
        description="Method that estimates the range of each scale: 'max' takes the largest magnitude, 'mse' "
        "minimizes the squared error, 'percentile' clips outliers.",
    )
    percentile: Annotated[float, BeforeValidator(_percentile_number), Expects("a number, above 0 and at most 100")] = (
        Field(
            default=99.9,
            description="Percentage of the absolute values that the range covers, for calibrator 'percentile'.",
        )
    )
    rounding: Literal["nearest", "gptq", "reconstruct", "awq"] = Field(
        default="nearest",
        description="'nearest' rounds each value by itself. 'gptq' minimizes the output error of each layer on the "
        "calibration data. 'reconstruct' minimizes the output error of each block; it takes minutes and benefits "
        "from more data. 'awq' scales up channels with large inputs, then rounds to nearest; use it for "
        "weight-only quantization.",
    )
    act_order: bool = Field(
        default=False, description="With 'gptq', round the input channels with the largest activations first."
    )


def _no_number(value: Any) -> Any:
    # Literal[True] also accepts 1, because the two are equal in Python.
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise PydanticCustomError("literal_error", "Input should be true, false or 'auto'")
    return value


class SitesConfig(Section):
    """Kinds of operation to quantize."""

    linear: bool = Field(
        default=True, description="Quantize the input and the weight of linear layers and of any MatMul with a weight."
    )
    conv: bool = Field(default=True, description="Quantize the input and the weight of convolutions.")
    matmul: bool = Field(
        default=True, description="Quantize both inputs of a MatMul of two activations, such as in attention."
    )
    residual_add: Annotated[Literal[True, False, "auto"], BeforeValidator(_no_number)] = Field(
        default="auto",
        description="Quantize the inputs of residual additions. 'auto': only additions that lose little accuracy in "
        "INT8 during calibration.",
    )
    embedding: Annotated[Literal[True, False, "auto"], BeforeValidator(_no_number)] = Field(
        default="auto",
        description="Store embedding tables in low precision, with one scale per row. 'auto': large tables in INT8, "
        "if no other operation reads them in float and the backend dequantizes only the rows that it looks up.",
    )


class SelectionConfig(Section):
    """Rules that select sites. A site is selected if any rule matches."""

    module_types: TextList = Field(
        default=(), description="Names of module classes. A class also matches its subclasses and all modules inside."
    )
    names: TextList = Field(default=(), description="Module names. '*' matches one path segment and '**' any number.")
    sites: TextList = Field(
        default=(), description="Site names as in the coverage table. '*' matches one path segment and '**' any number."
    )


class FormatConfig(SelectionConfig):
    """A rule with formats for the sites of ``kinds`` that match its patterns; an empty key matches every site."""

    kinds: Annotated[
        tuple[Literal["linear", "conv", "matmul", "residual_add", "embedding"], ...], BeforeValidator(tuple_from_list)
    ] = Field(default=(), description="Kinds of site that the rule applies to. Empty: all.")
    activations: Literal["int8", "uint8", "fp8", "dynamic", "float"] | None = Field(
        default=None,
        description="Number format of activations. 'dynamic': 8 bits with ranges at run time. 'float': weight-only "
        "quantization. null: the format of the other sites.",
    )
    weights: Literal["int8", "fp8", "int4"] | None = Field(
        default=None, description="Number format of weights. null: dtype of the quantizer section."
    )
    block_size: int | None = Field(
        default=None,
        ge=2,
        description="Number of input channels that share a scale, for weights in int4. null: one scale per output "
        "channel.",
    )

    @model_validator(mode="after")
    def _says_something(self) -> FormatConfig:
        if self.activations is None and self.weights is None:
            reject(("", "sets no format; expected activations or weights, such as weights: int4"))
        if self.block_size is not None and self.weights != "int4":
            reject(("block_size", f"got {self.block_size}; expected null, because only weights: int4 has blocks"))
        return self


_BACKENDS = OneOf(profiles)


def _checked_candidates(names: Sequence[Any], key: str = "") -> tuple[str, ...]:
    known = [name for name in profiles if name != AUTO]
    if [name for name in names if name not in known] or len(set(names)) < len(names):
        reject((key, f"got {list(names)}; expected different names out of {', '.join(known)}"))
    return tuple(names)


class QuantizerConfig(Section):
    """The settings of a ``Quantizer``."""

    # transformers requires this attribute and ``to_dict``; see ``integrations/transformers/plugin.py``.
    quant_method: ClassVar[str] = "quantizer"

    preset: Literal["accurate", "balanced", "fast", "plain"] = Field(
        default=DEFAULT,
        description="Values of keys that are not set. 'balanced' chooses ranges and SmoothQuant by the error of the "
        "model's output and corrects biases. 'accurate' adds GPTQ rounding. 'fast' uses max calibration with a "
        "fixed SmoothQuant alpha, and keeps attention in float where that costs much accuracy. 'plain' uses "
        "percentile calibration.",
    )
    backend: Annotated[str, AfterValidator(_BACKENDS.check), _BACKENDS] = Field(
        default="tensorrt",
        description="Backend that runs the quantized model. 'auto' is the fastest backend on this CPU, or on the GPU "
        "with engine.device: cuda: a run benchmarks them. A list such as [openvino, torch] or [tensorrt, torch-cuda] "
        "restricts 'auto' to these. Names with '-avx2' are for x86 CPUs without VNNI and use 7-bit weights. Run "
        "files, `quantizer convert` and quantize_model default to 'auto'; Quantizer defaults to 'tensorrt'.",
    )
    candidates: Annotated[tuple[str, ...], BeforeValidator(tuple_from_list), AfterValidator(_checked_candidates)] = (
        Field(
            default=(),
            description="Backends that 'auto' chooses from. Empty: all that support the device.",
            # Meaningless next to a single backend, which every saved quantizer has.
            exclude_if=lambda names: not names,
        )
    )
    dtype: Literal["int8", "fp8"] = Field(
        default="int8", description="Number format of quantized weights and activations."
    )
    formats: Annotated[tuple[FormatConfig, ...], BeforeValidator(tuple_from_list)] = Field(
        default=(),
        description="Rules with other formats for some sites. If several rules match a site, the last one applies.",
    )
    fallback_dtype: Literal["float16", "bfloat16", "float32"] | None = Field(
        default=None, description="Number format of non-quantized operations. null: the backend's default."
    )
    activations: ActivationsConfig = Field(default=ActivationsConfig(), description="Ranges of activations.")
    weights: WeightsConfig = Field(default=WeightsConfig(), description="Ranges and rounding of weights.")
    bias_correction: bool = Field(
        default=False,
        description="Subtract the mean quantization error of each site's output from its bias.",
    )
    sites: SitesConfig = Field(default=SitesConfig(), description="Kinds of operation to quantize.")
    include: SelectionConfig = Field(
        default=SelectionConfig(), description="Quantize only modules and sites that match these rules. Empty: all."
    )
    exclude: SelectionConfig = Field(
        default=SelectionConfig(),
        description="Never quantize modules and sites that match these rules; exclude takes precedence over include.",
    )

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        backends = values.get("backend")
        if isinstance(backends, list | tuple) and backends:
            if values.get("candidates"):
                reject(
                    ("candidates", "is set, but backend is also a list, which means the same; remove one of the two")
                )
            values = {**values, "backend": AUTO, "candidates": _checked_candidates(backends, "backend")}
        return with_preset(values)

    @model_validator(mode="after")
    def _candidates_are_for_auto(self) -> QuantizerConfig:
        if self.candidates and self.backend != AUTO:
            reject(
                ("candidates", f"got {list(self.candidates)} with backend {self.backend!r}; expected backend: {AUTO}")
            )
        return self

    @model_validator(mode="after")
    def _entropy_counts_equal_steps(self) -> QuantizerConfig:
        fp8 = self.dtype == "fp8" or any(rule.activations == "fp8" for rule in self.formats)
        if fp8 and self.activations.calibrator == "entropy":
            text = "got 'entropy', which needs uniform quantized values, which fp8 lacks; expected another calibrator"
            reject(("activations.calibrator", text))
        return self

    @property
    def target(self) -> TargetProfile:
        """The profile of the backend with ``fallback_dtype``; for ``auto``, a profile of the candidates' device."""
        return self.target_on(profile(self.candidates[0]).device if self.candidates else "cpu")

    def target_on(self, device: Literal["cpu", "cuda"]) -> TargetProfile:
        """Return the profile of the backend; for ``auto``, that of OpenVINO, or of torch-cuda on a GPU."""
        of_auto = {"cpu": "openvino", "cuda": "torch-cuda"}
        return profile(of_auto[device] if self.backend == AUTO else self.backend, self.fallback_dtype)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values, with ``quant_method`` for transformers."""
        return {"quant_method": self.quant_method, **self.model_dump(mode="json")}
