"""Reader of ONNX files that are not trusted: external data is opened only inside the file's own folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from quantizer.common.paths import is_file, is_folder
from quantizer.errors import ExportError, MissingDependencyError
from quantizer.graph_check.subject import Subject
from quantizer.qdq.onnx_file import HeldBack, light_message, without_weights
from quantizer.qdq.structure import structural_fault
from quantizer.targets.base import TargetProfile


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
