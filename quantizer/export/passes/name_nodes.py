"""Node names that say module and operation, and no record of the machine that exported.

The exporter calls nodes ``node_linear_7`` and keeps each node's stack trace, with its paths, in the file.
"""

from __future__ import annotations

import ast
from collections import Counter
from typing import Any

__all__ = ["NameNodes"]

_SCOPES = "pkg.torch.onnx.name_scopes"


class NameNodes:
    """Names are ``path.of.module/OpType``, with a number behind where one module has several."""

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
            count += 1
        for value in [*model.graph.initializers.values(), *model.graph.inputs, *model.graph.outputs]:
            value.metadata_props.clear()
        model.metadata_props.clear()
        model.graph.metadata_props.clear()
        return count

    def ensures(self, model: Any) -> str | None:
        names = Counter(node.name for node in model.graph)
        twice = [name for name, count in names.items() if count > 1]
        return f"two nodes are called {twice[0]}" if twice else None


def _scope(node: Any) -> str:
    """The path of the module whose code made a node."""
    text = node.metadata_props.get(_SCOPES)
    if not text:
        return ""
    scopes = ast.literal_eval(text)
    # Nodes that the exporter itself adds carry a scope of its own.
    return "" if len(scopes) < 2 or str(scopes[-2]).startswith("_empty_nn_module_stack") else str(scopes[-2])
