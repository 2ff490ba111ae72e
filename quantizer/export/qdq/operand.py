"""Operands of matrix multiplications and convolutions, attentions, and attention masks in a Q/DQ graph.

An attention consists of two MatMuls of activations with a softmax between them. A mask is a low number that a softmax
turns into 0, and that has no other use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quantizer.export.qdq.graph import format_name, is_constant, is_dequantize, is_quantize, maker, readers

MATMULS = ("MatMul", "Gemm")
PRODUCTS = (*MATMULS, "Conv", "ConvTranspose")

MOVES = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Identity", "Slice", "Split")
"""Operators that only move the values of their first input."""


@dataclass(frozen=True, slots=True)
class Operand:
    """Operand of a MatMul, Gemm or convolution.

    Attributes:
        product: the node.
        index: index of the input.
        between: nodes between ``product`` and the DQ, the nearest to ``product`` first.
        dequantize: the DQ; None if the operand is not quantized.
        is_weight: whether the operand is independent of the model's inputs.
    """

    product: Any
    index: int
    between: tuple[Any, ...]
    dequantize: Any
    is_weight: bool

    @property
    def quantized(self) -> bool:
        """True if the operand comes from a DequantizeLinear."""
        return self.dequantize is not None

    @property
    def quantize(self) -> Any:
        """QuantizeLinear before the DQ; None if the operand is not quantized or stored quantized."""
        before = maker(self.dequantize.inputs[0]) if self.quantized else None
        return before if is_quantize(before) else None

    @property
    def format(self) -> str:
        """Name of the quantized format; empty if the operand is not quantized."""
        return format_name(self.dequantize) if self.quantized else ""


def operands(product: Any) -> tuple[Operand, Operand]:
    """Return both operands of a MatMul, Gemm or convolution, without the bias."""
    return _operand(product, 0), _operand(product, 1)


def _operand(product: Any, index: int) -> Operand:
    value = product.inputs[index]
    is_weight = is_constant(value)
    between = []
    node = maker(value)
    while node is not None and not is_dequantize(node):
        before = _source_of(node)
        if before is None:
            return Operand(product, index, (), None, is_weight)
        between.append(node)
        node = maker(before)
    return Operand(product, index, tuple(between) if node is not None else (), node, is_weight)


def _source_of(node: Any) -> Any:
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
_MAX_NODES = 24


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention written as softmax(scores) times values.

    Attributes:
        scores: MatMul of queries and keys.
        softmax: Softmax of the scores.
        context: MatMul of probabilities and values.
    """

    scores: Any
    softmax: Any
    context: Any

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Queries, keys, probabilities and values."""
        return (*operands(self.scores), *operands(self.context))


def attentions(nodes: list[Any]) -> list[Attention]:
    """Return the attentions that consist of MatMul, Softmax and MatMul."""
    matches = []
    for node in nodes:
        if node.op_type == "Softmax":
            scores, context = _scores(node), _context(node)
            if scores is not None and context is not None:
                matches.append(Attention(scores, node, context))
    return matches


def mask_adds(nodes: list[Any]) -> list[Any]:
    """Return the Add nodes between a MatMul of activations and a softmax."""
    adds = {}
    for node in nodes:
        if node.op_type == "Softmax":
            adds.update(dict.fromkeys(before for before in _walk_back(node) if before.op_type == "Add"))
    return [add for add in adds if any(not is_constant(value) for value in add.inputs)]


def _walk_back(softmax: Any) -> list[Any]:
    """Return the nodes between a MatMul and a softmax, without the MatMul."""
    visited: dict[Any, None] = {}
    waiting = [maker(softmax.inputs[0])]
    while waiting and len(visited) < _MAX_NODES:
        node = waiting.pop(0)
        if node is None or node in visited or node.op_type not in _BEFORE:
            continue
        visited[node] = None
        waiting += [maker(value) for value in node.inputs]
    return list(visited)


def _scores(softmax: Any) -> Any:
    before = [maker(value) for node in [softmax, *_walk_back(softmax)] for value in node.inputs]
    return next((node for node in before if _is_of_activations(node)), None)


def _context(softmax: Any) -> Any:
    visited: set[Any] = set()
    waiting = [softmax]
    while waiting and len(visited) < _MAX_NODES:
        node = waiting.pop(0)
        visited.add(node)
        for reader in readers(node.outputs[0]):
            if _is_of_activations(reader):
                return reader
            if reader not in visited and reader.op_type in _AFTER:
                waiting.append(reader)
    return None


def _is_of_activations(node: Any) -> bool:
    return node is not None and node.op_type == "MatMul" and not any(map(is_constant, node.inputs))


# Operators that move values or join them with others.
_MOVES = frozenset(
    {
        *("Cast", "Concat", "ConstantOfShape", "Expand", "Flatten", "Gather", "Identity", "Pad", "Reshape", "Slice"),
        *("Squeeze", "Split", "Tile", "Transpose", "Trilu", "Unsqueeze"),
    }
)
_REPLACING = frozenset({"Where", "ScatterElements", "ScatterND"})
"""Operators that replace values."""
_BOUNDS = frozenset({"Clip", "Max", "Min"})
_FLOATS = frozenset({"FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE"})


def masks_only(reader: Any, index: int) -> bool:
    """Return whether input ``index`` of a node only serves as an attention mask.

    A mask replaces scores or is added to them. In ``(1 - mask) * lowest``, ``lowest`` counts if the result is added.
    Bounds, divisors and numbers in comparisons or outputs are not masks.
    """
    if reader.op_type in _BOUNDS:
        return False
    ends = list(_ends_as_mask(reader, index, masks=False, visited=set()))
    return bool(ends) and all(ends)


def _ends_as_mask(reader: Any, index: int, masks: bool, visited: set[tuple[Any, int, bool]]) -> Iterator[bool]:
    """Yield for each end of the paths from an input whether the value ends as a mask; each path is followed once."""
    if (reader, index, masks) in visited:
        return
    visited.add((reader, index, masks))
    if reader.op_type == "Softmax":
        yield masks
        return
    masks_after = _mask_after(reader, index, masks)
    if masks_after is None:
        yield False
        return
    for output in reader.outputs:
        if output.is_graph_output():
            yield False
        for use, place in output.uses():
            yield from _ends_as_mask(use, place, masks_after, visited)


def _mask_after(reader: Any, index: int, masks: bool) -> bool | None:
    """Return whether a value is a mask behind a node; None for any other use."""
    kind = reader.op_type
    if kind == "Cast":
        return masks if reader.attributes["to"].as_int() in _float_types() else None
    if kind in _MOVES or kind in _BOUNDS:
        return masks
    if kind in _REPLACING:
        return True if index > 0 or kind != "Where" else None
    if kind == "Add":
        return True
    if kind == "Mul" or (kind in ("Div", "Sub") and index == 0):
        return masks
    return None


def _float_types() -> set[int]:
    import onnx_ir

    return {int(onnx_ir.DataType[name]) for name in _FLOATS}
