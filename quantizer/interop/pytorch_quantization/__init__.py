"""The names of NVIDIA's pytorch-quantization over our sites: its calibration loop runs with the import changed.

``from quantizer.interop.pytorch_quantization import calib, nn as quant_nn, quant_modules`` and
``from quantizer.interop.pytorch_quantization.tensor_quant import QuantDescriptor``. There are no hand-written layers
behind them: every site of a model built after ``quant_modules.initialize()`` holds a ``TensorQuantizer`` an operand.
"""

from __future__ import annotations
