"""Pass that gives the operands of each node one element type, and a quantized product that of its scales.

A forward may compute in several float types: autocast, ``.half()`` and ``.double()`` around a product, tensors that it
makes in float32 in a model of half floats. ONNX has no promotion of types: a node whose inputs differ is no valid one.

- Types that the target does not compute in become float32.
- A quantized product computes in the type of its scales, so that it reads its DQs directly, and its result is cast to
  the type that the forward asked for. The codes and their sums are the same.
- Of any other node with several float types the operands are cast to the type of the file, or to float32 if none has
  that.
- An output in bfloat16 is cast to float32: no array of numpy, in which engines give their outputs, has that type.

Pass that limits mask constants to values that FP16 can add to.

Masks are made with the lowest number of the float type. In FP16 that is -65504, and a score below -16 added to it is
-inf; a row of nothing but -inf is NaN after softmax. -30000 masks as well: exp(-30000) is 0 in every float type.
Any other low number keeps its meaning: a bound, a factor, a comparison, or an infinite value that the model returns.
A mask of several numbers, such as a causal one, has zeros beside its lowest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from quantizer.export.passes.base import add_constant, take_out
from quantizer.export.qdq.graph import element, floats, is_dequantize, maker, scalar, type_groups
from quantizer.export.qdq.operand import masks_only
from quantizer.numerics.formats import FLOAT16_MASK

_FLOATS = ("DOUBLE", "FLOAT", "FLOAT16", "BFLOAT16")
_OPERANDS = {"MatMul": 2, "Gemm": 2, "Conv": 2, "ConvTranspose": 2, "Einsum": 2}
"""Products, and how many of their inputs are operands; a bias follows."""
_LAYOUT = frozenset({"Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})


class FloatTypes:
    """Casts where ONNX asks for one type."""

    def __init__(self, dtype: str, absent: Collection[str] = ()) -> None:
        self._dtype = dtype
        self._absent = frozenset(absent) - {dtype, "FLOAT"}

    def requires(self, model: Any) -> str | None:
        return None

    def run(self, model: Any) -> int:
        changed = sum(map(self._known, list(model.graph.initializers.values())))
        for node in model.graph.all_nodes():
            changed += self._constants(node)
        changed += self._graph(model, model.graph) + _widened_outputs(model.graph)
        if changed:
            # Without the casts between them, nodes that read one tensor may be the same.
            from onnx_ir.passes.common import CommonSubexpressionEliminationPass

            CommonSubexpressionEliminationPass()(model)
        return changed

    def _graph(self, model: Any, graph: Any) -> int:
        """Change the nodes of a graph in order, those of its branches and loops at their place."""
        opset, changed = int(model.opset_imports[""]), 0
        for node in list(graph):
            inner = [value.as_graph() for value in node.attributes.values() if value.type == value.type.GRAPH]
            for one in inner:
                changed += self._inside(model, node, one)
            if _is_same_cast(node):
                take_out(model, node, node.inputs[0])
                changed += 1
                continue
            changed += _moved_behind(node) + self._product(model, node) + self._operands(model, node, opset)
            _retype(node, opset)
        return changed

    def _inside(self, model: Any, node: Any, graph: Any) -> int:
        """Change the graph of a branch or loop, whose inputs and outputs keep the types that they are declared with."""
        aligned = {"Loop": 1, "If": 0, "Scan": 0}.get(node.op_type)
        changed = self._graph(model, graph)
        if aligned is None:
            return changed
        for place, given in enumerate(graph.inputs):
            if place < len(node.inputs) and element(given) in _FLOATS:
                _cast_input(model, node, place, element(given))
        for place, made in enumerate(graph.outputs):
            wanted = node.outputs[place - aligned] if 0 <= place - aligned < len(node.outputs) else None
            if element(wanted) in _FLOATS and element(made) in _FLOATS and element(made) != element(wanted):
                cast = _cast(node, made, element(wanted))
                graph.append(cast)
                graph.outputs[place] = cast.outputs[0]
        return changed

    def ensures(self, model: Any) -> str | None:
        opset = int(model.opset_imports[""])
        for node in model.graph.all_nodes():
            for group in type_groups(node, opset):
                if len(types := _float_types(node, group.inputs)) > 1:
                    return f"{node.name} reads several float types: {', '.join(sorted(types))}"
        wrong = [value.name for value in model.graph.outputs if element(value) == "BFLOAT16"]
        return f"the output {wrong[0]} is in bfloat16" if wrong else None

    # -- types that the target lacks ----------------------------------------------------------------------------------

    def _known(self, value: Any) -> int:
        """Write a constant of a type that the target lacks in float32."""
        if value.const_value is None or element(value) not in self._absent:
            return 0
        import onnx_ir

        array = value.const_value.numpy().astype(np.float32)
        value.const_value = onnx_ir.tensor(array, name=value.name)
        value.type = onnx_ir.TensorType(onnx_ir.DataType.FLOAT)
        return 1

    def _constants(self, node: Any) -> int:
        """Let a node make float32 that would make a type that the target lacks."""
        import onnx_ir

        changed = 0
        for output in node.outputs:
            if element(output) in self._absent:
                _set_type(output, "FLOAT")
                changed += 1
        for name, attribute in list(node.attributes.items()):
            if name in ("to", "dtype") and attribute.type == onnx_ir.AttributeType.INT:
                if onnx_ir.DataType(attribute.as_int()).name in self._absent:
                    node.attributes[name] = onnx_ir.AttrInt64(name, int(onnx_ir.DataType.FLOAT))
            elif attribute.type == onnx_ir.AttributeType.TENSOR and attribute.as_tensor().dtype.name in self._absent:
                array = attribute.as_tensor().numpy().astype(np.float32)
                node.attributes[name] = onnx_ir.AttrTensor(name, onnx_ir.tensor(array))
        return changed

    # -- products -----------------------------------------------------------------------------------------------------

    def _product(self, model: Any, node: Any) -> int:
        """Let a product read its DQs directly, if casts stand between; return whether any did."""
        count = _OPERANDS.get(node.op_type)
        if count is None or len(node.inputs) < count:
            return 0
        sources = [_dequantized(value) for value in node.inputs[:count]]
        if any(source is None for source in sources) or sources == list(node.inputs[:count]):
            return 0
        asked, kinds = {element(value) for value in node.inputs[:count]}, {element(source) for source in sources}
        kind = next(iter(kinds)) if len(kinds) == 1 else self._dtype if self._dtype in kinds else "FLOAT"
        for place, source in enumerate(sources):
            _read_instead(node, place, source)
        for place in range(len(node.inputs)):
            _cast_input(model, node, place, kind)
        output = node.outputs[0]
        _set_type(output, kind)
        if len(asked) == 1 and (wanted := next(iter(asked))) != kind:
            _cast_output(node, wanted)
        return 1

    # -- other nodes --------------------------------------------------------------------------------------------------

    def _operands(self, model: Any, node: Any, opset: int) -> int:
        """Cast the inputs of a node that have several float types where ONNX wants one."""
        changed = 0
        for group in type_groups(node, opset):
            types = _float_types(node, group.inputs)
            if len(types) < 2:
                continue
            kind = self._dtype if self._dtype in types else "FLOAT"
            for place in group.inputs:
                _cast_input(model, node, place, kind)
            changed += 1
        return changed


def _widened_outputs(graph: Any) -> int:
    """Let a graph give float32 where it would give bfloat16, and return how often."""
    wide = [place for place, value in enumerate(graph.outputs) if element(value) == "BFLOAT16"]
    for place in wide:
        value = graph.outputs[place]
        cast = _cast(value.producer(), value, "FLOAT")
        cast.outputs[0].name, value.name = value.name, f"{value.name}.bfloat16"
        graph.append(cast)
        graph.outputs[place] = cast.outputs[0]
    return len(wide)


def _is_same_cast(node: Any) -> bool:
    """Return whether a node is a Cast to the type that its input has."""
    if node.op_type != "Cast" or element(node.inputs[0]) not in _FLOATS or node.outputs[0].is_graph_output():
        return False
    return bool(_kind(node) == element(node.inputs[0]))


def _kind(cast: Any) -> str:
    """Return the type that a Cast makes."""
    import onnx_ir

    return str(onnx_ir.DataType(cast.attributes["to"].as_int()).name)


def _float_types(node: Any, places: Collection[int]) -> set[str]:
    return {element(node.inputs[place]) for place in places} & set(_FLOATS)


def _dequantized(value: Any) -> Any:
    """Return what a value is before it is cast, if a DQ or a layout of one makes that; None otherwise."""
    node = maker(value)
    while node is not None and node.op_type == "Cast" and element(value) in _FLOATS:
        value = node.inputs[0]
        node = maker(value)
    while node is not None and node.op_type in _LAYOUT:
        node = maker(node.inputs[0])
    return value if is_dequantize(node) else None


def _moved_behind(node: Any) -> int:
    """Move casts of a DQ behind a layout operator that reads them; return whether there were any."""
    if node.op_type not in _LAYOUT or node.inputs[0] is None:
        return 0
    source, given = _dequantized(node.inputs[0]), node.inputs[0]
    if source is None or source is given:
        return 0
    wanted = element(given)
    _read_instead(node, 0, source)
    _set_type(node.outputs[0], element(source))
    if wanted != element(source):
        _cast_output(node, wanted)
    return 1


def _read_instead(node: Any, place: int, value: Any) -> None:
    """Let a node read another value, and remove the casts that nothing reads then."""
    former = node.inputs[place]
    node.replace_input_with(place, value)
    while former is not value and not former.uses() and not former.is_graph_output():
        cast = former.producer()
        if cast is None or cast.op_type != "Cast":
            break
        former = cast.inputs[0]
        cast.graph.remove(cast, safe=True)


def _set_type(value: Any, kind: str) -> None:
    import onnx_ir

    value.type = onnx_ir.TensorType(onnx_ir.DataType[kind])


def _cast(graph_node: Any, value: Any, kind: str) -> Any:
    """Return a new Cast of a value, which is not in the graph yet."""
    import onnx_ir

    made = onnx_ir.Node("", "Cast", [value], [onnx_ir.AttrInt64("to", int(onnx_ir.DataType[kind]))])
    # What a file holds as a constant or takes as an input has no node.
    made.metadata_props.update({} if graph_node is None else graph_node.metadata_props)
    made.outputs[0].shape = value.shape
    _set_type(made.outputs[0], kind)
    return made


def _cast_input(model: Any, node: Any, place: int, kind: str) -> None:
    """Cast an input of a node if it is a float of another type; a number is written in that type."""
    value = node.inputs[place]
    if element(value) not in _FLOATS or element(value) == kind:
        return
    before = value.producer()
    if before is not None and before.op_type == "Cast" and element(before.inputs[0]) == kind and _widens(before):
        # The forward's own promotion of a tensor that is of the type already.
        _read_instead(node, place, before.inputs[0])
        return
    if value.const_value is not None:
        node.replace_input_with(place, _written(model, value, kind))
        return
    made = _cast(node, value, kind)
    node.graph.insert_before(node, made)
    node.replace_input_with(place, made.outputs[0])


def _written(model: Any, value: Any, kind: str) -> Any:
    """Return a constant in another type, large numbers as the largest that it has."""
    import ml_dtypes
    import onnx_ir

    wanted = onnx_ir.DataType[kind]
    array = value.const_value.numpy().astype(np.float64)
    most = float(ml_dtypes.finfo(wanted.numpy()).max)  # type: ignore[no-untyped-call]
    array = np.where(np.isinf(array), array, array.clip(-most, most)).astype(wanted.numpy())
    return add_constant(model, f"{value.name}_{kind.lower()}", array, wanted)


def _widens(cast: Any) -> bool:
    """Return whether a Cast between float types keeps each value."""
    wide, narrow = (_FLOATS.index(element(value)) for value in (cast.outputs[0], cast.inputs[0]))
    return wide < narrow and wide < _FLOATS.index("FLOAT16")


def _cast_output(node: Any, kind: str) -> None:
    """Cast the output of a node for all that reads it; a graph output keeps its name."""
    output = node.outputs[0]
    made = _cast(node, output, kind)
    name, is_output = output.name, output.is_graph_output()
    output.replace_all_uses_with(made.outputs[0], replace_graph_outputs=is_output)
    made.replace_input_with(0, output)
    made.outputs[0].name, output.name = name, f"{name}_wide"
    node.graph.insert_after(node, made)


def _retype(node: Any, opset: int) -> None:
    """Give the outputs of a node the type that its inputs have now."""
    for group in type_groups(node, opset):
        types = _float_types(node, group.inputs)
        if len(types) == 1:
            for place in group.outputs:
                if element(node.outputs[place]) in _FLOATS:
                    _set_type(node.outputs[place], next(iter(types)))


class ClampMasks:
    """Change of half-precision constants below ``FLOAT16_MASK`` to ``FLOAT16_MASK``, where they are read as masks."""

    def requires(self, model: Any) -> str | None:
        return None

    def run(self, model: Any) -> int:
        import onnx_ir

        found = list(_too_low(model))
        for value, uses in found:
            clamped = np.maximum(value.const_value.numpy(), np.float16(FLOAT16_MASK))
            if len(uses) < len(list(value.uses())) or value.is_graph_output():
                mask = add_constant(model, f"{value.name}_clamped", clamped, value.dtype)
                for reader, index in uses:
                    reader.replace_input_with(index, mask)
                continue
            replacement = onnx_ir.tensor(clamped, name=value.name)
            producer = value.producer()
            if producer is not None:
                producer.attributes["value"] = onnx_ir.AttrTensor("value", replacement)
            value.const_value = replacement
        return len(found)

    def ensures(self, model: Any) -> str | None:
        left = next((value.name for value, _ in _too_low(model)), None)
        return None if left is None else f"a constant is still below what FP16 can add to: {left}"


def _too_low(model: Any) -> Iterator[tuple[Any, list[tuple[Any, int]]]]:
    """Yield low constants, each with those of its readers that use it as a mask."""
    import onnx_ir

    constants = [*model.graph.initializers.values()]
    constants += [node.outputs[0] for node in model.graph if node.op_type == "Constant"]
    for value in constants:
        if value.dtype != onnx_ir.DataType.FLOAT16 or not _is_low(value):
            continue
        uses = [(reader, index) for reader, index in value.uses() if masks_only(reader, index)]
        if uses:
            yield value, uses


def _is_low(value: Any) -> bool:
    number = scalar(value)
    if number is not None:
        return number < FLOAT16_MASK
    held = floats(value)
    return held is not None and bool((held == 0).any()) and float(held.min()) < FLOAT16_MASK
