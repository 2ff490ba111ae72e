"""The ``quantizer:`` section: the quantized sites, their formats and calibrators, and the backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from quantizer.common.choices import CALIBRATORS
from quantizer.config.presets import DEFAULT, with_preset
from quantizer.config.section import Expects, OneOf, Section, TextList, reject, tuple_from_list
from quantizer.targets.base import TargetProfile
from quantizer.targets.profiles import AUTO, profile, profiles


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
        "for it (linears, on CPUs), and all else stays float; 'static': it comes from calibration.",
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
    smooth: Annotated[
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

    # With ``to_dict``, the interface that transformers requires: see ``interop/transformers/plugin.py``.
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
