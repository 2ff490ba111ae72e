"""Storage of a checked graph in one file, or in two if it exceeds protobuf's limit of 2 GB.

Beyond 2 GB the tensors are in a second file beside the first, which names it. The second file's name holds a hash of
its content. It is put in place first, under a name that nothing reads yet, and then the first is: so at any moment the
first file is whole and finds its tensors.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

from quantizer.errors import ExportError
from quantizer.export.qdq.onnx_file import light_message, without_weights
from quantizer.utils.files.temporary import temporary_beside
from quantizer.utils.files.writable import file_behind, settle, sync_folder

_ONE_FILE = 2**31 - 2**26
"""The most bytes of tensors in one file: protobuf's limit, with room for the graph."""

_ALIGNMENT = 4096
"""Where tensors begin in the second file, so that an engine can map them; smaller ones stay in the first."""

_GRAPH = b"\x3a"
_INITIALIZER = b"\x2a"
"""How fields of ModelProto and GraphProto that have a length begin: their number and kind."""


def write_onnx(ir_model: Any, path: Path) -> None:
    """Check an ``onnx_ir.Model`` and move it into place in one step; its tensors may be released on the way."""
    import onnx

    place = file_behind(path, ExportError)
    size = sum(value.const_value.nbytes for value in ir_model.graph.initializers.values())
    try:
        with temporary_beside(place) as folder:
            made = folder / place.name
            data = _write_tensors(ir_model, made) if size > _ONE_FILE else None
            _write_message(ir_model, made)
            _check(onnx, made)
            settle(folder)
            if data is not None:
                os.replace(data, place.with_name(data.name))
            os.replace(made, place)
            sync_folder(place.parent)
            _drop_former(place, data)
    except onnx.checker.ValidationError as error:
        raise ExportError(f"{path}: onnx.checker refuses the graph: {error}") from error
    except OSError as error:
        raise ExportError(f"{path} cannot be written: {error.strerror}") from error


def _check(onnx: Any, made: Path) -> None:
    """Raise what ONNX's checker refuses. It gets no large weight, of which it would make two copies."""
    read = light_message(made)
    if read is None:
        # With the path the checker looks at data in another file as well.
        onnx.checker.check_model(str(made))
    else:
        light, _ = without_weights(onnx.load_model_from_string(read[0]), read[1])
        onnx.checker.check_model(light)


def _write_message(ir_model: Any, made: Path) -> None:
    """Write the model's message tensor by tensor.

    Protobuf itself makes three copies of everything. A message is a sequence of fields, each behind its length, in any
    order.
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
    with made.open("wb") as file:
        file.write(model.SerializeToString() + _GRAPH + _varint(length) + graph)
        for value, size in zip(large, sizes, strict=True):
            file.write(_INITIALIZER + _varint(size))
            file.write(_tensor(value).SerializeToString())


def _tensor(value: Any) -> Any:
    """Return the message of a constant, under the value's name."""
    import onnx_ir

    proto = onnx_ir.to_proto(value.const_value)
    proto.name = value.name
    return proto


def _varint(number: int) -> bytes:
    """Return a length in protobuf's encoding: 7 bits a byte, the lowest first."""
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def _write_tensors(ir_model: Any, made: Path) -> Path:
    """Move all but small constants into a file beside ``made``, one at a time, and return that file."""
    import onnx_ir

    unnamed, digest = made.with_name("tensors"), hashlib.sha256()
    places = []
    with unnamed.open("wb") as file:
        for value in ir_model.graph.initializers.values():
            if value.const_value.nbytes < _ALIGNMENT:
                continue
            content = value.const_value.tobytes()
            gap = bytes(-file.tell() % _ALIGNMENT)
            file.write(gap)
            places.append((value, file.tell(), len(content)))
            file.write(content)
            digest.update(gap + content)
    data = made.with_name(f"{made.name}.{digest.hexdigest()[:16]}.data")
    unnamed.rename(data)
    for value, offset, length in places:
        tensor = value.const_value
        value.const_value = onnx_ir.ExternalTensor(
            data.name, offset, length, tensor.dtype, shape=tensor.shape, name=value.name, base_dir=made.parent
        )
    return data


def _drop_former(path: Path, data: Path | None) -> None:
    """Delete the tensor files of the model that was at ``path`` before."""
    ours = re.compile(re.escape(path.name) + r"\.[0-9a-f]{16}\.data")
    for other in path.parent.iterdir():
        if ours.fullmatch(other.name) and (data is None or other.name != data.name):
            other.unlink()
