"""Models of older opsets in the form of a later one, which the operators here know."""

from __future__ import annotations

from typing import Any

from quantizer.errors import EngineError

_KNOWN = 13
"""The first opset in whose form the operators here are known: since then axes are inputs, and Softmax has one axis."""
_LATER = 18
_FIRST = 7
"""The first opset with the broadcasting of today; ONNX Runtime begins with it, too."""


def in_known_opset(onnx: Any, model: Any) -> Any:
    """Return a model in a known opset: the model itself, or one that ONNX converted."""
    opset = max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)
    latest = onnx.defs.onnx_opset_version()
    if opset > latest:
        raise EngineError(
            f"opset {opset} is newer than the installed onnx {onnx.__version__} knows, which is {latest}: install a "
            "newer onnx, or export the model again at an older opset"
        )
    if opset < _FIRST:
        raise EngineError(f"opset {opset} is older than {_FIRST}, the first that is known: export the model again")
    if opset >= _KNOWN:
        return model
    import onnx.version_converter as converter  # type: ignore[import-not-found,import-untyped,unused-ignore]

    try:
        return converter.convert_version(model, _LATER)
    except (RuntimeError, converter.ConvertError) as error:
        raise EngineError(
            f"opset {opset} cannot be brought to opset {_LATER}: {error}; export the model again at opset {_KNOWN} or "
            "later"
        ) from error
