"""Number formats as data: the only place that defines their ranges. Also the limits of float16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantizer.plan.targets.base import TargetProfile, profiles

if TYPE_CHECKING:
    import torch
    from torch import Tensor


BLOCKS_OPSET = 21
"""The first ONNX opset whose ``QuantizeLinear`` supports scales per block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QType:
    """A low-precision format: its name, its storage, and the range of its quantized values.

    A value is ``q * scale``, or ``(q - zero_point) * scale`` if the format has a zero point. The range is that of ONNX
    ``QuantizeLinear``, in training and in the engine. Without a zero point, scale = amax / qmax.

    Attributes:
        name: the name in configurations and in the API.
        bits: the bits of one quantized value in an engine's file.
        storage_name: the torch type that stores quantized values, which may have more bits.
        qmin: the lowest quantized value.
        qmax: the highest quantized value.
        is_float: whether quantized values are floating-point numbers instead of integers.
        has_zero_point: whether any quantized value may represent 0.0; otherwise 0 does.
        onnx_type: the ONNX element type.
        onnx_opset: the first ONNX opset whose ``QuantizeLinear`` writes the format.
    """

    name: str
    bits: int
    storage_name: str
    qmin: int
    qmax: int
    is_float: bool = False
    has_zero_point: bool = False
    onnx_type: str
    onnx_opset: int

    @property
    def storage(self) -> torch.dtype:
        """The torch type that stores quantized values."""
        # Importing torch takes seconds, and configurations are checked against formats without it.
        import torch

        dtype: torch.dtype = getattr(torch, self.storage_name)
        return dtype

    @property
    def magnitudes(self) -> Tensor:
        """The quantized values from 0 to ``qmax``, ascending, float32."""
        import torch

        if not self.is_float:
            return torch.arange(self.qmax + 1, dtype=torch.float32)
        # The bit patterns of positive floats ascend with their values; those beyond qmax are NaN.
        values = torch.arange(2 ** (self.bits - 1), dtype=torch.uint8).view(self.storage).float()
        magnitudes: Tensor = values[values <= self.qmax]
        return magnitudes

    @property
    def is_packed(self) -> bool:
        """True if files pack several quantized values into the storage that torch needs for one."""
        return self.bits < 8 * self.storage.itemsize


INT8 = QType(name="int8", bits=8, storage_name="int8", qmin=-128, qmax=127, onnx_type="INT8", onnx_opset=10)

UINT8 = QType(
    name="uint8",
    bits=8,
    storage_name="uint8",
    qmin=0,
    qmax=255,
    has_zero_point=True,
    onnx_type="UINT8",
    onnx_opset=10,
)

# E4M3 without infinities: values beyond the range saturate (Micikevicius et al. 2022, arXiv:2209.05433, table 1).
FP8 = QType(
    name="fp8",
    bits=8,
    storage_name="float8_e4m3fn",
    qmin=-448,
    qmax=448,
    is_float=True,
    onnx_type="FLOAT8E4M3FN",
    onnx_opset=19,
)

# For weights. torch has no arithmetic in 4 bits: a quantized value takes a byte there, half a byte in an ONNX file.
INT4 = QType(name="int4", bits=4, storage_name="int8", qmin=-8, qmax=7, onnx_type="INT4", onnx_opset=21)

QTYPES = {entry.name: entry for entry in (INT8, UINT8, FP8, INT4)}
"""All formats by name."""


def qtype(name: str) -> QType:
    """Return the format called ``name``."""
    if name not in QTYPES:
        raise ValueError(f"unknown dtype {name!r}; known: {', '.join(sorted(QTYPES))}")
    return QTYPES[name]


FLOAT16_MAX = 65504.0
"""The largest number of float16 (IEEE 754-2008, binary16)."""

FLOAT16_MASK = -30000.0
"""Value of attention masks in float16: adding a score does not overflow, and exp(-30000) is 0 in every float type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """The formats of one site.

    Attributes:
        activations: the format of activations; None for weight-only quantization.
        weights: the format of a weight.
        dynamic: whether the range of activations is computed at each run, instead of calibrated.
        block_size: the number of neighbours along a weight's input channels that share a scale; None: no blocks.
        rule: the entry of the configuration that sets the formats; None: the default.
    """

    activations: QType | None
    weights: QType
    dynamic: bool = False
    block_size: int | None = None
    rule: str | None = None


def least_opset_of(formats: Format) -> int:
    """Return the first ONNX opset that can represent both formats."""
    opsets = [dtype.onnx_opset for dtype in (formats.activations, formats.weights) if dtype is not None]
    return max(*opsets, BLOCKS_OPSET if formats.block_size is not None else 0)


def impossible(default: Format, formats: Sequence[Format], target: TargetProfile) -> list[str]:
    """Return a message for each format, of the rules and then of the default, that a target does not support."""
    places = [*((entry, f"formats[{number}]") for number, entry in enumerate(formats)), (default, "dtype")]
    return [problem for entry, place in places for problem in _impossible(entry, target, place)]


def _impossible(formats: Format, target: TargetProfile, place: str) -> list[str]:
    """Return messages for the activations and the weights of a format that a target does not support."""
    problems = []
    if formats.dynamic and target.dynamic is None:
        place = f"quantizer.{place}" if formats.rule else "quantizer.activations.ranges"
        backends = " or ".join(name for name in profiles.names() if profiles[name].dynamic)
        return [f"{place}: {target.name} has no kernels for dynamic ranges; use {backends}, or static ranges"]
    if formats.dynamic and formats.weights.is_packed and not target.reads_dynamic:
        problems.append(
            f"quantizer.{place}: {target.name} supports dynamic ranges only with weights in int8, got "
            f"{formats.weights.name}; use int8, or activations: float"
        )
    for operand, dtype, supported in (
        ("activations", formats.activations, target.activation_dtypes),
        ("weights", formats.weights, target.weight_dtypes),
    ):
        if dtype is not None and dtype.name not in supported:
            names = ", ".join(sorted(supported))
            problems.append(f"quantizer.{place}: {target.name} does not support {operand} in {dtype.name}; use {names}")
    return problems
