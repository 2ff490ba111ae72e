"""The formats of a site, and their support by targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quantizer.numerics.qtype import BLOCKS_OPSET, QType
from quantizer.targets.base import TargetProfile, profiles


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """The formats of one site.

    Attributes:
        activations: the format of activations; None: they stay float, and only weights are quantized.
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
