"""The ``quantizer:`` section: the quantized sites, their formats and calibrators, and the backend.

Beside it are the ``amp:`` and ``fallback:`` sections, the presets, which set keys that a configuration does not, and
the base class and field types of all sections.
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
    """A mapping in the YAML file: frozen, without unknown keys, without conversion between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)


@dataclass(frozen=True)
class Expects:
    """The accepted values of a field, for error messages, if its type does not describe them.

    Attributes:
        words: words that complete the sentence "expected ...".
    """

    words: str


@dataclass(frozen=True)
class OneOf:
    """A field that accepts the names in a registry, also those added later; ``check`` is its validator."""

    registry: Registry[Any]

    def check(self, name: str) -> str:
        """Return the name.

        Raises:
            PydanticCustomError: the name is not in the registry.
        """
        if name not in self.registry:
            known = ", ".join(map(repr, self.registry))
            raise PydanticCustomError("one_of", "Input should be one of {known}", {"known": known})
        return name


def reject(*problems: tuple[str, str]) -> NoReturn:
    """Raise the error of a section's validator for values that contradict each other.

    Args:
        problems: path and text of each problem. Paths are relative to the validated value: "latency_batch", "" for the
            value itself; "/data.head" is a path from the top of the file.
    """
    summary = "; ".join(f"{path.lstrip('/')}: {text}" if path else text for path, text in problems)
    raise PydanticCustomError("cross_field", "{summary}", {"summary": summary, "problems": list(problems)})


def tuple_from_list(value: Any) -> Any:
    """Return a list as a tuple; any other value unchanged, for the type check to reject."""
    return tuple(value) if isinstance(value, list) else value


def _check_range(value: tuple[int, int, int]) -> tuple[int, int, int]:
    low, best, high = value
    if not 1 <= low <= best <= high:
        reject(("", f"got {list(value)}; expected [min, opt, max] with 1 <= min <= opt <= max"))
    return value


def some_and_unique(value: Sequence[Any]) -> Sequence[Any]:
    """Return the sequence itself, or raise if it is empty or has an entry twice."""
    if not value:
        reject(("", "is an empty list; expected at least one entry"))
    return unique(value)


def unique(value: Sequence[Any]) -> Sequence[Any]:
    """Return the sequence itself, or raise if it has an entry twice."""
    twice = sorted({entry for entry in value if value.count(entry) > 1})
    if twice:
        reject(("", f"{twice[0]!r} is listed twice; expected each entry once"))
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

_AS_THEY_ARE = {"weights": {"rounding": "nearest"}, "bias_correction": False}
"""Weights and biases, where nothing is searched for."""

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "plain": {
        "activations": {
            "calibrator": "percentile",
            "percentile": 99.99,
            "smoothquant_alpha": None,
            "zero_point": False,
        },
        **_AS_THEY_ARE,
    },
    # What is smoothed needs no clipping.
    "fast": {"activations": {"calibrator": "max", "smoothquant_alpha": 0.8, "zero_point": True}, **_AS_THEY_ARE},
    "balanced": {"activations": _BY_OUTPUT, "weights": {"rounding": "nearest"}, "bias_correction": True},
    "accurate": {"activations": _BY_OUTPUT, "weights": {"rounding": "gptq"}, "bias_correction": True},
}
"""The values of keys of the ``quantizer`` section, or of the keys of a section in it; a key that is not named here has
the default of the schema."""

DEFAULT: Literal["balanced"] = "balanced"

_TOGETHER = {"calibrator": ("calibrator", "percentile"), "percentile": ("calibrator", "percentile")}
"""Keys with a meaning together: who sets one of them sets all."""

_READ = {"batch": ("data", "batch_size"), "sequence": ("model", "max_length")}
"""The key of what is read at once, by the axis of ``export.dynamic`` that must take it."""


def with_preset(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a ``quantizer`` section with those of its preset for all keys that are not set.

    Values of a wrong type stay as they are, for the validation to reject.
    """
    found = dict(values)
    preset = found.get("preset", DEFAULT)
    for name, wanted in PRESETS.get(preset, {}).items() if isinstance(preset, str) else ():
        if not isinstance(wanted, Mapping):
            found.setdefault(name, wanted)
            continue
        given = found.get(name, {})
        if isinstance(given, Mapping):
            free = {key: value for key, value in wanted.items() if not set(_TOGETHER.get(key, (key,))) & set(given)}
            found[name] = {**free, **given}
    return found


def preset_keys(section: str) -> frozenset[str]:
    """Return the keys of a section of the ``quantizer`` section, or of itself, that some preset sets."""
    named = (preset if section == "quantizer" else preset.get(section, {}) for preset in PRESETS.values())
    return frozenset(key for keys in named for key, value in keys.items() if not isinstance(value, Mapping))


def with_fitted_sizes(values: Mapping[str, Any], defaults: Mapping[tuple[str, str], int]) -> dict[str, Any]:
    """Return the values of a run in which sizes that are not set fit the ranges of ``export.dynamic`` that are.

    A default that is too large becomes the largest size of the range; that of a measured latency, if it is too small,
    too, becomes the usual size. Values of a wrong type stay as they are, for the validation to reject.

    Args:
        values: the sections of a run.
        defaults: the default of each size, by section and key.
    """
    found = dict(values)
    model = _section(values, "model")
    if model is None or model.get("task") is None:
        # The batches of a function have the sizes that they have.
        return found
    dynamic = _section(_section(values, "export") or {}, "dynamic") or {}
    for axis, read in _READ.items():
        sizes = dynamic.get(axis)
        if not isinstance(sizes, list | tuple) or [type(size) for size in sizes] != [int] * 3:
            continue
        low, usual, high = sizes
        for place, least, other in ((read, 0, high), (("report", f"latency_{axis}"), low, usual)):
            section = _section(found, place[0])
            if section is not None and not least <= defaults[place] <= high:
                found[place[0]] = {place[1]: other, **section}
    return found


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Return a section, an empty one if there is none; None: it is something else."""
    section = values.get(name, {})
    return section if isinstance(section, Mapping) else None


_MAX_EVALUATIONS = 25
_CHOICES = ("num", "ratio", "names", "max_drop", "min_speedup")


class AmpConfig(Section):
    """The measurement of the sensitivity of each group of sites."""

    measure: Literal["gradient", "output", "local", "metric"] = Field(
        default="gradient",
        description="What a group costs: 'gradient' estimates the error of the model's output (one backward pass for "
        "all groups), 'output' computes it (a pass for each group), 'local' is the error at the group's own sites, "
        "'metric' how much worse the task's score is on data.tuning (an evaluation for each group).",
    )
    granularity: Literal["group", "layer", "block"] = Field(
        default="group",
        description="What is measured and kept in float together: 'group' is the least that can change precision.",
    )
    # All 128 calibration samples of the shipped files: 'gradient' runs each a few times, for any number of groups.
    batches: int = Field(
        default=4, ge=1, description="Calibration batches that are measured on; 'metric' has its own data."
    )


class FallbackConfig(Section):
    """The groups that fall back to float, by exactly one of the five ways to choose them."""

    num: int | None = Field(default=None, ge=1, description="Keep this many of the most sensitive groups in float.")
    ratio: float | None = Field(default=None, gt=0, le=1, description="Keep this share of all groups in float.")
    names: Annotated[TextList, AfterValidator(some_and_unique)] | None = Field(
        default=None,
        description="Keep these in float: groups, or modules, sites and operands with '*' for one segment and '**' "
        "for any "
        "number. Needs no amp.",
    )
    max_drop: float | None = Field(
        default=None,
        ge=0,
        description="Keep as few groups in float as let the task's score on data.tuning be at most so much worse "
        "than the "
        "float model's: 0 or more, where Quantizer.fallback in Python takes a gain below 0, too.",
    )
    min_speedup: float | None = Field(
        default=None,
        gt=0,
        description="Keep those in float that cost most accuracy, as long as the engine stays at least so many "
        "times as "
        "fast as the float model's: 2.0.",
    )
    # Null, because a file with all defaults filled in must be valid without a search too.
    max_evaluations: int | None = Field(
        default=None,
        ge=2,
        description=f"How many scores a search with max_drop may take, the float model's included; null: "
        f"{_MAX_EVALUATIONS}.",
    )
    costs: Literal["multiply_adds"] | None = Field(
        default=None,
        description="What a group costs in float: those that win most for their cost are kept in float first; null: "
        "with "
        "max_drop the time that it takes longer, where the engine runs here, else all cost the same.",
    )

    @property
    def evaluations(self) -> int:
        """The number of scores that a search may measure."""
        return _MAX_EVALUATIONS if self.max_evaluations is None else self.max_evaluations

    @model_validator(mode="after")
    def _fit_together(self) -> FallbackConfig:
        problems = []
        given = [name for name in _CHOICES if getattr(self, name) is not None]
        if not given:
            known = f"{', '.join(_CHOICES[:-1])} and {_CHOICES[-1]}"
            problems.append(("", f"none of {known} is set; expected exactly one of them, such as num: 4"))
        elif len(given) > 1:
            said = [f"{name} is {_shown(getattr(self, name))}" for name in given]
            rest = "the other" if len(given) == 2 else "the others"
            both = f"{', '.join(said[:-1])} and {said[-1]}"
            problems.append(("", f"{both}; expected exactly one of them: remove {rest}"))
        if given and "max_drop" not in given and self.max_evaluations is not None:
            problems.append(("max_evaluations", "belongs to the search of max_drop, which is not set; remove it"))
        if given == ["names"] and self.costs is not None:
            problems.append(("costs", "orders the groups to choose from, but names chooses them; remove it"))
        if given == ["min_speedup"] and self.costs is not None:
            problems.append(("costs", "min_speedup goes by the measured time of each group; remove it"))
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
    """The estimation of activation ranges."""

    ranges: Literal["static", "dynamic"] = Field(
        default="static",
        description="'dynamic': the range of a tensor is that of its values at each run, where the backend has kernels "
        "for it (linears, on CPUs), and all else is not quantized; 'static': it comes from calibration.",
    )
    calibrator: Annotated[str, AfterValidator(_CALIBRATORS.check), _CALIBRATORS] = Field(
        default="percentile",
        description="How a range is taken from the values seen in calibration; 'auto' tries the others on each site, "
        "'output' takes the one for all with which the model's output comes out best.",
    )
    percentile: Annotated[
        float | tuple[float, ...],
        WrapValidator(lambda value, _: _percentile(value)),
        Expects("a number, above 0 and at most 100, or a list of such numbers"),
    ] = Field(
        default=99.99,
        description="Percent of the absolute values that the range covers; used by calibrator 'percentile'. Of a list "
        "the one is taken with which the model's output comes out best.",
    )
    smoothquant_alpha: Annotated[
        float | Literal["auto"] | None,
        WrapValidator(lambda value, _: _smooth(value)),
        Expects("a number, above 0 and at most 1, or 'auto'"),
    ] = Field(
        default=None,
        description="SmoothQuant: how much of the outliers of what linears read moves into their weights, such as 0.5; "
        "'auto' chooses by the output of the model, null moves nothing. Consecutive convolutions are equalised too, "
        "where their weights have one scale or channels differ much.",
    )

    zero_point: bool = Field(
        default=False,
        description="INT8 activations have a zero point, as UINT8, where the backend's kernels take one at no cost: on "
        "CPUs everywhere but in attention.",
    )

    all_experts: bool = Field(
        default=False,
        description="In calibration, every expert of a mixture of experts sees every token, and not only those that "
        "the router chose for it; needs as many passes through the experts as there are groups of them.",
    )

    @property
    def percentiles(self) -> tuple[float, ...]:
        """The percentiles to compare; a single one if there is no search."""
        return self.percentile if isinstance(self.percentile, tuple) else (self.percentile,)


class WeightsConfig(Section):
    """The ranges of weights, and their rounding."""

    granularity: Literal["per_channel", "per_tensor"] = Field(
        default="per_channel", description="One scale for each output channel, or one for the whole weight."
    )
    calibrator: Literal["max", "mse", "percentile"] = Field(
        default="max",
        description="How a range is taken from the values of a scale: the largest, the one with the least squared "
        "error, or a percentile.",
    )
    percentile: Annotated[float, BeforeValidator(_percentile_number), Expects("a number, above 0 and at most 100")] = (
        Field(default=99.9, description="Percent of a scale's magnitudes that the range covers; used by 'percentile'.")
    )
    rounding: Literal["nearest", "gptq", "reconstruct", "awq"] = Field(
        default="nearest",
        description="How a weight is rounded: each value by itself; all of them so that what is computed with the "
        "calibration data changes least, product by product (gptq) or block by block of the model (reconstruct: takes "
        "minutes, and is the better the more data there is); or each by itself after channels that multiply large "
        "inputs were scaled up (awq, for weights whose inputs are float).",
    )
    act_order: bool = Field(
        default=False, description="With 'gptq': round the input channels with the largest values first."
    )


def _no_number(value: Any) -> Any:
    # A Literal of True accepts 1 too, because they are equal in Python.
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise PydanticCustomError("literal_error", "Input should be true, false or 'auto'")
    return value


class SitesConfig(Section):
    """The kinds of operation that are quantized."""

    linear: bool = Field(
        default=True, description="Quantize linear layers, and any matrix product by a weight: input and weight."
    )
    conv: bool = Field(default=True, description="Quantize convolutions: input and weight.")
    matmul: bool = Field(default=True, description="Quantize products of two activations, as in attention.")
    residual_add: Annotated[Literal[True, False, "auto"], BeforeValidator(_no_number)] = Field(
        default="auto",
        description="Quantize the operands of residual additions; 'auto': only those that INT8 is seen to hold.",
    )
    embedding: Annotated[Literal[True, False, "auto"], BeforeValidator(_no_number)] = Field(
        default="auto",
        description="Store the tables of embeddings in low precision, row by row; 'auto': the large ones in INT8 that "
        "nothing else reads as floats, where the backend dequantizes only the rows that are looked up.",
    )


class SelectionConfig(Section):
    """Rules that select sites; a site is selected if any rule matches it."""

    module_types: TextList = Field(
        default=(), description="Names of module classes; a class covers its subclasses and all that is inside."
    )
    names: TextList = Field(
        default=(), description="Module names; whole path segments, '*' is one segment and '**' any number."
    )
    sites: TextList = Field(
        default=(), description="Site names as the coverage table shows them, with the same '*' and '**'."
    )


class FormatConfig(SelectionConfig):
    """Formats for some sites: those of ``kinds`` that the patterns match; an empty key matches every site."""

    kinds: Annotated[
        tuple[Literal["linear", "conv", "matmul", "residual_add", "embedding"], ...], BeforeValidator(tuple_from_list)
    ] = Field(default=(), description="Kinds of site; empty: all.")
    activations: Literal["int8", "uint8", "fp8", "dynamic", "float"] | None = Field(
        default=None,
        description="Number format of activations; 'dynamic': 8 bits with ranges at run time, as activations.ranges; "
        "'float': weights alone are quantized; null: that of the other sites.",
    )
    weights: Literal["int8", "fp8", "int4"] | None = Field(
        default=None, description="Number format of weights; null: dtype."
    )
    block_size: int | None = Field(
        default=None, ge=2, description="Weights in int4: how many input channels share a scale; null: all of a row."
    )

    @model_validator(mode="after")
    def _says_something(self) -> FormatConfig:
        if self.activations is None and self.weights is None:
            reject(("", "sets no format; expected activations, weights or both, such as weights: int4"))
        if self.block_size is not None and self.weights != "int4":
            reject(
                ("block_size", f"got {self.block_size}; expected null, or weights: int4, the format that has blocks")
            )
        return self


_BACKENDS = OneOf(profiles)


def _checked_candidates(names: Sequence[Any], key: str = "") -> tuple[str, ...]:
    known = [name for name in profiles if name != AUTO]
    if [name for name in names if name not in known] or len(set(names)) < len(names):
        reject((key, f"got {list(names)}; expected some of {', '.join(known)}, each of them once"))
    return tuple(names)


class QuantizerConfig(Section):
    """The settings of a ``Quantizer``."""

    # With ``to_dict``, the interface that transformers requires: see ``integrations/transformers/plugin.py``.
    quant_method: ClassVar[str] = "quantizer"

    preset: Literal["accurate", "balanced", "fast", "plain"] = Field(
        default=DEFAULT,
        description="Values for the keys that are not set: 'balanced' chooses ranges and smoothing by the output of "
        "the model and corrects biases, 'accurate' rounds weights by gptq besides, 'fast' takes the largest values "
        "after it has moved outliers into weights by a fixed share, and leaves attention in float where it costs much, "
        "'plain' takes a percentile of each range.",
    )
    backend: Annotated[str, AfterValidator(_BACKENDS.check), _BACKENDS] = Field(
        default="tensorrt",
        description="The engine that will run the quantized model; 'openvino-avx2' and 'onnxruntime-avx2': these on "
        "x86 without VNNI, with weights of 7 bits; 'auto': those for this CPU, of which a run measures which is the "
        "fastest; a list such as [openvino, torch]: 'auto' among these. A Quantizer in Python takes the default; a "
        "run's file, `quantizer convert` and quantize_model that name none take 'auto'.",
    )
    candidates: Annotated[tuple[str, ...], BeforeValidator(tuple_from_list), AfterValidator(_checked_candidates)] = (
        Field(
            default=(),
            description="What 'auto' chooses from; empty: all backends that it knows for this CPU.",
            # It means nothing beside the name of one backend, and every saved quantizer has one.
            exclude_if=lambda names: not names,
        )
    )
    dtype: Literal["int8", "fp8"] = Field(default="int8", description="Number format of what is quantized.")
    formats: Annotated[tuple[FormatConfig, ...], BeforeValidator(tuple_from_list)] = Field(
        default=(), description="Other formats for some sites; of the rules that match a site the last decides."
    )
    fallback_dtype: Literal["float16", "bfloat16", "float32"] | None = Field(
        default=None, description="Number format of what is not quantized; null: what the backend wants."
    )
    activations: ActivationsConfig = Field(
        default=ActivationsConfig(), description="How the ranges of activations are found."
    )
    weights: WeightsConfig = Field(
        default=WeightsConfig(), description="How the ranges of weights are found, and how weights are rounded."
    )
    bias_correction: bool = Field(
        default=False,
        description="Add the mean error that rounding makes in the output of each site to the site's bias.",
    )
    sites: SitesConfig = Field(default=SitesConfig(), description="Which kinds of operation are quantized.")
    include: SelectionConfig = Field(
        default=SelectionConfig(), description="Quantize only what these rules match; all empty: everything."
    )
    exclude: SelectionConfig = Field(
        default=SelectionConfig(), description="Never quantize what these rules match; stronger than include."
    )

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        among = values.get("backend")
        if isinstance(among, list | tuple) and among:
            if values.get("candidates"):
                reject(
                    ("candidates", "is set, and so is a list as backend, which means the same; expected one of them")
                )
            values = {**values, "backend": AUTO, "candidates": _checked_candidates(among, "backend")}
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
            text = "got 'entropy', which counts equal steps, and those of fp8 are not; expected another calibrator"
            reject(("activations.calibrator", text))
        return self

    @property
    def target(self) -> TargetProfile:
        """The profile of the backend, with ``fallback_dtype`` if it is set; of ``auto`` that of OpenVINO."""
        return profile("openvino" if self.backend == AUTO else self.backend, self.fallback_dtype)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values, with the name of the method for transformers."""
        return {"quant_method": self.quant_method, **self.model_dump(mode="json")}
