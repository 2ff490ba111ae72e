"""Plan of the kernels of a graph of ``lower_for_gpu``: what each reads and writes, in 8 or in 16 bits, and why.

A token is a row of a layer's input: a position of a sequence, a patch of an image, or a sample.

>>> print(kernel_plan(module, reasons))
encoder.layer.0.attention.output.LayerNorm: norm_8bit
    reads 16 bits of encoder.layer.0.attention.output.dense
    writes 16 bits for encoder.layer.0.output.dense, which adds them
    writes 8 bits for encoder.layer.0.intermediate.dense
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from quantizer.engines.torch_engine.gpu_lowering import (
    ATTENTIONS,
    EIGHT_BITS,
    EMBEDDING_NORMS,
    KERNELS,
    LINEARS,
    NORMS,
    QUANTIZERS,
)
from quantizer.engines.torch_engine.gpu_operators import OPERATORS, capability_of, product_of
from quantizer.engines.torch_engine.lowering import aten, decomposed, is_call
from quantizer.export.onnx_import.graph_builder import OperatorGraph
from quantizer.numerics.triton_kernels.tiles import FLOAT16, LIBRARY, Method, Product, Tile, TileTable, bucket

_ATTENTION = (aten.scaled_dot_product_attention.default, *ATTENTIONS)
_VIEWS = (
    *(aten.reshape.default, aten.permute.default, aten.transpose.int, aten.select.int, aten.slice.Tensor),
    *(aten.unsqueeze.default, aten.squeeze.dims, aten.expand.default, aten.flatten.using_ints, aten.to.dtype),
    *(aten.contiguous.default, operator.getitem),
)
"""Operators that only move values; a reader of their result is a reader of the value."""


@dataclass(frozen=True, slots=True)
class Written:
    """A result of a kernel.

    Attributes:
        bits: 8 for quantized values, 16 for values in floating point, also in float32.
        readers: what reads it, with the reason of 16 bits.
    """

    bits: int
    readers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlannedKernel:
    """One kernel of a lowered graph.

    Attributes:
        sites: the layers that it computes; several, such as q, k and v, are one MatMul.
        kernel: its operator: ``linear_8bit``, ``norm_8bit``, ``embedding_norm_8bit``, ``quantize_8bit`` or
            ``padded_attention``; ``attention`` for PyTorch's function.
        fused: what it computes after its MatMul or before its norm, such as ``gelu`` or ``residual add``.
        reads: the operand, with its number of bits and the layer that wrote it.
        writes: its results.
        fallback: why it is computed by operations of torch; empty: it is one kernel.
        measured: for which numbers of tokens a layer is computed by another method than its kernel, and how many times
            as fast that was.
    """

    sites: tuple[str, ...]
    kernel: str
    fused: tuple[str, ...]
    reads: str
    writes: tuple[Written, ...]
    fallback: str = ""
    measured: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{', '.join(self.sites)}: {' + '.join((self.kernel, *self.fused))}", f"reads {self.reads}"]
        lines += [f"writes {result.bits} bits for {', '.join(result.readers)}" for result in self.writes]
        lines += [f"computed by operations of torch: {self.fallback}"] if self.fallback else []
        return "\n    ".join([*lines, *self.measured])


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """The kernels of a lowered graph in their order.

    Attributes:
        kernels: one entry for each kernel.
        floating: why a quantized layer has no kernel and computes in floating point, by its name.
    """

    kernels: tuple[PlannedKernel, ...]
    floating: Mapping[str, str]

    def __str__(self) -> str:
        floating = [f"{site}: floating point\n    {reason}" for site, reason in self.floating.items()]
        return "\n".join([*map(str, self.kernels), *floating])

    def of(self, part: str) -> list[PlannedKernel]:
        """Return the kernels of the layers whose name contains ``part``."""
        return [kernel for kernel in self.kernels if any(part in site for site in kernel.sites)]


def kernel_plan(
    module: OperatorGraph,
    reasons: Mapping[str, str],
    fallbacks: Mapping[str, str] | None = None,
    table: TileTable | None = None,
) -> KernelPlan:
    """Return what the kernels of a lowered graph read and write.

    Args:
        module: a graph of ``lower_for_gpu``.
        reasons: why layers are not lowered, by ONNX node, as ``lower_for_gpu`` returns them.
        fallbacks: why kernels are replaced by operations of torch, by node name, as ``replace_failing`` returns them.
        table: the measured methods of linear layers; None: nothing was measured.
    """
    kernels = [
        PlannedKernel(
            sites=_sites(node),
            kernel=_kernel(node),
            fused=_fused(node),
            reads=_reads(node),
            writes=tuple(_writes(node)),
            fallback=(fallbacks or {}).get(node.name, ""),
            measured=() if table is None else tuple(_measured(module, node, table)),
        )
        for node in module.graph.nodes
        if is_call(node, *KERNELS, *_ATTENTION)
    ]
    return KernelPlan(tuple(kernels), {_site(name): reason for name, reason in reasons.items()})


def _measured(module: OperatorGraph, node: fx.Node, table: TileTable) -> Iterator[str]:
    """Yield the methods of a layer that were faster than its kernel, by numbers of tokens."""
    if is_call(node, OPERATORS["padded_attention"].triton):
        yield from _measured_attention(module, node, table)
    if not is_call(node, OPERATORS["linear_8bit"].triton):
        return
    weight = module.get_buffer(str(node.args[1].target))  # type: ignore[union-attr]
    layer = product_of(1, weight, *node.args[2:])
    products = [each for each in table.products if replace(each, rows=layer.rows) == layer]
    for method, several in itertools.groupby(products, key=lambda product: table[product].method):
        if not isinstance(method, Tile):
            yield from _ranges(method, list(several), table)


def _measured_attention(module: OperatorGraph, node: fx.Node, table: TileTable) -> Iterator[str]:
    """Yield the sizes for which PyTorch's function was faster than the kernel of an attention."""
    layer = (*node.meta["attention"], capability_of(next(module.buffers()).device))
    for each in table.attentions:
        measured = table[each]
        if (
            each.heads,
            each.width,
            each.operands,
            each.result,
            each.capability,
        ) == layer and measured.method == LIBRARY:
            gains = [] if measured.gain is None else [measured.gain]
            first = each.samples // 2 + 1
            samples = f"{first} to {each.samples}" if first < each.samples else f"{each.samples}"
            queries, keys = (_in_buckets(size, size) for size in (each.queries, each.keys))
            yield (
                f"scaled_dot_product_attention: {_faster(LIBRARY, gains)} at {samples} samples of {queries} queries "
                f"and {keys} keys"
            )


def _ranges(method: Method, products: Sequence[Product], table: TileTable) -> Iterator[str]:
    """Yield one line for each range of tokens without a gap, of products by number of rows."""
    begun: list[Product] = []
    for product, following in itertools.zip_longest(products, products[1:]):
        begun.append(product)
        if following is None or following.rows != 2 * product.rows:
            gains = [gain for each in begun if (gain := table[each].gain) is not None]
            yield f"{_METHODS[method, product.operands]}: {_faster(method, gains)} at {_tokens(begun)} tokens"
            begun = []


_METHODS: Mapping[tuple[Method, str], str] = {
    (LIBRARY, "int8"): "torch._int_mm and a kernel for what follows",
    (LIBRARY, "float8_e4m3fn"): "torch._scaled_mm and a kernel for what follows",
    (FLOAT16, "int8"): "float16",
    (FLOAT16, "float8_e4m3fn"): "float16",
}


def _faster(method: Method, gains: Sequence[float]) -> str:
    other = "8 bits" if method == FLOAT16 else "the kernel"
    if not gains:
        return f"{other} did not run"
    least, most = (f"{value:.2f}" for value in (min(gains), max(gains)))
    return f"{least if least == most else f'{least} to {most}'} times as fast as {other}"


def _tokens(products: Sequence[Product]) -> str:
    return _in_buckets(products[0].rows, products[-1].rows)


def _in_buckets(first: int, last: int) -> str:
    """Return the numbers in two buckets and between them."""
    return f"{1 if first == bucket(1) else first // 2 + 1} to {last}"


def _site(name: str) -> str:
    """Return the layer of an ONNX node."""
    return (name.rpartition("/")[0] or name).partition(".site_")[0]


def _sites(node: fx.Node) -> tuple[str, ...]:
    return tuple(_site(name) for name in str(node.meta.get("onnx") or node.name).split(", "))


def _kernel(node: fx.Node) -> str:
    return "attention" if is_call(node, _ATTENTION[0]) else str(node.target).split(".")[1]


def _fused(node: fx.Node) -> tuple[str, ...]:
    if is_call(node, *LINEARS):
        activation, residual = str(node.args[8]), node.args[5]
        return (*(() if activation == "none" else (activation,)), *(() if residual is None else ("residual add",)))
    return ("residual add",) if is_call(node, *NORMS) and node.args[1] is not None else ()


def _reads(node: fx.Node) -> str:
    operand: Any = node.args[0]
    if is_call(node, *EMBEDDING_NORMS):
        return "rows of embedding tables"
    source = _source(operand)
    if not is_call(node, *LINEARS):
        return f"16 bits of {_name(source)}"
    if is_call(operand, *QUANTIZERS):
        written = _source(operand.args[0])
        moved = is_call(written, *KERNELS)
        reason = "are sliced or reshaped first" if moved else "come from an operator in floating point"
        return f"8 bits that a kernel quantized, because the values of {_name(written)} {reason}"
    return f"8 bits of {_name(source)}"


def _source(value: Any) -> fx.Node:
    while is_call(value, *_VIEWS, aten.clamp.default):
        value = value.args[0]
    node: fx.Node = value
    return node


def _name(node: fx.Node) -> str:
    """Return the layer of a node, or what it is."""
    if node.op == "placeholder":
        return "an input of the model"
    site = _sites(node)[-1] if not is_call(node, *LINEARS) else ", ".join(_sites(node))
    return f"the attention of {site}" if is_call(node, *_ATTENTION) else site


def _writes(node: fx.Node) -> Iterator[Written]:
    """Yield the results of a kernel in their order."""
    if is_call(node, *NORMS, *EMBEDDING_NORMS):
        total, value, quantized_as = node.args[-5:-2]
        widths = [16] * (bool(total) + bool(value)) + [8] * (quantized_as is not None)
        items = {user.args[1]: user for user in node.users}
        for place, bits in enumerate(widths):
            yield Written(bits, tuple(dict.fromkeys(_readers(items[place]))))
    else:
        dtype = node.args[9] if is_call(node, *LINEARS) else node.args[5] if is_call(node, *ATTENTIONS) else None
        eight = is_call(node, *QUANTIZERS) or dtype in EIGHT_BITS
        yield Written(8 if eight else 16, tuple(dict.fromkeys(_readers(node))))


def _readers(value: fx.Node) -> Iterator[str]:
    for user in value.users:
        if is_call(user, *_VIEWS):
            yield from _readers(user)
        elif user.op == "output":
            yield "the output of the model"
        elif is_call(user, *LINEARS):
            added = user.args[5] is not None and _source(user.args[5]) is _source(value)
            yield f"{_name(user)}{', which adds them' if added else ''}"
        elif is_call(user, *QUANTIZERS):
            layers = ", ".join(dict.fromkeys(_readers(user)))
            yield f"a kernel that quantizes them for {layers}"
        elif is_call(user, *NORMS):
            yield _name(user)
        elif is_call(user, decomposed.dequantize_per_tensor.default):
            yield f"{_name(user)}, which computes in floating point"
        elif is_call(user, *_ATTENTION):
            yield _name(user)
        else:
            yield f"{str(user.target).removesuffix('.default')} of {_name(user)}"
