"""Graph that the rules of ``quantizer check`` read, the registry of rules, and the findings that they return.

``@rules.add(name)`` registers a function in a file of ``rules/``. It yields one ``Fault`` per node that breaks the
rule. The first line of its docstring states the rule. Severities are data in ``quantizer/plan/targets/base.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from quantizer.errors import ExportError, MissingDependencyError
from quantizer.export.qdq.graph import is_dequantize, is_dynamic_quantize, is_quantize, maker, varying_inputs
from quantizer.export.qdq.onnx_file import UnreadData, light_message, without_weights
from quantizer.export.qdq.operand import MOVES, PRODUCTS, Attention, Operand, attentions, operands
from quantizer.export.qdq.structure import structural_fault
from quantizer.plan.targets.base import GraphRules, Severity, TargetProfile
from quantizer.utils.paths import is_file, is_folder
from quantizer.utils.registry import Registry


@dataclass(frozen=True, slots=True)
class Fault:
    """Node that breaks a rule, as the rule reports it.

    Attributes:
        node: name of the node; empty if the fault concerns the whole file.
        problem: what is wrong, and its consequence.
        advice: what to change.
    """

    node: str
    problem: str
    advice: str


@dataclass(frozen=True, slots=True)
class Finding:
    """Broken rule with its severity on the target.

    Attributes:
        rule: name of the rule, as in ``docs/check.md``.
        severity: ``error`` or ``warning``, see ``Severity``.
        node: name of the node; empty if the finding concerns the whole file.
        problem: what is wrong, and its consequence.
        advice: what to change.
    """

    rule: str
    severity: Severity
    node: str
    problem: str
    advice: str

    def __str__(self) -> str:
        where = f" at {self.node}" if self.node else ""
        return f"{self.severity} [{self.rule}]{where}: {self.problem}; {self.advice}"


_INTEGER_OPERATORS = (
    *MOVES,
    *("Add", "Concat", "MaxPool", "AveragePool", "GlobalAveragePool", "Resize", "DepthToSpace", "SpaceToDepth"),
)
"""Operators behind a convolution that a target with quantized outputs computes in integers."""


@dataclass(frozen=True)
class Subject:
    """Checked graph, with its target.

    Attributes:
        model: the ``onnx_ir.Model``, with the types and shapes that ONNX can infer.
        target: profile of the backend.
        refused_by_checker: error of ``onnx.checker``; empty if it accepts the file.
        refused_data: name of each unopened external tensor, and the reason.
    """

    model: Any
    target: TargetProfile
    refused_by_checker: str
    refused_data: tuple[tuple[str, str], ...]

    @property
    def limits(self) -> GraphRules:
        """Rules of graphs on the target."""
        return self.target.graph_rules

    @property
    def opset(self) -> int:
        """Version of ONNX's default operator set; 0 if the file declares none."""
        return int(self.model.opset_imports.get("", 0))

    @cached_property
    def nodes(self) -> list[Any]:
        """All nodes, including the nodes of branches and loops."""
        return list(self.model.graph.all_nodes())

    @cached_property
    def quantizes(self) -> list[Any]:
        """QuantizeLinear nodes."""
        return [node for node in self.nodes if is_quantize(node)]

    @cached_property
    def dequantizes(self) -> list[Any]:
        """DequantizeLinear nodes."""
        return [node for node in self.nodes if is_dequantize(node)]

    @cached_property
    def dynamic_quantizes(self) -> list[Any]:
        """DynamicQuantizeLinear nodes with a DequantizeLinear behind them."""
        return list(dict.fromkeys(maker(node.inputs[0]) for node in self.dequantizes if _is_dynamic(node)))

    @cached_property
    def sources(self) -> list[Any]:
        """QuantizeLinear nodes, and DequantizeLinear nodes of stored constants."""
        stored = (node for node in self.dequantizes if not (is_quantize(maker(node.inputs[0])) or _is_dynamic(node)))
        return [*self.quantizes, *stored]

    @cached_property
    def products(self) -> list[tuple[Operand, Operand]]:
        """Pairs of operands of each MatMul, Gemm and convolution of ONNX's default domain."""
        return [operands(node) for node in self.nodes if node.op_type in PRODUCTS and node.domain == ""]

    @cached_property
    def results(self) -> dict[Any, Any]:
        """DequantizeLinear nodes that let the target compute the operator before them in integers.

        The value is that operator: a convolution, or an Add or move behind one. Empty if the target does not quantize
        outputs.
        """
        results: dict[Any, Any] = {}
        for node in self.dequantizes if self.target.quantizes_outputs else ():
            before = maker(node.inputs[0])
            source = maker(before.inputs[0]) if is_quantize(before) else None
            if source is not None and source.op_type in ("Relu", "Clip"):
                source = maker(source.inputs[0])
            if source is None:
                continue
            if source.op_type == "Conv":
                in_integers = all(operand.quantized for operand in operands(source))
            else:
                read = [maker(value) for value in varying_inputs(source)]
                in_integers = (
                    source.op_type in _INTEGER_OPERATORS
                    and all(map(is_dequantize, read))
                    and any(map(results.get, read))
                )
            if in_integers:
                results[node] = source
        return results

    @cached_property
    def attentions(self) -> list[Attention]:
        """Attentions that consist of MatMul, Softmax and MatMul."""
        return attentions(self.nodes)


def _is_dynamic(dequantize: Any) -> bool:
    """Return whether all inputs of a DequantizeLinear come from one DynamicQuantizeLinear."""
    before = maker(dequantize.inputs[0])
    return is_dynamic_quantize(before) and list(dequantize.inputs) == list(before.outputs)


Rule = Callable[[Subject], Iterator[Fault]]

rules: Registry[Rule] = Registry("rule")


def read_subject(path: Path, target: TargetProfile) -> Subject:
    """Read an ONNX file for a check against a target; raise ExportError for an unreadable file."""
    for package in ("onnx", "onnx_ir"):
        try:
            __import__(package)
        except ImportError as error:
            raise MissingDependencyError(package, "onnx") from error
    proto, unread = _proto(path)
    light, large = without_weights(proto, unread)
    model = _model(path, light, large, unread)
    refused = tuple(_refused_data(model, path.parent, unread))
    return Subject(model, target, "" if refused else _checker_error(path, proto, light), refused)


def _proto(path: Path) -> tuple[Any, dict[str, UnreadData]]:
    """Return the ``ModelProto`` of a file without its large initializers, and their positions in the file by name."""
    import onnx
    from google.protobuf.message import DecodeError

    if not is_file(path):
        state = "is a folder" if is_folder(path) else "does not exist"
        raise ExportError(f"{path} {state}; expected an ONNX file")
    try:
        proto, unread = _message(onnx, path)
    except DecodeError as error:
        raise ExportError(f"{path} is not a complete ONNX file ({error}); export or copy it again") from error
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ExportError(
            f"{path} is damaged: it contains a name that is not valid UTF-8; export or copy it again"
        ) from error
    if not proto.graph.node:
        raise ExportError(f"{path} contains no nodes, so it is empty or not an ONNX file; export or copy it again")
    defect = structural_fault(onnx, proto, {name: data.length for name, data in unread.items()})
    if defect is not None:
        raise ExportError(
            f"{path} is damaged or was written wrongly: {defect}; export it again and run onnx.checker on it"
        )
    return proto, unread


def _message(onnx: Any, path: Path) -> tuple[Any, dict[str, UnreadData]]:
    light = light_message(path)
    if light is not None:
        proto = onnx.load_model_from_string(light[0])
        # Old files list initializers among the inputs; read such a file completely.
        if not any(value.name in light[1] for value in proto.graph.input):
            return proto, light[1]
    return onnx.load_model(path, load_external_data=False), {}


def _model(path: Path, proto: Any, large: list[Any], unread: Mapping[str, UnreadData]) -> Any:
    """Return the graph with functions inlined, and with inferred types and shapes."""
    import onnx
    import onnx_ir
    from onnx import inliner

    if proto.functions:
        proto = inliner.inline_local_functions(proto)
    # Rules that need a shape report nothing without it. The message of ONNX may quote bytes that are not UTF-8.
    with suppress(onnx.shape_inference.InferenceError, UnicodeDecodeError):
        proto = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    try:
        model = onnx_ir.from_proto(proto)
        values = {value.name: value for value in model.graph.inputs}
        for tensor in large:
            value = values[tensor.name]
            model.graph.inputs.remove(value)
            # The tensor reads from the message or the file; nothing is copied.
            value.const_value = (
                onnx_ir.from_proto(tensor) if tensor.name not in unread else _lazy_initializer(path, tensor, unread)
            )
            model.graph.register_initializer(value)
        return model
    except (ValueError, TypeError, KeyError, RuntimeError, NotImplementedError) as error:
        raise ExportError(f"the graph in {path} is inconsistent: {_first_line(error)}") from error


def _lazy_initializer(path: Path, tensor: Any, unread: Mapping[str, UnreadData]) -> Any:
    """Return an initializer that reads its data from the model file on first use."""
    import onnx_ir

    offset, length = unread[tensor.name]
    return onnx_ir.ExternalTensor(
        path.name,
        offset,
        length,
        onnx_ir.DataType(tensor.data_type),
        shape=onnx_ir.Shape(tensor.dims),
        name=tensor.name,
        base_dir=path.parent,
    )


def _checker_error(path: Path, proto: Any, light: Any) -> str:
    import onnx

    try:
        # With a path, the checker tests external data; with the model, the file is not read twice.
        onnx.checker.check_model(path if _has_external_data(proto) else light)
    except onnx.checker.ValidationError as error:
        return _first_line(error)
    except UnicodeDecodeError:
        return "a name in it is not valid UTF-8"
    return ""


def _has_external_data(proto: Any) -> bool:
    return any(tensor.data_location == tensor.EXTERNAL for tensor in proto.graph.initializer)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _refused_data(model: Any, folder: Path, unread: Mapping[str, UnreadData]) -> Iterator[tuple[str, str]]:
    """Yield the name of each unopened external tensor with the reason; make all others readable."""
    in_model_file = {
        id(model.graph.initializers[name].const_value) for name in unread if name in model.graph.initializers
    }
    for tensor in _external(model):
        if id(tensor) in in_model_file:
            continue
        tensor.base_dir = folder
        problem = _problem(tensor, folder)
        if problem is not None:
            tensor.invalidate()
            yield tensor.name, problem


def _external(model: Any) -> Iterator[Any]:
    import onnx_ir

    tensors = [value.const_value for graph in (model.graph, *model.graph.subgraphs()) for value in _initializers(graph)]
    for node in model.graph.all_nodes():
        tensors += [
            entry.as_tensor() for entry in node.attributes.values() if entry.type == onnx_ir.AttributeType.TENSOR
        ]
    return (tensor for tensor in tensors if isinstance(tensor, onnx_ir.ExternalTensor))


def _initializers(graph: Any) -> list[Any]:
    return list(graph.initializers.values())


def _problem(tensor: Any, folder: Path) -> str | None:
    location = Path(tensor.location)
    file = (folder / location).resolve()
    if location.is_absolute() or not file.is_relative_to(folder.resolve()):
        return f"its data file {tensor.location} is outside the model's folder and was not opened"
    if not file.is_file():
        return f"its data file {tensor.location} does not exist"
    stat = file.stat()
    if stat.st_nlink > 1:
        return f"its data file {tensor.location} has a second hard link and was not opened"
    offset, length = tensor.offset or 0, tensor.length
    needed = offset + (tensor.nbytes if length is None else length)
    if offset < 0 or needed > stat.st_size or (length is not None and length < tensor.nbytes):
        return f"its data ends at byte {needed} of {tensor.location}, but the file has {stat.st_size} bytes"
    return None
