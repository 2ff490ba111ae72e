"""Rules, one family a file. Importing this package registers them."""

from __future__ import annotations

from quantizer.graph_check.rules import attention as _attention
from quantizer.graph_check.rules import attention as _attention_fp8
from quantizer.graph_check.rules import attention as _masks
from quantizer.graph_check.rules import formats as _float_types
from quantizer.graph_check.rules import formats as _formats
from quantizer.graph_check.rules import formats as _scales
from quantizer.graph_check.rules import formats as _weights
from quantizer.graph_check.rules import operators as _operators
from quantizer.graph_check.rules import operators as _opset
from quantizer.graph_check.rules import operators as _sizes
from quantizer.graph_check.rules import operators as _valid
from quantizer.graph_check.rules import pairs as _pairs
from quantizer.graph_check.rules import pairs as _readers
from quantizer.graph_check.rules import placement as _placement
from quantizer.graph_check.rules import placement as _residual

__all__: list[str] = []

del _attention, _attention_fp8, _float_types, _formats, _masks, _operators, _opset, _pairs, _placement, _readers
del _residual, _scales, _sizes, _valid, _weights
