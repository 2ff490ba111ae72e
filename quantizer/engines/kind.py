"""Which backend an engine file belongs to, told by how it begins."""

from __future__ import annotations

from pathlib import Path

from quantizer.engines.files import RTX_MAGIC
from quantizer.engines.files import checked_engine
from quantizer.engines.files import checked_onnx
from quantizer.engines.onnx_graph import read_graph
from quantizer.errors import EngineError

__all__ = ["backend_of"]

_HEAD = 256
# What ONNX Runtime's optimizer leaves in a file: operators of its own, which only it runs.
_OWN_DOMAINS = ("com.microsoft", "com.microsoft.nchwc")


def backend_of(path: Path) -> str | None:
    """The backend that an engine file was built by; None for an ONNX file, which belongs to none.

    Raises:
        EngineError: the file is missing, empty, or not known for an engine or an ONNX file by how it begins. The form
            of TensorRT's own files is not known here.
    """
    try:
        with checked_engine(path).open("rb") as stream:
            head = stream.read(_HEAD)
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror or error}") from error
    if b";ov=" in head and b"meta=" in head:
        return "openvino"
    if head.startswith(RTX_MAGIC):
        return "tensorrt-rtx"
    try:
        checked_onnx(path)
    except EngineError as error:
        raise EngineError(
            f"{path} is neither an ONNX file nor an engine that is known by its first bytes; "
            "where it is an engine all the same, say of which backend with --backend"
        ) from error
    domains = {node.domain for node in read_graph(path).graph.node}
    return "onnxruntime" if domains.intersection(_OWN_DOMAINS) else None
