"""Rules that come before all others: ONNX's own checker, and external data that is complete."""

from __future__ import annotations

from collections.abc import Iterator

from quantizer.graph_check.finding import Fault
from quantizer.graph_check.rule import rules
from quantizer.graph_check.rules.opset import opset_format
from quantizer.graph_check.subject import Subject


@rules.add("onnx-checker")
def onnx_checker(subject: Subject) -> Iterator[Fault]:
    """Pass ONNX's own checker."""
    if not subject.refused_by_checker or any(opset_format(subject)):
        return  # the rule opset-range reports it more clearly
    yield Fault("", f"onnx.checker refuses the file: {subject.refused_by_checker}", "export it again")


@rules.add("external-data")
def external_data(subject: Subject) -> Iterator[Fault]:
    """Keep external data complete in the model's folder; data elsewhere is not opened."""
    for name, problem in subject.refused_data:
        yield Fault(name, problem, "put the data file beside the model under that name, or export both again")
