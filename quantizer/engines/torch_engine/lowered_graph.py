"""A graph of torch's operators with its constants, and a program that runs it. No source code is made of either.

``torch.fx.GraphModule`` writes names and arguments of its nodes into Python text, which it executes. A graph that was
read from a file may hold any text there, so it is run node by node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx


class LoweredGraph(torch.nn.Module):
    """Graph of operators, whose ``get_attr`` nodes read the module's buffers.

    Args:
        graph: the graph; its output is a tuple.
        constants: the buffers by name.
    """

    def __init__(self, graph: fx.Graph, constants: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.graph = graph
        for name, tensor in constants.items():
            self.register_buffer(name, tensor)


def program(module: LoweredGraph) -> Callable[..., tuple[Any, ...]]:
    """Return a function of the graph's inputs by position, which may run in several threads at once.

    It drops each value after its last use.
    """
    nodes = list(module.graph.nodes)
    places = {node: place for place, node in enumerate(nodes)}
    last = {source: node for node in nodes for source in node.all_input_nodes}
    start: list[Any] = [getattr(module, str(node.target)) if node.op == "get_attr" else None for node in nodes]
    inputs = [places[node] for node in nodes if node.op == "placeholder"]
    outputs = [places[node] for node in nodes[-1].args[0]]
    steps = []
    for node in nodes:
        if node.op != "call_function":
            continue
        dropped = [
            places[source] for source in node.all_input_nodes if last[source] is node and source.op != "get_attr"
        ]
        positional = _holes(enumerate(node.args), places)
        keywords = _holes(node.kwargs.items(), places)
        steps.append((node.target, list(node.args), dict(node.kwargs), positional, keywords, places[node], dropped))

    def run(*given: Any) -> tuple[Any, ...]:
        values = start.copy()
        for place, value in zip(inputs, given, strict=True):
            values[place] = value
        for target, args, kwargs, positional, keywords, place, dropped in steps:
            own = args.copy()
            for at, source in positional:
                own[at] = values[source] if type(source) is int else source(values)
            if keywords:
                kwargs = {**kwargs, **{at: source(values) for at, source in keywords}}
            values[place] = target(*own, **kwargs)
            for source in dropped:
                values[source] = None
        return tuple(values[place] for place in outputs)

    return run


def _holes(arguments: Any, places: Mapping[fx.Node, int]) -> list[tuple[Any, Any]]:
    """Return the arguments that hold values of nodes: position or name, and the value's place or a function of all."""
    found: list[tuple[Any, Any]] = []
    for at, value in arguments:
        if isinstance(value, fx.Node) and isinstance(at, int):
            found.append((at, places[value]))
        elif _reads_nodes(value):
            found.append((at, _resolver(value, places)))
    return found


def _reads_nodes(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_reads_nodes(item) for item in value)
    return isinstance(value, fx.Node)


def _resolver(value: Any, places: Mapping[fx.Node, int]) -> Callable[[list[Any]], Any]:
    """Return a function that puts the values of nodes into an argument."""
    if isinstance(value, fx.Node):
        place = places[value]
        return lambda values: values[place]
    if isinstance(value, list | tuple):
        items = [_resolver(item, places) for item in value]
        return lambda values: [item(values) for item in items]
    return lambda values: value
