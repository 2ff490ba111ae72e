"""Pass that names nodes and tensors by module and operation, and removes traces of the exporting machine.

The exporter calls nodes ``node_linear_7`` and their results ``val_7``, and keeps each node's stack trace, with its
paths, in the file.
"""

from __future__ import annotations

import ast
from collections import Counter
from typing import Any

_SCOPES = "pkg.torch.onnx.name_scopes"
_CLASSES = "pkg.torch.onnx.class_hierarchy"
_PARAMETER = "pkg.torch.export.graph_signature.InputSpec.kind"
_PRODUCTS = ("Conv", "ConvTranspose", "Gemm")
"""The products into which the exporter folds a batch normalization."""
_STORED = ".stored"
"""The end of the name of a weight's steps: what is before it names the site and its operand."""


class NameNodes:
    """Names of the form ``path.of.module/OpType`` for nodes and their results, numbered within a module if need be.

    Those in the body of a loop are named after the loop: ``path.of.module/Scan/OpType_1``.

    Inputs and outputs of the graph keep their names, and so do parameters; any other constant is named after the first
    node that reads it: ``path.of.module/OpType.input_1``.
    """

    def requires(self, model: Any) -> str | None:
        return None

    def run(self, model: Any) -> int:
        used: Counter[str] = Counter()
        count = 0
        for node in model.graph:
            name = f"{_scope(node) or 'graph'}/{node.op_type}"
            used[name] += 1
            node.name = name if used[name] == 1 else f"{name}_{used[name]}"
            node.metadata_props.clear()
            count += 1 + _name_inside(node)
        for value, name in [*_result_names(model), *_constant_names(model)]:
            value.name = name
        for value in [*model.graph.initializers.values(), *model.graph.inputs, *model.graph.outputs]:
            value.metadata_props.clear()
        model.metadata_props.clear()
        model.graph.metadata_props.clear()
        return count

    def ensures(self, model: Any) -> str | None:
        names = Counter(node.name for node in model.graph)
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            return f"two nodes are called {twice[0]}"
        other = [f"{value.name!r} and not {name!r}" for value, name in _result_names(model) if value.name != name]
        return f"a tensor is called {other[0]}" if other else None


def _name_inside(node: Any) -> int:
    """Name what is in the graphs of a node, such as the body of a loop, after the node; return how many nodes."""
    used: Counter[str] = Counter()
    for attribute in node.attributes.values():
        if attribute.type.name != "GRAPH":
            continue
        for number, value in enumerate(attribute.as_graph().inputs):
            value.name = f"{node.name}/input_{number}"
        for inner in attribute.as_graph():
            used[inner.op_type] += 1
            inner.name = f"{node.name}/{inner.op_type}_{used[inner.op_type]}"
            inner.metadata_props.clear()
            for number, value in enumerate(inner.outputs):
                value.name = f"{inner.name}:{number}"
    return used.total()


def _result_names(model: Any) -> list[tuple[Any, str]]:
    """Return the results of nodes, each with its name."""
    return [
        (value, node.name if number == 0 else f"{node.name}:{number}")
        for node in model.graph
        for number, value in enumerate(node.outputs)
        if not value.is_graph_output() and value.name != ""  # an output that is left out has an empty name
    ]


def _constant_names(model: Any) -> list[tuple[Any, str]]:
    """Return the constants that the exporter named, each with a name after the first node that reads it."""
    place = {node: number for number, node in enumerate(model.graph)}
    found = []
    for value in model.graph.initializers.values():
        if "." not in value.name and _PARAMETER not in value.metadata_props and not value.is_graph_output():
            reads = [(place[node], node.name, index) for node, index in value.uses() if node in place]
            if reads:
                _, name, index = min(reads)
                found.append((value, f"{name}.input_{index}"))
    return found


def _scope(node: Any) -> str:
    """Return the path of the module whose code made a node; for the DQ of a weight, the path of its site.

    A product into which a batch normalization was folded carries the scope of that: it is named after its weight.
    """
    if node.op_type == "DequantizeLinear" and _STORED in node.inputs[0].name:
        return str(node.inputs[0].name.partition(_STORED)[0])
    text = node.metadata_props.get(_SCOPES)
    if not text:
        return ""
    folded = node.op_type in _PRODUCTS and "_batch_norm" in node.metadata_props.get(_CLASSES, "")
    if folded and (owner := node.inputs[1].name.rpartition(".")[0]):
        return str(owner)
    scopes = ast.literal_eval(text)
    # Nodes that the exporter itself adds carry a scope of its own.
    return "" if len(scopes) < 2 or str(scopes[-2]).startswith("_empty_nn_module_stack") else str(scopes[-2])
