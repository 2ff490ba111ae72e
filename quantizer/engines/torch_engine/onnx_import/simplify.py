"""Models in which what was found out about them is written down, so that ONNX can tell more shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


def simplified(
    onnx: Any, model: Any, known: Mapping[str, np.ndarray[Any, Any]], chosen: Mapping[str, Any]
) -> Any | None:
    """Return a model with fewer nodes that computes the same; None if nothing was found out."""
    made = [list(_in_place_of(onnx, node, known, chosen)) for node in model.graph.node]
    if all(nodes == [node] for nodes, node in zip(made, model.graph.node, strict=True)):
        return None
    found = onnx.ModelProto()
    found.CopyFrom(model)
    del found.graph.node[:]
    found.graph.node.extend(node for nodes in made for node in nodes)
    held = {tensor.name for tensor in found.graph.initializer}
    for node in model.graph.node:
        for name in node.output:
            if name in known and name not in held:
                found.graph.initializer.append(onnx.numpy_helper.from_array(known[name], name))
        branch = chosen.get(node.output[0])
        if branch is not None:
            found.graph.initializer.extend(branch.initializer)
            found.graph.value_info.extend(branch.value_info)
    return found


def _in_place_of(
    onnx: Any, node: Any, known: Mapping[str, np.ndarray[Any, Any]], chosen: Mapping[str, Any]
) -> Iterable[Any]:
    if all(name in known for name in node.output):
        return
    branch = chosen.get(node.output[0])
    if branch is None:
        yield node
        return
    yield from branch.node
    for inner, outer in zip(branch.output, node.output, strict=True):
        yield onnx.helper.make_node("Identity", [inner.name], [outer], name=outer)
