"""Explanation of a library's error: the node it names, the module that the node came from, and a hint."""

from __future__ import annotations

import re
from pathlib import Path

from quantizer.engines.inspection.onnx_graph import read_graph
from quantizer.errors import QuantizerError

_SHOWN = 3
# Fragments of libraries' messages and the remedy for each; the first match counts.
_HINTS = (
    (
        r"plugin not found|no conversion rule|no op registered|neither an operator",
        "replace the call in the model that makes this operator (an operator patch), or leave that part out",
    ),
    (
        r"outside the base directory|escapes model directory|failed to import initializer",
        "put the file with the weights beside the model, under the name that the model gives it",
    ),
    (r"hw-specific datatypes", "quantize to int8, or build for a GPU generation that has this type"),
    (r"opset|ir_version|ir version", "export with an opset that it reads (export.opset)"),
    (r"data type|type error|datatype", "export for this backend (quantizer.backend): it takes no such type there"),
    (r"out of memory|bad_alloc|failed to allocate", "free memory, or give smaller largest sizes (export.dynamic)"),
)


def named_node(name: str, operator: str) -> str:
    """Return a node as messages name it: with its operator and its module.

    Node names begin with the module, as the export wrote them: ``encoder.layer.0.output.dense.site/MatMul``.
    """
    module = name.rpartition("/")[0]
    return f"node {name!r} ({operator})" + (f" of module {module!r}" if module else "")


def hint_for(text: str) -> str:
    """Return a remedy for a library's message, as ``; do this``; empty if none is known."""
    return next((f"; {hint}" for words, hint in _HINTS if re.search(words, text, re.IGNORECASE)), "")


def explain_error(onnx_path: Path, text: str) -> str:
    """Return ``text``, the nodes of the file that it names, and a hint."""
    found = _nodes(onnx_path, text)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    where = f" [{', '.join(found[:_SHOWN])}{more}]" if found else ""
    return f"{text}{where}{hint_for(text)}"


def _nodes(onnx_path: Path, text: str) -> list[str]:
    """Return the nodes whose names occur in ``text``; else those whose operators do."""
    try:
        nodes = list(read_graph(onnx_path).graph.node)
    except QuantizerError:
        # A damaged file, or onnx is not installed: the library's own message has to do.
        return []
    by_name = [node for node in nodes if node.name and _stands_in(text, node.name)]
    operators = {node.op_type for node in nodes if _stands_in(text, node.op_type)}
    return [named_node(node.name, node.op_type) for node in by_name or nodes if by_name or node.op_type in operators]


def _stands_in(text: str, word: str) -> bool:
    return re.search(rf"(?<![\w./]){re.escape(word)}(?![\w./])", text) is not None
