"""Operands of a product: the nodes between it and the DequantizeLinear that it reads.

Attention in a graph: two products of activations with a softmax between them.

Masks in a graph: a low number that a softmax turns into 0, and that nothing else reads.

A factor, a divisor, a bound or an operand of a comparison is no mask, nor is a number that the model returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quantizer.export.qdq.graph import format_name, is_constant, is_dequantize, is_quantize, maker, readers

MATMULS = ("MatMul", "Gemm")
PRODUCTS = (*MATMULS, "Conv", "ConvTranspose")

MOVES = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Identity", "Slice", "Split")
"""Operators that compute nothing: their output is their first input's values."""


@dataclass(frozen=True, slots=True)
class Operand:
    """Operand of a product.

    Attributes:
        product: the node.
        index: the index of its input.
        between: the nodes between the product and the DQ, the nearest to the product first.
        dequantize: the DQ; None if the operand is float.
        is_weight: whether the operand is independent of the model's inputs.
    """

    product: Any
    index: int
    between: tuple[Any, ...]
    dequantize: Any
    is_weight: bool

    @property
    def quantized(self) -> bool:
        """Flag of an operand that comes from a DequantizeLinear."""
        return self.dequantize is not None

    @property
    def quantize(self) -> Any:
        """QuantizeLinear before the DQ; None if the operand is float or stored in codes."""
        before = maker(self.dequantize.inputs[0]) if self.quantized else None
        return before if is_quantize(before) else None

    @property
    def format(self) -> str:
        """Name of its format; empty if it is float."""
        return format_name(self.dequantize) if self.quantized else ""


def operands(product: Any) -> tuple[Operand, Operand]:
    """Return the two operands of a product, without the bias."""
    return _operand(product, 0), _operand(product, 1)


def _operand(product: Any, index: int) -> Operand:
    value = product.inputs[index]
    is_weight = is_constant(value)
    between = []
    node = maker(value)
    while node is not None and not is_dequantize(node):
        before = _passed(node)
        if before is None:
            return Operand(product, index, (), None, is_weight)
        between.append(node)
        node = maker(before)
    return Operand(product, index, tuple(between) if node is not None else (), node, is_weight)


def _passed(node: Any) -> Any:
    """Return the value that a node moves, casts, or multiplies by a constant; None for any other node."""
    if node.op_type in (*MOVES, "Cast"):
        return node.inputs[0]
    if node.op_type in ("Mul", "Div"):
        constants = [is_constant(value) for value in node.inputs]
        if constants == [False, True]:
            return node.inputs[0]
        if constants == [True, False] and node.op_type == "Mul":
            return node.inputs[1]
    return None


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


# Operators that pass values on, moved or joined with others.
_MOVES = frozenset(
    {
        *("Cast", "Concat", "ConstantOfShape", "Expand", "Flatten", "Gather", "Identity", "Pad", "Reshape", "Slice"),
        *("Squeeze", "Split", "Tile", "Transpose", "Trilu", "Unsqueeze"),
    }
)
_CHOOSES = frozenset({"Where", "ScatterElements", "ScatterND"})
"""Puts numbers in the place of others."""
_BOUNDS = frozenset({"Clip", "Max", "Min"})
_FLOATS = frozenset({"FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE"})


def masks_only(reader: Any, index: int) -> bool:
    """Return whether input ``index`` of a node reaches a softmax as a mask, and nothing else.

    It replaces scores, or is added to them. A number that is multiplied first, ``(1 - kept) * lowest``, is a mask if
    the product is added; a bound is none.
    """
    if reader.op_type in _BOUNDS:
        return False
    ways = list(_ends(reader, index, masks=False, seen=set()))
    return bool(ways) and all(ways)


def _ends(reader: Any, index: int, masks: bool, seen: set[tuple[Any, int, bool]]) -> Iterator[bool]:
    """Yield for each end of the paths from an input whether a mask ends there; each path is followed once."""
    if (reader, index, masks) in seen:
        return
    seen.add((reader, index, masks))
    if reader.op_type == "Softmax":
        yield masks
        return
    further = _further(reader, index, masks)
    if further is None:
        yield False
        return
    for output in reader.outputs:
        if output.is_graph_output():
            yield False
        for use, place in output.uses():
            yield from _ends(use, place, further, seen)


def _further(reader: Any, index: int, masks: bool) -> bool | None:
    """Return whether the value is a mask behind a node; None if it is something else there."""
    kind = reader.op_type
    if kind == "Cast":
        return masks if reader.attributes["to"].as_int() in _float_types() else None
    if kind in _MOVES or kind in _BOUNDS:
        return masks
    if kind in _CHOOSES:
        return True if index > 0 or kind != "Where" else None
    if kind == "Add":
        return True
    if kind == "Mul" or (kind in ("Div", "Sub") and index == 0):
        return masks
    return None


def _float_types() -> set[int]:
    import onnx_ir

    return {int(onnx_ir.DataType[name]) for name in _FLOATS}
