"""``QuantDescriptor``: the settings of one operand's quantizer."""

from __future__ import annotations

from dataclasses import dataclass

from quantizer.errors import ConfigError
from quantizer.numerics.formats import INT8

_METHODS = ("max", "histogram")


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantDescriptor:
    """The number format and calibration of a ``TensorQuantizer``."""

    num_bits: int = 8
    axis: int | tuple[int, ...] | None = None
    amax: float | None = None
    calib_method: str = "max"

    def __post_init__(self) -> None:
        problems = []
        if self.num_bits != INT8.bits:
            problems.append(f"QuantDescriptor: num_bits={self.num_bits}; expected {INT8.bits}")
        if isinstance(self.axis, tuple) and len(self.axis) != 1:
            problems.append(f"QuantDescriptor: axis={self.axis}; expected one axis, such as (0,), or None")
        if self.calib_method not in _METHODS:
            problems.append(f"QuantDescriptor: calib_method={self.calib_method!r}; expected {' or '.join(_METHODS)}")
        if self.amax is not None and not 0 < self.amax < float("inf"):
            problems.append(f"QuantDescriptor: amax={self.amax}; expected a positive finite number")
        if self.calib_method == "histogram" and self.axis is not None:
            problems.append("QuantDescriptor: a histogram has one range for the tensor; expected axis=None")
        if problems:
            raise ConfigError(problems)

    @property
    def channel_axis(self) -> int | None:
        """The axis as a number, or None."""
        return self.axis[0] if isinstance(self.axis, tuple) else self.axis


QUANT_DESC_8BIT_PER_TENSOR = QuantDescriptor()
