"""Number formats as data, and those of a site; no other file spells out a range.

The limits of float16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantizer.plan.targets.base import TargetProfile, profiles

if TYPE_CHECKING:
    import torch
    from torch import Tensor


BLOCKS_OPSET = 21
"""The first opset of ONNX whose ``QuantizeLinear`` has scales per block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QType:
    """A low-precision format: its name, its storage, and the range of its codes.

    A value is ``code * scale``, or ``(code - zero_point) * scale`` if the format has a zero point. The range is that of
    ONNX ``QuantizeLinear``, in training and in the engine alike. For formats without a zero point, scale = amax / qmax.

    Attributes:
        name: the name in configurations and in the API.
        bits: the bits of one code in an engine's file.
        storage_name: the name of the torch type of the codes; it may have more bits than the format.
        qmin: the lowest code.
        qmax: the highest code.
        is_float: the codes are floating-point numbers, finer near zero; otherwise they are integers.
        has_zero_point: the code of 0.0 may be any code; otherwise it is 0.
        onnx_type: the name of the format's ONNX element type.
        onnx_opset: the first opset of ONNX whose ``QuantizeLinear`` writes the format.
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
        """The torch type of the codes."""
        # Not at the top: torch takes seconds to import, and configurations are checked against formats without it.
        import torch

        found: torch.dtype = getattr(torch, self.storage_name)
        return found

    @property
    def magnitudes(self) -> Tensor:
        """The codes of the format from 0 to ``qmax``, ascending, float32."""
        import torch

        if not self.is_float:
            return torch.arange(self.qmax + 1, dtype=torch.float32)
        # The bit patterns of positive floats ascend with their values; those beyond qmax are NaN.
        values = torch.arange(2 ** (self.bits - 1), dtype=torch.uint8).view(self.storage).float()
        found: Tensor = values[values <= self.qmax]
        return found

    @property
    def is_packed(self) -> bool:
        """True if files pack several codes into the storage that torch needs for one."""
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

# For weights. torch computes with no 4-bit type: a code takes a byte there, and half a byte in an ONNX file.
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
"""The value of masks in float16: adding a score to it does not overflow, and exp(-30000) is 0 in every float type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """The formats of one site.

    Attributes:
        activations: the format of activations; None: they are not quantized, and only weights are quantized.
        weights: the format of a weight.
        dynamic: whether activations have the range of their values at each run, instead of one from calibration.
        block_size: how many neighbours along a weight's input channels share a scale; None: no blocks.
        rule: the configuration's entry from which the formats come; None: the default.
    """

    activations: QType | None
    weights: QType
    dynamic: bool = False
    block_size: int | None = None
    rule: str | None = None


def least_opset_of(wanted: Format) -> int:
    """Return the first ONNX opset that can represent both formats."""
    opsets = [dtype.onnx_opset for dtype in (wanted.activations, wanted.weights) if dtype is not None]
    return max(*opsets, BLOCKS_OPSET if wanted.block_size is not None else 0)


def impossible(default: Format, formats: Sequence[Format], target: TargetProfile) -> list[str]:
    """Return a message for each format, of the rules in their order and of the default, that a target lacks."""
    places = [*((wanted, f"formats[{number}]") for number, wanted in enumerate(formats)), (default, "dtype")]
    return [problem for wanted, place in places for problem in _impossible(wanted, target, place)]


def _impossible(wanted: Format, target: TargetProfile, place: str) -> list[str]:
    """Return a message for the activations and for the weights of a format if a target lacks theirs."""
    problems = []
    if wanted.dynamic and target.dynamic is None:
        place = f"quantizer.{place}" if wanted.rule else "quantizer.activations.ranges"
        having = " or ".join(name for name in profiles.names() if profiles[name].dynamic)
        return [f"{place}: {target.name} has no kernels for ranges at run time; take {having}, or static ranges"]
    if wanted.dynamic and wanted.weights.is_packed and not target.reads_dynamic:
        problems.append(
            f"quantizer.{place}: {target.name} has kernels for ranges at run time with weights in int8 alone, got "
            f"{wanted.weights.name}; take int8, or activations: float"
        )
    for what, dtype, known in (
        ("activations", wanted.activations, target.activation_dtypes),
        ("weights", wanted.weights, target.weight_dtypes),
    ):
        if dtype is not None and dtype.name not in known:
            names = ", ".join(sorted(known))
            problems.append(f"quantizer.{place}: {target.name} has no {what} in {dtype.name}; it takes {names}")
    return problems
