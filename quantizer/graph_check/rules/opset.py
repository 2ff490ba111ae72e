"""Rules of the opset in which a file is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quantizer.graph_check.finding import Fault
from quantizer.graph_check.rule import rules
from quantizer.graph_check.subject import Subject
from quantizer.numerics.qtype import FP8, INT4, QTYPES
from quantizer.qdq.graph import HALVES, attribute, element, format_name, name_of

_HALF_SCALES, _BLOCKS = FP8.onnx_opset, INT4.onnx_opset


@rules.add("opset-range")
def opset_range(subject: Subject) -> Iterator[Fault]:
    """Use an opset that the target's parser reads."""
    if subject.limits.opsets is None:
        return
    first, last = subject.limits.opsets
    if not first <= subject.opset <= last:
        problem = f"opset {subject.opset} is not read by {subject.target.name}, which takes {first} to {last}"
        yield Fault("", problem, f"export with opset {subject.target.opset}")


@rules.add("opset-format")
def opset_format(subject: Subject) -> Iterator[Fault]:
    """Use opset 19 for half scales and FP8, and 21 for INT4 and blocks."""
    too_new: dict[tuple[str, int], list[Any]] = {}
    for node in subject.sources:
        for what, needed in _needs(node):
            if subject.opset < needed:
                too_new.setdefault((what, needed), []).append(node)
    for (what, needed), nodes in too_new.items():
        problem = f"{what} ({len(nodes)} in the file) needs opset {needed}, the file is written in {subject.opset}"
        yield Fault(name_of(nodes[0]), problem, f"export with opset {max(needed, subject.target.opset)}")


def _needs(node: Any) -> Iterator[tuple[str, int]]:
    """Yield each feature that a Q or DQ uses, with the first opset that has it."""
    name = format_name(node)
    if name in QTYPES:
        yield name.upper(), QTYPES[name].onnx_opset
    if element(node.inputs[1]) in HALVES:
        yield f"a scale in {element(node.inputs[1])}", _HALF_SCALES
    if attribute(node, "block_size", 0):
        yield "a scale for each block", _BLOCKS
