"""TensorRT engines without weights: smaller files, which take them from the ONNX file when they are loaded.

The engine file holds the name and SHA-256 of that ONNX file: TensorRT checks only names and sizes of weights, and with
other values an engine's results mean nothing. Untested without a GPU: TensorRT-RTX 1.7 strips no weights without one.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from quantizer.engines.engine_file import checked_onnx
from quantizer.errors import EngineError

_NOTE = "weights"


def strip_weights(trt: Any, config: Any) -> None:
    """Set a builder's configuration to leave the weights out."""
    config.set_flag(trt.BuilderFlag.STRIP_PLAN)
    # Refitting restores the same weights, so kernels may be chosen for their values, as without stripping.
    config.set_flag(trt.BuilderFlag.REFIT_IDENTICAL)


def stripping_hint(reason: str) -> str:
    """Return a remedy if ``reason`` is a builder's refusal to strip weights; empty for any other reason."""
    if "CUDA_SUCCESS" not in reason:
        return ""
    return "; without a GPU it strips no weights: leave out strip_weights, or build where there is an NVIDIA GPU"


def weights_note(onnx_path: Path, engine_path: Path) -> str:
    """Return an engine file's note on the ONNX file that holds its weights."""
    if onnx_path.resolve().parent != engine_path.resolve().parent:
        raise EngineError(
            f"strip_weights: {engine_path} would look for {onnx_path.name} in its own folder, and it is in "
            f"{onnx_path.parent}; build it beside its ONNX file"
        )
    return f"{_NOTE} {_sha256(onnx_path)} {onnx_path.name}"


def refit(trt: Any, engine: Any, logger: Any, path: Path, note: str) -> None:
    """Give an engine its weights."""
    kind, _, rest = note.partition(" ")
    digest, _, name = rest.partition(" ")
    if kind != _NOTE or not name or Path(name).name != name:
        raise EngineError(
            f"{path} takes its weights from an ONNX file and does not say from which: it is cut short, or was not "
            "built by this package; build it again"
        )
    onnx_path = path.parent / name
    if not onnx_path.is_file():
        raise EngineError(
            f"{path} was built without its weights, and {onnx_path} is not there: keep that file beside it, or build "
            "the engine without strip_weights"
        )
    if _sha256(checked_onnx(onnx_path)) != digest:
        raise EngineError(
            f"{path} was built without its weights, and {onnx_path} is not the file that it was built from (its "
            "SHA-256 differs): put that back, or build the engine again"
        )
    refitter = trt.Refitter(engine, logger)
    parser = trt.OnnxParserRefitter(refitter, logger)
    if not parser.refit_from_file(str(onnx_path)):
        told = " ".join(parser.get_error(index).desc() for index in range(parser.num_errors))
        raise EngineError(f"{path} did not take its weights from {onnx_path}: {told or 'no reason given'}")
    if not refitter.refit_cuda_engine():
        missing = ", ".join(refitter.get_missing_weights())
        raise EngineError(f"{path} did not take all weights from {onnx_path}; missing: {missing or 'not told'}")


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
