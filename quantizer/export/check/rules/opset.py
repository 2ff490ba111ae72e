"""The version of ONNX that a file is written in."""

from __future__ import annotations

from collections.abc import Iterator

from quantizer.export.check.finding import Fault
from quantizer.export.check.graph import HALVES
from quantizer.export.check.graph import attribute
from quantizer.export.check.graph import element
from quantizer.export.check.graph import format_name
from quantizer.export.check.graph import name_of
from quantizer.export.check.rule import rules
from quantizer.export.check.subject import Subject
from quantizer.numerics.qtype import FP8
from quantizer.numerics.qtype import INT4
from quantizer.numerics.qtype import QTYPES

__all__ = ["opset_format", "opset_range"]

_HALF_SCALES, _BLOCKS = FP8.onnx_opset, INT4.onnx_opset


@rules.add("opset-range")
def opset_range(subject: Subject) -> Iterator[Fault]:
    """The opset is one that the target's parser reads."""
    if subject.limits.opsets is None:
        return
    first, last = subject.limits.opsets
    if not first <= subject.opset <= last:
        problem = f"opset {subject.opset} is not read by {subject.target.name}, which takes {first} to {last}"
        yield Fault("", problem, f"export with opset {subject.target.opset}")


@rules.add("opset-format")
def opset_format(subject: Subject) -> Iterator[Fault]:
    """Half scales and FP8 need opset 19; INT4 and blocks need 21."""
    for node in [*subject.quantizes, *subject.dequantizes]:
        needed, what = 0, ""
        name = format_name(node)
        if name in QTYPES and QTYPES[name].onnx_opset > needed:
            needed, what = QTYPES[name].onnx_opset, name.upper()
        if element(node.inputs[1]) in HALVES and needed < _HALF_SCALES:
            needed, what = _HALF_SCALES, f"a {element(node.inputs[1])} scale"
        if attribute(node, "block_size", 0) and needed < _BLOCKS:
            needed, what = _BLOCKS, "a scale for each block"
        if subject.opset < needed:
            problem = f"{what} needs opset {needed}, the file is written in {subject.opset}"
            yield Fault(name_of(node), problem, f"export with opset {max(needed, subject.target.opset)}")
