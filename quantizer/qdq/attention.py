"""Attention in a graph: two products of activations with a softmax between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quantizer.qdq.graph import is_constant, maker, readers
from quantizer.qdq.operand import MOVES, Operand, operands

_BEFORE = (*MOVES, "Add", "Sub", "Mul", "Div", "Where", "Cast", "Max", "Min", "Clip", "Tanh")
_AFTER = (*MOVES, "Cast", "Dropout", "Where", "Mul", "Div", "QuantizeLinear", "DequantizeLinear")
_MOST_NODES = 24


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention that is spelled out: softmax(scores) times values.

    Attributes:
        scores: the product of queries and keys.
        softmax: the node that makes probabilities of them.
        context: the product of probabilities and values.
    """

    scores: Any
    softmax: Any
    context: Any

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Queries, keys, probabilities, values."""
        return (*operands(self.scores), *operands(self.context))


def attentions(nodes: list[Any]) -> list[Attention]:
    """Return every attention among the nodes that is spelled out."""
    found = []
    for node in nodes:
        if node.op_type == "Softmax":
            scores, context = _scores(node), _context(node)
            if scores is not None and context is not None:
                found.append(Attention(scores, node, context))
    return found


def mask_adds(nodes: list[Any]) -> list[Any]:
    """Return the adds between a product of activations and a softmax."""
    adds = {}
    for node in nodes:
        if node.op_type == "Softmax":
            adds.update(dict.fromkeys(before for before in _walk_back(node) if before.op_type == "Add"))
    return [add for add in adds if any(not is_constant(value) for value in add.inputs)]


def _walk_back(softmax: Any) -> list[Any]:
    """Return the nodes between a product and a softmax, the product excluded."""
    seen: dict[Any, None] = {}
    waiting = [maker(softmax.inputs[0])]
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop(0)
        if node is None or node in seen or node.op_type not in _BEFORE:
            continue
        seen[node] = None
        waiting += [maker(value) for value in node.inputs]
    return list(seen)


def _scores(softmax: Any) -> Any:
    before = [maker(value) for node in [softmax, *_walk_back(softmax)] for value in node.inputs]
    return next((node for node in before if _of_activations(node)), None)


def _context(softmax: Any) -> Any:
    seen: set[Any] = set()
    waiting = [softmax]
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop(0)
        seen.add(node)
        for reader in readers(node.outputs[0]):
            if _of_activations(reader):
                return reader
            if reader not in seen and reader.op_type in _AFTER:
                waiting.append(reader)
    return None


def _of_activations(node: Any) -> bool:
    return node is not None and node.op_type == "MatMul" and not any(map(is_constant, node.inputs))
