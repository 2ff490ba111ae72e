"""OpenVINO's own format of a graph (IR), which any release reads and compiles for its machine."""

from __future__ import annotations

from pathlib import Path

from quantizer.engines.openvino.compiled_models import GROUP, reason
from quantizer.errors import EngineError
from quantizer.plan.targets.openvino import DYNAMIC_BLOCK
from quantizer.utils.lazy import import_library


def write_graph(onnx_path: Path, path: Path) -> None:
    """Write the graph of an ONNX file to ``path`` (.xml), and its weights beside it (.bin)."""
    ov = import_library("openvino", "openvino")
    try:
        model = ov.Core().read_model(str(onnx_path))
        # A client compiles with the block size of our engines.
        model.set_rt_info(str(DYNAMIC_BLOCK), ["runtime_options", GROUP])
        # Weights that are not quantized keep their float32.
        ov.save_model(model, str(path), compress_to_fp16=False)
    except RuntimeError as error:
        raise EngineError(f"OpenVINO cannot write {onnx_path} as {path.name}: {reason(error)}") from error
