"""The files of a plan and of its float model, for prices that are taken of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantizer.errors import EngineError
from quantizer.export import export_onnx
from quantizer.quantizer import Quantizer
from quantizer.runs.placement.price_groups import EngineFiles


def exported_pair(
    quantizer: Quantizer, model: nn.Module, example: Any, folder: Path
) -> tuple[nn.Module, EngineFiles, EngineFiles]:
    """Return the frozen proxy, and where its ONNX file and that of the float model were written.

    Raises:
        EngineError: groups fell back already, and so have no price.
        CalibrationError: nothing was calibrated yet.
    """
    if quantizer.chosen_fallback is not None:
        raise EngineError("prices are taken of all groups, and some fell back: call clear_fallback() first")
    low, plain = (
        EngineFiles(onnx=folder / f"{stem}.onnx", engine=folder / f"{stem}.engine") for stem in ("model", "float")
    )
    quantized = quantizer.quantize(model)
    quantizer.export(quantized, low.onnx, example)
    export_onnx(model, plain.onnx, example, opset=quantizer.config.target.opset, dtype=torch.float32)
    return quantized, low, plain
