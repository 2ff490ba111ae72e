"""The graph that rules look at, read from a file, and the findings that they give.

Subject of the rules: a graph, and the target that it is meant for.

Registry of rules: ``@rules.add(name)`` above a function in a file of ``rules/`` adds one.

The function yields a ``Fault`` for each place where its rule is broken; the first line of its docstring states the
rule. Severity and applicability on each target are data: ``quantizer/plan/targets/base.py``.
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
from quantizer.export.qdq.onnx_file import HeldBack, light_message, without_weights
from quantizer.export.qdq.operand import MOVES, PRODUCTS, Attention, Operand, attentions, operands
from quantizer.export.qdq.structure import structural_fault
from quantizer.plan.targets.base import GraphRules, Severity, TargetProfile
from quantizer.utils.paths import is_file, is_folder
from quantizer.utils.registry import Registry


@dataclass(frozen=True, slots=True)
class Fault:
    """Place where a rule is broken, as the rule reports it.

    Attributes:
        node: the name of the node; empty where the file as a whole is meant.
        problem: what is wrong, and what comes of it.
        advice: what to change.
    """

    node: str
    problem: str
    advice: str


@dataclass(frozen=True, slots=True)
class Finding:
    """Broken rule of a target.

    Attributes:
        rule: its name, one of those in ``docs/check.md``.
        severity: ``error`` or ``warning``, see ``Severity``.
        node: the name of the node; empty where the file as a whole is meant.
        problem: what is wrong, and what comes of it.
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


_BETWEEN_CODES = (
    *MOVES,
    *("Add", "Concat", "MaxPool", "AveragePool", "GlobalAveragePool", "Resize", "DepthToSpace", "SpaceToDepth"),
)
"""What a target that quantizes results computes in integers behind convolutions, between codes and codes."""


@dataclass(frozen=True)
class Subject:
    """Graph and its target.

    Attributes:
        model: the ``onnx_ir.Model``, with the types and shapes that ONNX can infer.
        target: the profile of the backend.
        refused_by_checker: what ONNX's own checker said; empty where it takes the file.
        refused_data: what was wrong with external data, by the name of the tensor.
    """

    model: Any
    target: TargetProfile
    refused_by_checker: str
    refused_data: tuple[tuple[str, str], ...]

    @property
    def limits(self) -> GraphRules:
        """Limits of graphs on the target."""
        return self.target.graph_rules

    @property
    def opset(self) -> int:
        """Version of ONNX's own operators; 0 if the file names none."""
        return int(self.model.opset_imports.get("", 0))

    @cached_property
    def nodes(self) -> list[Any]:
        """All nodes, those of branches and loops included."""
        return list(self.model.graph.all_nodes())

    @cached_property
    def quantizes(self) -> list[Any]:
        """Every QuantizeLinear."""
        return [node for node in self.nodes if is_quantize(node)]

    @cached_property
    def dequantizes(self) -> list[Any]:
        """Every DequantizeLinear."""
        return [node for node in self.nodes if is_dequantize(node)]

    @cached_property
    def dynamic_quantizes(self) -> list[Any]:
        """Every DynamicQuantizeLinear that a DequantizeLinear reads."""
        return list(dict.fromkeys(maker(node.inputs[0]) for node in self.dequantizes if _of_run_time(node)))

    @cached_property
    def sources(self) -> list[Any]:
        """Origins of codes with scales of their own: every Q, and every DQ of stored codes."""
        stored = (node for node in self.dequantizes if not (is_quantize(maker(node.inputs[0])) or _of_run_time(node)))
        return [*self.quantizes, *stored]

    @cached_property
    def products(self) -> list[tuple[Operand, Operand]]:
        """Operands of every product that is written with ONNX's own operators."""
        return [operands(node) for node in self.nodes if node.op_type in PRODUCTS and node.domain == ""]

    @cached_property
    def results(self) -> dict[Any, Any]:
        """Every DQ behind a convolution, or an add or a move behind one, without which that is computed in floats.

        Its value is that operator. Empty for a target that computes such operators in integers anyway.
        """
        found: dict[Any, Any] = {}
        for node in self.dequantizes if self.target.quantizes_outputs else ():
            before = maker(node.inputs[0])
            made = maker(before.inputs[0]) if is_quantize(before) else None
            if made is not None and made.op_type in ("Relu", "Clip"):
                made = maker(made.inputs[0])
            if made is None:
                continue
            if made.op_type == "Conv":
                whole = all(operand.quantized for operand in operands(made))
            else:
                read = [maker(value) for value in varying_inputs(made)]
                whole = made.op_type in _BETWEEN_CODES and all(map(is_dequantize, read)) and any(map(found.get, read))
            if whole:
                found[node] = made
        return found

    @cached_property
    def attentions(self) -> list[Attention]:
        """Every attention that is spelled out."""
        return attentions(self.nodes)


def _of_run_time(dequantize: Any) -> bool:
    """Return whether codes, scale and zero point of a DQ come from one DynamicQuantizeLinear."""
    before = maker(dequantize.inputs[0])
    return is_dynamic_quantize(before) and list(dequantize.inputs) == list(before.outputs)


Rule = Callable[[Subject], Iterator[Fault]]

rules: Registry[Rule] = Registry("rule")


def read_subject(path: Path, target: TargetProfile) -> Subject:
    """Read a file for the rules."""
    for package in ("onnx", "onnx_ir"):
        try:
            __import__(package)
        except ImportError as error:
            raise MissingDependencyError(package, "onnx") from error
    proto, held = _proto(path)
    light, large = without_weights(proto, held)
    model = _model(path, light, large, held)
    refused = tuple(_refused_data(model, path.parent, held))
    return Subject(model, target, "" if refused else _said_by_checker(path, proto, light), refused)


def _proto(path: Path) -> tuple[Any, dict[str, HeldBack]]:
    """Return the message of a file, and the data of large initializers that it was read without, by name."""
    import onnx
    from google.protobuf.message import DecodeError

    if not is_file(path):
        what = "is a folder" if is_folder(path) else "does not exist"
        raise ExportError(f"{path} {what}; expected an ONNX file")
    try:
        proto, held = _message(onnx, path)
    except DecodeError as error:
        raise ExportError(
            f"{path} is no ONNX file, or only a part of one ({error}); export or copy it again"
        ) from error
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ExportError(f"{path} is damaged: a name in it is no text; export or copy it again") from error
    if not proto.graph.node:
        raise ExportError(f"{path} is no ONNX file, or an empty one: it has no node; export or copy it again")
    fault = structural_fault(onnx, proto, {name: data.length for name, data in held.items()})
    if fault is not None:
        raise ExportError(
            f"{path} is damaged, or was written wrongly: {fault}; export it again, and hold it to onnx.checker"
        )
    return proto, held


def _message(onnx: Any, path: Path) -> tuple[Any, dict[str, HeldBack]]:
    read = light_message(path)
    if read is not None:
        proto = onnx.load_model_from_string(read[0])
        # An initializer that is an input as well, as in old files, stays what it is, with its data.
        if not any(value.name in read[1] for value in proto.graph.input):
            return proto, read[1]
    return onnx.load_model(path, load_external_data=False), {}


def _model(path: Path, proto: Any, large: list[Any], held: Mapping[str, HeldBack]) -> Any:
    """Return the graph with functions inlined, and with the types and shapes that ONNX infers."""
    import onnx
    import onnx_ir
    from onnx import inliner

    if proto.functions:
        proto = inliner.inline_local_functions(proto)
    # Rules that need a shape stay silent without one. ONNX's message may quote bytes that are no text.
    with suppress(onnx.shape_inference.InferenceError, UnicodeDecodeError):
        proto = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    try:
        model = onnx_ir.from_proto(proto)
        values = {value.name: value for value in model.graph.inputs}
        for tensor in large:
            value = values[tensor.name]
            model.graph.inputs.remove(value)
            # It reads from the message or from the file, and copies nothing.
            value.const_value = onnx_ir.from_proto(tensor) if tensor.name not in held else _in_file(path, tensor, held)
            model.graph.register_initializer(value)
        return model
    except (ValueError, TypeError, KeyError, RuntimeError, NotImplementedError) as error:
        raise ExportError(f"{path} holds a graph that does not fit together: {_first_line(error)}") from error


def _in_file(path: Path, tensor: Any, held: Mapping[str, HeldBack]) -> Any:
    """Return an initializer whose data is read from the model's own file when it is asked for."""
    import onnx_ir

    offset, length = held[tensor.name]
    return onnx_ir.ExternalTensor(
        path.name,
        offset,
        length,
        onnx_ir.DataType(tensor.data_type),
        shape=onnx_ir.Shape(tensor.dims),
        name=tensor.name,
        base_dir=path.parent,
    )


def _said_by_checker(path: Path, proto: Any, light: Any) -> str:
    import onnx

    try:
        # Given the path, the checker tests external data as well; given the model, the file is not read twice.
        onnx.checker.check_model(path if _has_external_data(proto) else light)
    except onnx.checker.ValidationError as error:
        return _first_line(error)
    except UnicodeDecodeError:
        return "a name in it is no text"
    return ""


def _has_external_data(proto: Any) -> bool:
    return any(tensor.data_location == tensor.EXTERNAL for tensor in proto.graph.initializer)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _refused_data(model: Any, folder: Path, held: Mapping[str, HeldBack]) -> Iterator[tuple[str, str]]:
    """Yield name and reason of each external tensor that is not opened; make all others readable."""
    own = {id(model.graph.initializers[name].const_value) for name in held if name in model.graph.initializers}
    for tensor in _external(model):
        if id(tensor) in own:
            continue
        tensor.base_dir = folder
        problem = _problem(tensor, folder)
        if problem is not None:
            tensor.invalidate()
            yield tensor.name, problem


def _external(model: Any) -> Iterator[Any]:
    import onnx_ir

    held = [value.const_value for graph in (model.graph, *model.graph.subgraphs()) for value in _initializers(graph)]
    for node in model.graph.all_nodes():
        held += [entry.as_tensor() for entry in node.attributes.values() if entry.type == onnx_ir.AttributeType.TENSOR]
    return (tensor for tensor in held if isinstance(tensor, onnx_ir.ExternalTensor))


def _initializers(graph: Any) -> list[Any]:
    return list(graph.initializers.values())


def _problem(tensor: Any, folder: Path) -> str | None:
    place = Path(tensor.location)
    file = (folder / place).resolve()
    if place.is_absolute() or not file.is_relative_to(folder.resolve()):
        return f"its data is said to be in {tensor.location}, outside the model's folder, which was not opened"
    if not file.is_file():
        return f"its data is said to be in {tensor.location}, which is not there"
    facts = file.stat()
    if facts.st_nlink > 1:
        return f"its data is in {tensor.location}, which has a second name elsewhere (a hard link) and was not opened"
    begin, length = tensor.offset or 0, tensor.length
    needed = begin + (tensor.nbytes if length is None else length)
    if begin < 0 or needed > facts.st_size or (length is not None and length < tensor.nbytes):
        return f"its data would end at byte {needed} of {tensor.location}, which has {facts.st_size}"
    return None
