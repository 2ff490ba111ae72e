"""Rules, one family a file. Importing this package registers them."""

from __future__ import annotations

from quantizer.graph_check.rules import attention as _attention
from quantizer.graph_check.rules import attention_fp8 as _attention_fp8
from quantizer.graph_check.rules import float_types as _float_types
from quantizer.graph_check.rules import formats as _formats
from quantizer.graph_check.rules import masks as _masks
from quantizer.graph_check.rules import operators as _operators
from quantizer.graph_check.rules import opset as _opset
from quantizer.graph_check.rules import pairs as _pairs
from quantizer.graph_check.rules import placement as _placement
from quantizer.graph_check.rules import readers as _readers
from quantizer.graph_check.rules import residual_adds_in_files as _residual
from quantizer.graph_check.rules import scales as _scales
from quantizer.graph_check.rules import sizes as _sizes
from quantizer.graph_check.rules import valid as _valid
from quantizer.graph_check.rules import weights as _weights

__all__: list[str] = []

del _attention, _attention_fp8, _float_types, _formats, _masks, _operators, _opset, _pairs, _placement, _readers
del _residual, _scales, _sizes, _valid, _weights
