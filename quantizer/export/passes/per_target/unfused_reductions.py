"""Pass that keeps a reduction apart from what follows it, for a target that would compute it in the type of the next Q.

OpenVINO fuses a ReduceMax with the Q behind it, and then keeps the maximum itself in bytes: 1.4 becomes 1 before the Q
divides it by the scale. With a ReduceMean it fuses the factors of channels, and may read those of another axis, see
``qdq/reductions.py``. It fuses one reader alone, and a Max that reads the result twice is two.
"""

from __future__ import annotations

from typing import Any

from quantizer.export.passes.base import MatchPass, insert_before
from quantizer.qdq.graph import is_quantize
from quantizer.qdq.reductions import misreads_channels, misreads_channels_before


class UnfusedReductions(MatchPass[Any]):
    """``ReduceMax(x) -> ...`` becomes ``ReduceMax(x) -> Max(both inputs) -> ...``, with the same values.

    Args:
        kinds: the operators of such reductions.
        misread: the operators of those that count only where factors of channels behind them would be misread.
    """

    left = "a reduction can still be fused with its reader"

    def __init__(self, kinds: frozenset[str], misread: frozenset[str] = frozenset()) -> None:
        self.kinds, self.misread = kinds, misread

    def match(self, node: Any) -> Any | None:
        """Return the result of a reduction of floats; None for one that nothing but such a Max reads."""
        if node.op_type not in self.kinds and not (node.op_type in self.misread and misreads_channels(node)):
            return None
        result = node.outputs[0]
        readers = [reader for reader, _ in result.uses()]
        apart = len(readers) == 2 and readers[0] is readers[1] and readers[0].op_type == "Max"
        floats = result.dtype is not None and result.dtype.is_floating_point()
        return result if readers and floats and not apart else None

    def apply(self, model: Any, node: Any, found: Any) -> None:
        import onnx_ir

        same = onnx_ir.Node("", "Max", [found, found])
        same.metadata_props.update(node.metadata_props)
        same.outputs[0].shape, same.outputs[0].type = found.shape, found.type
        for reader, index in tuple(found.uses()):
            if reader is not same:
                reader.replace_input_with(index, same.outputs[0])
        model.graph.insert_after(node, same)


class FactorsBeforeReductions(MatchPass[Any]):
    """``x * factors -> ReduceMean`` becomes ``x * factors -> Max(both inputs) -> ReduceMean`` in files with Q/DQ.

    Args:
        kinds: the operators of such reductions.
    """

    left = "factors can still be moved behind a reduction"

    def __init__(self, kinds: frozenset[str]) -> None:
        self.kinds = kinds

    def match(self, node: Any) -> Any | None:
        """Return what is reduced, if factors of channels before the reduction would be misread behind it."""
        if node.op_type not in self.kinds or not misreads_channels_before(node):
            return None
        given = node.inputs[0]
        floats = given.dtype is not None and given.dtype.is_floating_point()
        return given if floats and any(is_quantize(other) for other in node.graph) else None

    def apply(self, model: Any, node: Any, found: Any) -> None:
        same = insert_before(node, "Max", [found, found], like=found, shape=found.shape)
        node.replace_input_with(0, same)
