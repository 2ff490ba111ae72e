"""Findings of the check of a file: one for each place where a rule is broken.

Subject of the rules: a graph, and the target that it is meant for.

Registry of rules: ``@rules.add(name)`` above a function in a file of ``rules/`` adds one.

The function yields a ``Fault`` for each place where its rule is broken; the first line of its docstring states the
rule. Severity and applicability on each target are data: ``quantizer/targets/base.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from quantizer.common.registry import Registry
from quantizer.qdq.graph import is_dequantize, is_dynamic_quantize, is_quantize, maker, varying_inputs
from quantizer.qdq.operand import MOVES, PRODUCTS, Attention, Operand, attentions, operands
from quantizer.targets.base import GraphRules, Severity, TargetProfile


@dataclass(frozen=True, slots=True)
class Fault:
    """Place where a rule is broken, as the rule reports it.

    Attributes:
        node: the name of the node; empty where the file as a whole is meant.
        problem: what is wrong, and what comes of it.
        advice: what to change.
    """

    node: str
    problem: str
    advice: str


@dataclass(frozen=True, slots=True)
class Finding:
    """Broken rule of a target.

    Attributes:
        rule: its name, one of those in ``docs/check.md``.
        severity: ``error`` or ``warning``, see ``Severity``.
        node: the name of the node; empty where the file as a whole is meant.
        problem: what is wrong, and what comes of it.
        advice: what to change.
    """

    rule: str
    severity: Severity
    node: str
    problem: str
    advice: str

    def __str__(self) -> str:
        where = f" at {self.node}" if self.node else ""
        return f"{self.severity} [{self.rule}]{where}: {self.problem}; {self.advice}"


_BETWEEN_CODES = (
    *MOVES,
    *("Add", "Concat", "MaxPool", "AveragePool", "GlobalAveragePool", "Resize", "DepthToSpace", "SpaceToDepth"),
)
"""What a target that quantizes results computes in integers behind convolutions, between codes and codes."""


@dataclass(frozen=True)
class Subject:
    """Graph and its target.

    Attributes:
        model: the ``onnx_ir.Model``, with the types and shapes that ONNX can infer.
        target: the profile of the backend.
        refused_by_checker: what ONNX's own checker said; empty where it takes the file.
        refused_data: what was wrong with external data, by the name of the tensor.
    """

    model: Any
    target: TargetProfile
    refused_by_checker: str
    refused_data: tuple[tuple[str, str], ...]

    @property
    def limits(self) -> GraphRules:
        """Limits of graphs on the target."""
        return self.target.graph_rules

    @property
    def opset(self) -> int:
        """Version of ONNX's own operators; 0 if the file names none."""
        return int(self.model.opset_imports.get("", 0))

    @cached_property
    def nodes(self) -> list[Any]:
        """All nodes, those of branches and loops included."""
        return list(self.model.graph.all_nodes())

    @cached_property
    def quantizes(self) -> list[Any]:
        """Every QuantizeLinear."""
        return [node for node in self.nodes if is_quantize(node)]

    @cached_property
    def dequantizes(self) -> list[Any]:
        """Every DequantizeLinear."""
        return [node for node in self.nodes if is_dequantize(node)]

    @cached_property
    def dynamic_quantizes(self) -> list[Any]:
        """Every DynamicQuantizeLinear that a DequantizeLinear reads."""
        return list(dict.fromkeys(maker(node.inputs[0]) for node in self.dequantizes if _of_run_time(node)))

    @cached_property
    def sources(self) -> list[Any]:
        """Origins of codes with scales of their own: every Q, and every DQ of stored codes."""
        stored = (node for node in self.dequantizes if not (is_quantize(maker(node.inputs[0])) or _of_run_time(node)))
        return [*self.quantizes, *stored]

    @cached_property
    def products(self) -> list[tuple[Operand, Operand]]:
        """Operands of every product that is written with ONNX's own operators."""
        return [operands(node) for node in self.nodes if node.op_type in PRODUCTS and node.domain == ""]

    @cached_property
    def results(self) -> dict[Any, Any]:
        """Every DQ behind a convolution, or an add or a move behind one, without which that is computed in floats.

        Its value is that operator. Empty for a target that computes such operators in integers anyway.
        """
        found: dict[Any, Any] = {}
        for node in self.dequantizes if self.target.quantizes_outputs else ():
            before = maker(node.inputs[0])
            made = maker(before.inputs[0]) if is_quantize(before) else None
            if made is not None and made.op_type in ("Relu", "Clip"):
                made = maker(made.inputs[0])
            if made is None:
                continue
            if made.op_type == "Conv":
                whole = all(operand.quantized for operand in operands(made))
            else:
                read = [maker(value) for value in varying_inputs(made)]
                whole = made.op_type in _BETWEEN_CODES and all(map(is_dequantize, read)) and any(map(found.get, read))
            if whole:
                found[node] = made
        return found

    @cached_property
    def attentions(self) -> list[Attention]:
        """Every attention that is spelled out."""
        return attentions(self.nodes)


def _of_run_time(dequantize: Any) -> bool:
    """Return whether codes, scale and zero point of a DQ come from one DynamicQuantizeLinear."""
    before = maker(dequantize.inputs[0])
    return is_dynamic_quantize(before) and list(dequantize.inputs) == list(before.outputs)


Rule = Callable[[Subject], Iterator[Fault]]

rules: Registry[Rule] = Registry("rule")
