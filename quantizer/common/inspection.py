"""Contents of an engine as frozen data: its layers, and the facts that follow from them.

Multiply-adds of one layer from the shapes of its tensors; None if the shapes do not determine them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

LOW_PRECISIONS = ("int8", "fp8", "int4", "fp4")
"""What is asked for when a model is quantized."""

LEAST_SHARE = 0.5
"""The least part of the work that a graph asks for in low precision that an engine has to do in it.

Libraries leave single products in floats, with good reason: a head of three rows, an attention that is fused in floats.
Below one half it is the graph that they did not take: the other half is then slower than the float model, for what it
quantizes and dequantizes around it.
"""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Layer of an engine, or node of a graph that was not run by an engine."""

    name: str
    """Its name in the engine."""
    type: str
    """What the engine calls this kind of layer."""
    role: str = ""
    """What it is for: ``product`` (of matrices, or a convolution), ``attention`` (fused, so two products),
    ``softmax``, ``quantizer`` (quantizes or dequantizes, nothing else), ``cast``, ``reformat`` (of the memory's
    layout), ``move`` (of values that stay as they are), ``addition``, ``normalization``; empty for any other."""
    precision: str = "unknown"
    """What it computes in: ``int8``, ``fp8``, ``int4``, ``fp16``, ``bf16``, ``fp32``; ``index`` for whole numbers and
    truth values that are no data, ``unknown`` where the engine does not tell."""
    writes: str = "unknown"
    """The type of its first output, in the same words."""
    nodes: tuple[str, ...] = ()
    """Names of the ONNX nodes that it was made of, as far as the engine tells."""
    readers: tuple[str, ...] = ()
    """Names of the layers that read its outputs."""
    multiply_adds: int | None = None
    """Multiply-adds of one run; null for a layer without products, and where they cannot be told."""
    time_us: float | None = None
    """Median time in one run, in microseconds; null where it was not measured."""


@dataclass(frozen=True, kw_only=True)
class PrecisionShare:
    """Share of one precision in the layers, products, multiply-adds and time of an engine."""

    precision: str
    """The precision, in the words of ``Layer.precision``."""
    layers: int
    """Number of layers."""
    products: int
    """Number of those that are products or fused attention."""
    layer_share: float
    """Share of all layers, 0 to 1."""
    multiply_add_share: float | None = None
    """Share of the multiply-adds that could be told, 0 to 1; null where none could."""
    time_share: float | None = None
    """Share of the time of all layers, 0 to 1; null where it was not measured."""


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Precision of an engine's layers, as the engine itself reports it."""

    backend: str
    """The backend that was asked, such as ``openvino``; ``onnx`` where only a file was read."""
    verified: bool
    """Whether this was observed in a running engine. If not, it is what the ONNX file asks for, and no fact."""
    note: str
    """How it was observed: shapes and runs; or why it was not."""
    shares: tuple[PrecisionShare, ...] = ()
    """Shares by precision, the largest in multiply-adds first."""
    attention_fused: int = 0
    """Number of attention products that run fused, in one layer each."""
    attention_apart: int = 0
    """Number of attentions that are taken apart: a softmax of its own between products."""
    quantizers: int = 0
    """Layers that do nothing but quantize or dequantize."""
    casts: int = 0
    """Layers that do nothing but convert to another type."""
    reformats: int = 0
    """Layers that do nothing but change the layout in memory."""
    float_outputs: int = 0
    """Products in low precision that write floats."""
    uncounted: int = 0
    """Products whose multiply-adds could not be told."""
    reasons: tuple[str, ...] = ()
    """Why products run in floats, or write them, in words."""
    layers: tuple[Layer, ...] = ()
    """The layers in the order in which they run, constants left out."""

    def low_share(self) -> float | None:
        """Return the share of multiply-adds in low precision, else of products; None if there is no product."""
        products = sum(share.products for share in self.shares)
        if products == 0:
            return None
        low = [share for share in self.shares if share.precision in LOW_PRECISIONS]
        if self.uncounted or any(share.multiply_add_share is None for share in self.shares):
            return sum(share.products for share in low) / products
        return sum(share.multiply_add_share or 0.0 for share in low)


Shape = Sequence[int]


def matmul_work(left: Shape, output: Shape) -> int | None:
    """Return the multiply-adds of [.., M, K] times [.., K, N], either transposed, from the left operand and the output.

    Only the product of the left operand's last two sizes counts, so its orientation does not matter.
    """
    if len(left) < 2 or len(output) < 2:
        return None
    rows, size = output[-2], left[-1] * left[-2]
    if rows == 0 or size % rows:
        return None
    return prod(output) * (size // rows)


def convolution_work(weight: Shape, channels: int, output: Shape) -> int | None:
    """Return the multiply-adds of a convolution whose ``weight`` makes ``channels`` channels, in any layout.

    A transposed convolution swaps input and output: pass its input's channels, and its input as ``output``.
    """
    if channels == 0 or prod(weight) % channels:
        return None
    return prod(output) * (prod(weight) // channels)


def attention_work(query: Shape, key: Shape, value: Shape, output: Shape) -> int | None:
    """Return the multiply-adds of both products of a fused attention with output [.., S, D], in any orientation."""
    if len(output) < 2 or min(output) == 0:
        return None
    heads, rows, width = prod(output[:-2]), output[-2], output[-1]
    if prod(value) % (heads * width) or prod(query) % (heads * rows):
        return None
    columns, depth = prod(value) // (heads * width), prod(query) // (heads * rows)
    if prod(key) != heads * columns * depth:
        return None
    return heads * rows * columns * (depth + width)
