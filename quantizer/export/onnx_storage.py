"""Storage of an ONNX model in one file, or in two above protobuf's limit of 2 GB.

The second file holds the tensors; its name contains a hash of its content. It is moved into place before the model
file, so the model file is complete and finds its tensors at any moment.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantizer.errors import ExportError
from quantizer.export.qdq.onnx_file import light_message, without_weights
from quantizer.utils.files.temporary import temporary_beside
from quantizer.utils.files.writable import file_behind, settle, sync_folder

_ONE_FILE = 2**31 - 2**26
"""Maximum bytes of tensors in one file: protobuf's limit, with room for the graph."""

_ALIGNMENT = 4096
"""Alignment of tensors in the second file, so that engines can map them; smaller tensors stay in the first."""

_GRAPH = b"\x3a"
_INITIALIZER = b"\x2a"
"""Tags of the fields ``ModelProto.graph`` and ``GraphProto.initializer``."""


def write_onnx(ir_model: Any, path: Path) -> None:
    """Check an ``onnx_ir.Model`` and move it into place atomically; this may release its tensors."""
    import onnx

    destination = file_behind(path, ExportError)
    size = sum(value.const_value.nbytes for value in ir_model.graph.initializers.values())
    try:
        with temporary_beside(destination) as folder:
            new_file = folder / destination.name
            data = _write_tensors(ir_model, new_file) if size > _ONE_FILE else None
            _write_message(ir_model, new_file)
            _check(onnx, new_file)
            settle(folder)
            if data is not None:
                os.replace(data, destination.with_name(data.name))
            os.replace(new_file, destination)
            sync_folder(destination.parent)
            _drop_former(destination, data)
    except onnx.checker.ValidationError as error:
        raise ExportError(f"{path}: onnx.checker refuses the graph: {error}") from error
    except OSError as error:
        raise ExportError(f"{path} cannot be written: {error.strerror}") from error


def rename_dimensions(path: Path, names: Mapping[str, str]) -> None:
    """Give the dimensions of inputs and outputs other names, in a copy that replaces a link to an ONNX file."""
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    for value in (*model.graph.input, *model.graph.output):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param in names:
                size.dim_param = names[size.dim_param]
    path.unlink()
    path.write_bytes(model.SerializeToString())


def fix_sizes(path: Path, sizes: Mapping[str, int], metadata: Mapping[str, str]) -> None:
    """Make dimensions constant and add metadata, in a copy that replaces a link to an ONNX file."""
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param in sizes:
                size.dim_value = sizes[size.dim_param]
    onnx.helper.set_model_props(model, {**{entry.key: entry.value for entry in model.metadata_props}, **metadata})
    path.unlink()
    path.write_bytes(model.SerializeToString())


def _check(onnx: Any, file: Path) -> None:
    """Run ``onnx.checker`` without large weights, of which it would make two copies."""
    parts = light_message(file)
    if parts is None:
        # With the path, the checker also tests data in another file.
        onnx.checker.check_model(str(file))
    else:
        light, _ = without_weights(onnx.load_model_from_string(parts[0]), parts[1])
        onnx.checker.check_model(light)


def _write_message(ir_model: Any, destination: Path) -> None:
    """Write the ``ModelProto`` tensor by tensor.

    Protobuf would make three copies of all tensors. A message is a sequence of fields with their lengths, in any order.
    """
    import onnx_ir

    constants = ir_model.graph.initializers
    large = [value for value in constants.values() if value.const_value.nbytes >= _ALIGNMENT]
    for value in large:
        del constants[value.name]
    model = onnx_ir.to_proto(ir_model)
    graph = model.graph.SerializeToString()
    model.ClearField("graph")
    sizes = [_tensor(value).ByteSize() for value in large]
    length = len(graph) + sum(len(_INITIALIZER + _varint(size)) + size for size in sizes)
    with destination.open("wb") as file:
        file.write(model.SerializeToString() + _GRAPH + _varint(length) + graph)
        for value, size in zip(large, sizes, strict=True):
            file.write(_INITIALIZER + _varint(size))
            file.write(_tensor(value).SerializeToString())


def _tensor(value: Any) -> Any:
    """Return the ``TensorProto`` of a constant."""
    import onnx_ir

    proto = onnx_ir.to_proto(value.const_value)
    proto.name = value.name
    return proto


def _varint(number: int) -> bytes:
    """Return a length in protobuf's varint encoding: 7 bits per byte, lowest first."""
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def _write_tensors(ir_model: Any, model_file: Path) -> Path:
    """Move large constants into a file beside ``model_file`` one by one, and return the path of that file."""
    import onnx_ir

    unnamed, digest = model_file.with_name("tensors"), hashlib.sha256()
    positions = []
    with unnamed.open("wb") as file:
        for value in ir_model.graph.initializers.values():
            if value.const_value.nbytes < _ALIGNMENT:
                continue
            content = value.const_value.tobytes()
            gap = bytes(-file.tell() % _ALIGNMENT)
            file.write(gap)
            positions.append((value, file.tell(), len(content)))
            file.write(content)
            digest.update(gap + content)
    data = model_file.with_name(f"{model_file.name}.{digest.hexdigest()[:16]}.data")
    unnamed.rename(data)
    for value, offset, length in positions:
        tensor = value.const_value
        value.const_value = onnx_ir.ExternalTensor(
            data.name, offset, length, tensor.dtype, shape=tensor.shape, name=value.name, base_dir=model_file.parent
        )
    return data


def _drop_former(path: Path, data: Path | None) -> None:
    """Delete tensor files of the model that ``path`` held before."""
    ours = re.compile(re.escape(path.name) + r"\.[0-9a-f]{16}\.data")
    for other in path.parent.iterdir():
        if ours.fullmatch(other.name) and (data is None or other.name != data.name):
            other.unlink()
