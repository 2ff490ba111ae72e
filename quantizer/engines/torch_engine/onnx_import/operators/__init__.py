"""One small function an ONNX operator, in files by theme. Importing this package registers them."""

from __future__ import annotations

from quantizer.engines.torch_engine.onnx_import.operators import elementwise as _elementwise
from quantizer.engines.torch_engine.onnx_import.operators import indexing as _indexing
from quantizer.engines.torch_engine.onnx_import.operators import layout as _layout
from quantizer.engines.torch_engine.onnx_import.operators import normalization as _normalization
from quantizer.engines.torch_engine.onnx_import.operators import products as _products
from quantizer.engines.torch_engine.onnx_import.operators import quantizers as _quantizers
from quantizer.engines.torch_engine.onnx_import.operators import recurrent as _recurrent
from quantizer.engines.torch_engine.onnx_import.operators import reductions as _reductions
from quantizer.engines.torch_engine.onnx_import.operators import resize as _resize
from quantizer.engines.torch_engine.onnx_import.operators import sizes as _sizes

__all__: list[str] = []

del _elementwise, _indexing, _layout, _normalization, _products, _quantizers, _recurrent, _reductions, _resize, _sizes
