"""The API of NVIDIA's pytorch-quantization over our sites: calibration loops written for it run with changed imports.

``from quantizer.integrations.pytorch_quantization import calib, nn as quant_nn, quant_modules`` and
``from quantizer.integrations.pytorch_quantization.tensor_quant import QuantDescriptor``. There are no hand-written
layers behind them: each site of a model built after ``quant_modules.initialize()`` has a ``TensorQuantizer`` for each
operand.
"""

from __future__ import annotations
