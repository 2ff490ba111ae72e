"""Detection of an engine file's backend by its first bytes."""

from __future__ import annotations

import re
from pathlib import Path

from quantizer.engines.engine_file import checked_engine, checked_onnx
from quantizer.engines.inspection.onnx_graph import read_graph
from quantizer.errors import EngineError
from quantizer.targets import profile, profiles

_HEAD = 256


def detect_backend(path: Path) -> str | None:
    """Return the backend that built an engine file; None for an ONNX file.

    Raises:
        EngineError: the file is missing or empty, or its first bytes are not those of a known engine or of an ONNX
            file. The format of TensorRT's own files is not recognized.
    """
    try:
        with checked_engine(path).open("rb") as stream:
            head = stream.read(_HEAD)
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror or error}") from error
    for name in profiles.names():
        magic = profile(name).file_magic
        if magic is not None and re.match(magic, head, re.DOTALL):
            return name
    try:
        checked_onnx(path)
    except EngineError as error:
        raise EngineError(
            f"{path} is neither an ONNX file nor an engine that is known by its first bytes; "
            "where it is an engine all the same, say of which backend with --backend"
        ) from error
    domains = {node.domain for node in read_graph(path).graph.node}
    return next((name for name in profiles.names() if profile(name).file_domains & domains), None)
