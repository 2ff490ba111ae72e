"""Graph passes for float types: ``FloatTypes`` unifies the types of operands, ``ClampMasks`` limits mask constants."""

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
"""Number of operands of matrix multiplications and convolutions; a bias follows them."""
_LAYOUT = frozenset({"Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})


class FloatTypes:
    """Pass that casts operands to one float type, because ONNX has no type promotion.

    Models mix float types with autocast, ``.half()``, ``.double()`` or float32 tensors in a model in half precision.

    - Types that the target lacks become float32.
    - A quantized MatMul, Gemm or Conv computes in the type of its scales, so it reads its DQs directly. Its result is
    cast
      to the type that the model expects.
    - Operands of other nodes are cast to the type of the file, or to float32 if none has that type.
    - bfloat16 outputs are cast to float32, because numpy arrays, which engines return, lack bfloat16.
    """

    def __init__(self, dtype: str, absent: Collection[str] = ()) -> None:
        self._dtype = dtype
        self._absent = frozenset(absent) - {dtype, "FLOAT"}

    def requires(self, model: Any) -> str | None:
        return None

    def run(self, model: Any) -> int:
        changed = sum(map(self._convert_constant, list(model.graph.initializers.values())))
        for node in model.graph.all_nodes():
            changed += self._convert_outputs(node)
        changed += self._graph(model, model.graph) + _widened_outputs(model.graph)
        if changed:
            # Nodes that differed only by casts may now be equal.
            from onnx_ir.passes.common import CommonSubexpressionEliminationPass

            CommonSubexpressionEliminationPass()(model)
        return changed

    def _graph(self, model: Any, graph: Any) -> int:
        """Change the nodes of a graph in order, including the nodes of branches and loops."""
        opset, changed = int(model.opset_imports[""]), 0
        for node in list(graph):
            subgraphs = [value.as_graph() for value in node.attributes.values() if value.type == value.type.GRAPH]
            for subgraph in subgraphs:
                changed += self._subgraph(model, node, subgraph)
            if _is_same_cast(node):
                take_out(model, node, node.inputs[0])
                changed += 1
                continue
            changed += _moved_behind(node) + self._product(model, node) + self._operands(model, node, opset)
            _retype(node, opset)
        return changed

    def _subgraph(self, model: Any, node: Any, graph: Any) -> int:
        """Change the graph of a branch or loop; its inputs and outputs keep their declared types."""
        aligned = {"Loop": 1, "If": 0, "Scan": 0}.get(node.op_type)
        changed = self._graph(model, graph)
        if aligned is None:
            return changed
        for index, value in enumerate(graph.inputs):
            if index < len(node.inputs) and element(value) in _FLOATS:
                _cast_input(model, node, index, element(value))
        for index, output in enumerate(graph.outputs):
            outer = node.outputs[index - aligned] if 0 <= index - aligned < len(node.outputs) else None
            if element(outer) in _FLOATS and element(output) in _FLOATS and element(output) != element(outer):
                cast = _cast(node, output, element(outer))
                graph.append(cast)
                graph.outputs[index] = cast.outputs[0]
        return changed

    def ensures(self, model: Any) -> str | None:
        opset = int(model.opset_imports[""])
        for node in model.graph.all_nodes():
            for group in type_groups(node, opset):
                if len(types := _float_types(node, group.inputs)) > 1:
                    return f"{node.name} reads several float types: {', '.join(sorted(types))}"
        wrong = [value.name for value in model.graph.outputs if element(value) == "BFLOAT16"]
        return f"the output {wrong[0]} is still in bfloat16" if wrong else None

    # -- types that the target lacks ----------------------------------------------------------------------------------

    def _convert_constant(self, value: Any) -> int:
        """Convert a constant of a type that the target lacks to float32."""
        if value.const_value is None or element(value) not in self._absent:
            return 0
        import onnx_ir

        array = value.const_value.numpy().astype(np.float32)
        value.const_value = onnx_ir.tensor(array, name=value.name)
        value.type = onnx_ir.TensorType(onnx_ir.DataType.FLOAT)
        return 1

    def _convert_outputs(self, node: Any) -> int:
        """Change the output types of a node from types that the target lacks to float32."""
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

    # -- quantized operations -----------------------------------------------------------------------------------------

    def _product(self, model: Any, node: Any) -> int:
        """Let a quantized operation read its DQs without casts; return 1 if it changed, else 0."""
        count = _OPERANDS.get(node.op_type)
        if count is None or len(node.inputs) < count:
            return 0
        sources = [_dequantized(value) for value in node.inputs[:count]]
        if any(source is None for source in sources) or sources == list(node.inputs[:count]):
            return 0
        input_types, kinds = {element(value) for value in node.inputs[:count]}, {element(source) for source in sources}
        kind = next(iter(kinds)) if len(kinds) == 1 else self._dtype if self._dtype in kinds else "FLOAT"
        for index, source in enumerate(sources):
            _read_instead(node, index, source)
        for index in range(len(node.inputs)):
            _cast_input(model, node, index, kind)
        output = node.outputs[0]
        _set_type(output, kind)
        if len(input_types) == 1 and (original := next(iter(input_types))) != kind:
            _cast_output(node, original)
        return 1

    # -- other nodes --------------------------------------------------------------------------------------------------

    def _operands(self, model: Any, node: Any, opset: int) -> int:
        """Cast inputs with different float types where ONNX requires one type; return the number of groups."""
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
    """Cast bfloat16 outputs of a graph to float32, and return their number."""
    wide = [place for place, value in enumerate(graph.outputs) if element(value) == "BFLOAT16"]
    for place in wide:
        value = graph.outputs[place]
        cast = _cast(value.producer(), value, "FLOAT")
        cast.outputs[0].name, value.name = value.name, f"{value.name}.bfloat16"
        graph.append(cast)
        graph.outputs[place] = cast.outputs[0]
    return len(wide)


def _is_same_cast(node: Any) -> bool:
    """Return whether a node is a Cast to the type of its input."""
    if node.op_type != "Cast" or element(node.inputs[0]) not in _FLOATS or node.outputs[0].is_graph_output():
        return False
    return bool(_cast_type(node) == element(node.inputs[0]))


def _cast_type(cast: Any) -> str:
    """Return the output type of a Cast."""
    import onnx_ir

    return str(onnx_ir.DataType(cast.attributes["to"].as_int()).name)


def _float_types(node: Any, places: Collection[int]) -> set[str]:
    return {element(node.inputs[place]) for place in places} & set(_FLOATS)


def _dequantized(value: Any) -> Any:
    """Return the value before its casts if it comes from a DQ or a layout of one; None otherwise."""
    node = maker(value)
    while node is not None and node.op_type == "Cast" and element(value) in _FLOATS:
        value = node.inputs[0]
        node = maker(value)
    while node is not None and node.op_type in _LAYOUT:
        node = maker(node.inputs[0])
    return value if is_dequantize(node) else None


def _moved_behind(node: Any) -> int:
    """Move casts of a DQ behind the layout operator that reads them; return 1 if there were any, else 0."""
    if node.op_type not in _LAYOUT or node.inputs[0] is None:
        return 0
    source, value = _dequantized(node.inputs[0]), node.inputs[0]
    if source is None or source is value:
        return 0
    original = element(value)
    _read_instead(node, 0, source)
    _set_type(node.outputs[0], element(source))
    if original != element(source):
        _cast_output(node, original)
    return 1


def _read_instead(node: Any, place: int, value: Any) -> None:
    """Let a node read another value, and remove casts without readers."""
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
    """Return a new Cast of a value, not yet in the graph."""
    import onnx_ir

    cast = onnx_ir.Node("", "Cast", [value], [onnx_ir.AttrInt64("to", int(onnx_ir.DataType[kind]))])
    # Constants and graph inputs have no producer.
    cast.metadata_props.update({} if graph_node is None else graph_node.metadata_props)
    cast.outputs[0].shape = value.shape
    _set_type(cast.outputs[0], kind)
    return cast


def _cast_input(model: Any, node: Any, place: int, kind: str) -> None:
    """Cast a float input of a node to another type; a constant is converted."""
    value = node.inputs[place]
    if element(value) not in _FLOATS or element(value) == kind:
        return
    producer = value.producer()
    if (
        producer is not None
        and producer.op_type == "Cast"
        and element(producer.inputs[0]) == kind
        and _widens(producer)
    ):
        # Undo a promotion in the model from the required type.
        _read_instead(node, place, producer.inputs[0])
        return
    if value.const_value is not None:
        node.replace_input_with(place, _converted(model, value, kind))
        return
    cast = _cast(node, value, kind)
    node.graph.insert_before(node, cast)
    node.replace_input_with(place, cast.outputs[0])


def _converted(model: Any, value: Any, kind: str) -> Any:
    """Return a constant converted to another type, clipped to its largest finite number."""
    import ml_dtypes
    import onnx_ir

    dtype = onnx_ir.DataType[kind]
    array = value.const_value.numpy().astype(np.float64)
    limit = float(ml_dtypes.finfo(dtype.numpy()).max)  # type: ignore[no-untyped-call]
    array = np.where(np.isinf(array), array, array.clip(-limit, limit)).astype(dtype.numpy())
    return add_constant(model, f"{value.name}_{kind.lower()}", array, dtype)


def _widens(cast: Any) -> bool:
    """Return whether a Cast between float types keeps each value."""
    wide, narrow = (_FLOATS.index(element(value)) for value in (cast.outputs[0], cast.inputs[0]))
    return wide < narrow and wide < _FLOATS.index("FLOAT16")


def _cast_output(node: Any, kind: str) -> None:
    """Cast the output of a node for all its readers; a graph output keeps its name."""
    output = node.outputs[0]
    cast = _cast(node, output, kind)
    name, is_output = output.name, output.is_graph_output()
    output.replace_all_uses_with(cast.outputs[0], replace_graph_outputs=is_output)
    cast.replace_input_with(0, output)
    cast.outputs[0].name, output.name = name, f"{name}_wide"
    node.graph.insert_after(node, cast)


def _retype(node: Any, opset: int) -> None:
    """Set the output types of a node to the type of its inputs."""
    for group in type_groups(node, opset):
        types = _float_types(node, group.inputs)
        if len(types) == 1:
            for place in group.outputs:
                if element(node.outputs[place]) in _FLOATS:
                    _set_type(node.outputs[place], next(iter(types)))


class ClampMasks:
    """Pass that raises FP16 mask constants below ``FLOAT16_MASK`` to ``FLOAT16_MASK``.

    Masks use the lowest FP16 number, -65504. A score below -16 added to it is -inf, and a row of -inf is NaN after
    softmax. -30000 masks as well: exp(-30000) is 0 in every float type. Other low constants, such as bounds and
    factors, stay.
    """

    def requires(self, model: Any) -> str | None:
        return None

    def run(self, model: Any) -> int:
        import onnx_ir

        constants = list(_too_low(model))
        for value, uses in constants:
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
        return len(constants)

    def ensures(self, model: Any) -> str | None:
        unchanged = next((value.name for value, _ in _too_low(model)), None)
        return None if unchanged is None else f"a mask constant is still below {FLOAT16_MASK:g}: {unchanged}"


def _too_low(model: Any) -> Iterator[tuple[Any, list[tuple[Any, int]]]]:
    """Yield each low constant with the readers that use it as a mask."""
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
    array = floats(value)
    return array is not None and bool((array == 0).any()) and float(array.min()) < FLOAT16_MASK
