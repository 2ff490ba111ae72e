"""The API of NVIDIA's pytorch-quantization: its calibration loops run with changed imports.

``from quantizer.integrations.pytorch_quantization import calib, nn as quant_nn, quant_modules, QuantDescriptor``, or
``QuantDescriptor`` from ``tensor_quant``, as in the toolkit. Each site of a model built after
``quant_modules.initialize()`` gets a ``TensorQuantizer`` for each operand; there are no hand-written layers.
"""

from __future__ import annotations

from quantizer.integrations.pytorch_quantization.tensor_quant import QuantDescriptor

__all__ = ["QuantDescriptor"]
