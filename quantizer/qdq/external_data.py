"""Files beside an ONNX file that hold its weights."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any


def external_files(path: Path) -> tuple[str, ...]:
    """Return the names of the files beside an ONNX file in which its initializers lie; empty if it holds them all."""
    import onnx

    return files_of(onnx.load(str(path), load_external_data=False).graph.initializer)


def files_of(tensors: Iterable[Any]) -> tuple[str, ...]:
    """Return the names of the files in which ``onnx.TensorProto`` lie; empty if they hold their values themselves."""
    told = (entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location")
    return tuple(dict.fromkeys(told))
