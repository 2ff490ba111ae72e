"""Files beside an ONNX file that hold its weights."""

from __future__ import annotations

from pathlib import Path

__all__ = ["external_files"]

_LOCATION = "location"


def external_files(path: Path) -> tuple[str, ...]:
    """Return the names of the files beside an ONNX file in which its initializers lie; empty if it holds them all."""
    import onnx

    tensors = onnx.load(str(path), load_external_data=False).graph.initializer
    told = (entry.value for tensor in tensors for entry in tensor.external_data if entry.key == _LOCATION)
    return tuple(dict.fromkeys(told))
