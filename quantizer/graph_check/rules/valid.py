"""What must hold before anything else: ONNX's own rules, and data that is where the file says."""

from __future__ import annotations

from collections.abc import Iterator

from quantizer.graph_check.finding import Fault
from quantizer.graph_check.rule import rules
from quantizer.graph_check.rules.opset import opset_format
from quantizer.graph_check.subject import Subject

__all__ = ["external_data", "onnx_checker"]


@rules.add("onnx-checker")
def onnx_checker(subject: Subject) -> Iterator[Fault]:
    """ONNX's own checker takes the file."""
    if not subject.refused_by_checker or any(opset_format(subject)):
        return  # an opset that is too low is said in better words by its own rule
    yield Fault("", f"onnx.checker refuses the file: {subject.refused_by_checker}", "export it again")


@rules.add("external-data")
def external_data(subject: Subject) -> Iterator[Fault]:
    """External data lies in the model's folder, complete; what lies elsewhere is not opened."""
    for name, problem in subject.refused_data:
        yield Fault(name, problem, "put the data file beside the model under that name, or export both again")
