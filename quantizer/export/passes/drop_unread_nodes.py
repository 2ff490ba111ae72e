"""Pass that removes unread nodes and constants: remains of other passes, and Q/DQ pairs without a consumer."""

from __future__ import annotations

from typing import Any


class DropUnreadNodes:
    """Removal of everything that leads to no output."""

    def requires(self, model: Any) -> str | None:
        return None

    def run(self, model: Any) -> int:
        changed = 0
        for node in reversed(list(model.graph)):
            if _is_unread(node):
                model.graph.remove(node, safe=True)
                changed += 1
        for name in _unread_constants(model):
            del model.graph.initializers[name]
            changed += 1
        return changed

    def ensures(self, model: Any) -> str | None:
        left = [node.name for node in model.graph if _is_unread(node)] + _unread_constants(model)
        return f"nobody reads {left[0]}" if left else None


def _is_unread(node: Any) -> bool:
    return not any(value.uses() or value.is_graph_output() for value in node.outputs)


def _unread_constants(model: Any) -> list[str]:
    return [
        name
        for name, value in model.graph.initializers.items()
        if not value.uses() and not value.is_graph_output() and not value.is_graph_input()
    ]
