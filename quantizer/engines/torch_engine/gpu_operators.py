"""Operators of 8-bit layers in two overloads: ``triton`` is a kernel of a GPU, ``reference`` operations of torch.

Legend: x [.., K] floats; a [.., K] INT8 or FP8, with scale s and zero point z; w [N, K] of the same type, with scale t
[N]. A result in 8 bits has the scale ``next_scale``, [1] or one for each index of the last axis, and the zero point
``next_zero_point``. Zero points of a are in the bias of a layer.

======================  ==========================================================================================
linear_8bit             y [.., N] = f(s t (a w^T) + bias) + residual, or its quantized values; with several parts,
                        y [parts, .., N / parts]
norm_8bit               h = x + residual, the norm of h and the quantized norm; each only on request
embedding_norm_8bit     the results of norm_8bit for h = words[ids] + kinds[types] + places[positions]
quantize_8bit           the quantized values of x
padded_attention        y [B, H, Q, D] = softmax(scale q k^T + mask) v for q [B, H, Q, D], k and v [B, H, K, D] and a
                        mask [B, H, 1, K] or what broadcasts to it, or its quantized values; blocks of keys that the
                        mask excludes are skipped
======================  ==========================================================================================

``triton`` is imported at the first call of a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from quantizer.numerics.formats import FP8, INT8
from quantizer.numerics.triton_kernels import reference
from quantizer.numerics.triton_kernels.tiles import (
    LIBRARY,
    TABLE,
    Attention,
    AttentionTile,
    Method,
    Product,
    Tile,
    bucket,
    power_of_two,
)

_NORM = (
    "Tensor weight, Tensor? bias, float eps, bool rms, bool total, bool value, ScalarType? quantized_as, "
    "Tensor? next_scale, int next_zero_point) -> Tensor[]"
)
_SCHEMAS = {
    "linear_8bit": (
        "(Tensor a, Tensor weight, float scale, Tensor scales, Tensor? bias, Tensor? residual, Tensor? next_scale, "
        "int next_zero_point, str activation, ScalarType out, int parts) -> Tensor"
    ),
    "norm_8bit": f"(Tensor x, Tensor? residual, {_NORM}",
    "embedding_norm_8bit": (
        f"(Tensor ids, Tensor positions, Tensor? types, Tensor words, Tensor places, Tensor? kinds, {_NORM}"
    ),
    "quantize_8bit": "(Tensor x, Tensor scale, int zero_point, ScalarType dtype) -> Tensor",
    "padded_attention": (
        "(Tensor query, Tensor key, Tensor value, Tensor mask, float scale, ScalarType? quantized_as, "
        "Tensor? next_scale, int next_zero_point) -> Tensor"
    ),
}


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _linear(a: Tensor, weight: Tensor, *operands: Any) -> Tensor:
    *before, residual, next_scale, zero_point, activation, dtype, parts = operands
    tensors = (_rows(a), weight, *before, None if residual is None else _rows(residual), next_scale)
    y = reference.linear(*tensors, activation=activation, dtype=dtype, parts=parts, zero_point=zero_point)
    return y.reshape(_shape(a, weight, parts))


def product_of(rows: int, weight: Tensor, *operands: Any) -> Product:
    """Return the matrix multiplication of a call of ``linear_8bit`` as an entry of a table of tiles.

    Args:
        rows: the number of rows of a.
        weight: w.
        operands: the operands after it.
    """
    *_, bias, residual, _, _, activation, dtype, parts = operands
    epilogue = [activation, _name(dtype), f"{parts} results"]
    epilogue += ["bias"] * (bias is not None) + ["residual"] * (residual is not None)
    n, k = weight.shape
    return Product(bucket(rows), n, k, _name(weight.dtype), ", ".join(epilogue), capability_of(weight.device))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def capability_of(device: torch.device) -> str:
    """Return the compute capability of a GPU, such as ``9.0``, or the name of another device."""
    return ".".join(map(str, torch.cuda.get_device_capability(device))) if device.type == "cuda" else device.type


def rows_of(a: Tensor) -> int:
    """Return the number of rows of an operand [.., K]."""
    return a.numel() // a.shape[-1]


def _triton_linear(a: Tensor, weight: Tensor, *operands: Any) -> Tensor:
    rows = rows_of(a)
    return linear_with(TABLE.method(product_of(rows, weight, *operands), rows), a, weight, *operands)


def linear_with(method: Method, a: Tensor, weight: Tensor, *operands: Any) -> Tensor:
    """Compute ``linear_8bit`` by a method."""
    from quantizer.numerics.triton_kernels.products import Epilogue, finished, linear

    scale, scales, bias, residual, next_scale, zero_point, activation, dtype, parts = operands
    rows, added = _rows(a), None if residual is None else _rows(residual)
    epilogue = Epilogue(activation=activation, dtype=dtype, parts=parts)
    if isinstance(method, Tile):
        y = linear(rows, weight, scale, scales, bias, added, next_scale, epilogue, method, zero_point=zero_point)
    else:
        if method == LIBRARY:
            sums = _library_product(rows, weight)
        else:
            # Quantized values are exact in float16, and the divided sums do not overflow.
            sums, scale = functional.linear(rows.half(), float16_weight(weight)), scale * 2.0 ** _shift(weight)
        y = finished(sums, scale, scales, bias, added, next_scale, epilogue, zero_point=zero_point)
    return y.reshape(_shape(a, weight, parts))


def _library_product(a: Tensor, w: Tensor) -> Tensor:
    """Return a w^T [M, N]: int32 of INT8, float32 of FP8."""
    if a.dtype is INT8.storage:
        return torch._int_mm(a, w.t())
    one = _one(a.device)
    return torch._scaled_mm(a, w.t(), one, one, out_dtype=torch.float32, use_fast_accum=True)


@cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


_COPIES: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()
"""The copies of weights in float16, for as long as the weights exist."""


def float16_weight(weight: Tensor) -> Tensor:
    """Return the copy of a weight in float16, w / 2^shift, which is made once."""
    if weight not in _COPIES:
        _COPIES[weight] = (weight.to(torch.float32) * 2.0 ** -_shift(weight)).half()
    return _COPIES[weight]


def has_float16_weight(weight: Tensor) -> bool:
    """Return whether there is a copy of a weight in float16."""
    return weight in _COPIES


def drop_float16_weight(weight: Tensor) -> None:
    """Free the copy of a weight in float16."""
    _COPIES.pop(weight, None)


def _shift(weight: Tensor) -> int:
    """Return the least power of two by which sums of K products of quantized values must be divided for float16."""
    largest = FP8.qmax if weight.dtype is FP8.storage else -INT8.qmin
    return max(0, math.ceil(math.log2(weight.shape[1] * largest**2 / torch.finfo(torch.float16).max)))


def _linear_without_data(a: Tensor, weight: Tensor, *operands: Any) -> Tensor:
    dtype, parts = operands[-2:]
    return a.new_empty(_shape(a, weight, parts), dtype=dtype)


def _shape(a: Tensor, weight: Tensor, parts: int) -> tuple[Any, ...]:
    return (*(() if parts == 1 else (parts,)), *a.shape[:-1], len(weight) // parts)


def _of_norm(
    h: Tensor,
    dtype: torch.dtype,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    total: bool,
    value: bool,
    quantized_as: torch.dtype | None,
    next_scale: Tensor | None,
    next_zero_point: int,
) -> list[Tensor]:
    """Return the requested results for float32 rows h [.., W], in ``dtype``."""
    normed, quantized = reference.normed(
        _rows(h),
        weight,
        bias,
        eps,
        rms=rms,
        quantized_as=quantized_as,
        next_scale=next_scale,
        zero_point=next_zero_point,
    )
    results = [h.to(dtype)] if total else []
    results += [normed.to(dtype).reshape(h.shape)] if value else []
    return results if quantized is None else [*results, quantized.reshape(h.shape)]


def _norm(x: Tensor, residual: Tensor | None, *options: Any) -> list[Tensor]:
    # A result must not be an input.
    h = x.float().clone() if residual is None else x.float() + residual.float()
    return _of_norm(h, x.dtype, *options)


def _triton_norm(x: Tensor, residual: Tensor | None, *options: Any) -> list[Tensor]:
    from quantizer.numerics.triton_kernels.norms import norm

    results = norm(_rows(x), None if residual is None else _rows(residual), *options[:3], **_keywords(*options[3:]))
    return [result.reshape(x.shape) for result in results if result is not None]


def _keywords(*options: Any) -> dict[str, Any]:
    return dict(zip(("rms", "total", "value", "quantized_as", "next_scale", "zero_point"), options, strict=True))


def _norm_without_data(x: Tensor, residual: Tensor | None, *options: Any) -> list[Tensor]:
    return _results_without_data(x.new_empty(x.shape), *options)


def _results_without_data(like: Tensor, *options: Any) -> list[Tensor]:
    total, value, quantized_as = options[4:7]
    floats = [torch.empty_like(like) for written in (total, value) if written]
    return floats if quantized_as is None else [*floats, torch.empty_like(like, dtype=quantized_as)]


def _embedding_norm(
    ids: Tensor,
    positions: Tensor,
    types: Tensor | None,
    words: Tensor,
    places: Tensor,
    kinds: Tensor | None,
    *options: Any,
) -> list[Tensor]:
    h = words[ids].float()
    if types is not None and kinds is not None:
        h = h + kinds[types].float()
    return _of_norm(h + places[positions].float(), words.dtype, *options)


def _triton_embedding_norm(
    ids: Tensor,
    positions: Tensor,
    types: Tensor | None,
    words: Tensor,
    places: Tensor,
    kinds: Tensor | None,
    *options: Any,
) -> list[Tensor]:
    from quantizer.numerics.triton_kernels.norms import embedding_norm

    indices = _broadcast(ids, positions, types)
    flat = [index.reshape(-1).contiguous() for index in indices]
    results = embedding_norm(
        *(flat[0], flat[1], None if types is None else flat[2], words, places, kinds),
        *options[:3],
        **_keywords(*options[3:]),
    )
    shape = (*indices[0].shape, words.shape[1])
    return [result.reshape(shape) for result in results if result is not None]


def _broadcast(*indices: Tensor | None) -> tuple[Tensor, ...]:
    broadcast: Any = torch.broadcast_tensors
    result: tuple[Tensor, ...] = broadcast(*(index for index in indices if index is not None))
    return result


def _embedding_without_data(
    ids: Tensor,
    positions: Tensor,
    types: Tensor | None,
    words: Tensor,
    places: Tensor,
    kinds: Tensor | None,
    *options: Any,
) -> list[Tensor]:
    indices = _broadcast(ids, positions, types)
    return _results_without_data(words.new_empty((*indices[0].shape, words.shape[1])), *options)


def _quantize(x: Tensor, scale: Tensor, zero_point: int, dtype: torch.dtype) -> Tensor:
    return reference.quantized(x.contiguous().float(), scale, dtype, zero_point)


def _triton_quantize(x: Tensor, scale: Tensor, zero_point: int, dtype: torch.dtype) -> Tensor:
    from quantizer.numerics.triton_kernels.quantize import quantize

    return quantize(x.contiguous(), scale, zero_point, dtype)


def _quantize_without_data(x: Tensor, scale: Tensor, zero_point: int, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    quantized_as: torch.dtype | None,
    next_scale: Tensor | None,
    next_zero_point: int,
    *,
    quantize: Callable[[Tensor, Tensor, int, torch.dtype], Tensor] = _quantize,
) -> Tensor:
    """Compute ``padded_attention`` by SDPA; ``quantize`` returns its quantized values."""
    y = functional.scaled_dot_product_attention(query, key, value, mask, scale=scale)
    # The memory of all methods is that of [B, Q, H, D]; SDPA mostly returns it so.
    y = y.transpose(1, 2).contiguous()
    if quantized_as is not None and next_scale is not None:
        y = quantize(y.flatten(2), next_scale, next_zero_point, quantized_as).view(y.shape)
    return y.transpose(1, 2)


WIDEST_HEAD = 128
"""The values of a head for which the kernel does not spill registers."""


def kernel_takes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> bool:
    """Return whether the kernel computes an attention; SDPA computes others, such as those with a causal mask."""
    is_plain = query.dim() == mask.dim() == 4 and key.shape == value.shape and mask.shape[2] == 1
    is_plain &= query.dtype in (torch.float16, torch.bfloat16) and mask.dtype.is_floating_point and mask.shape[3] > 0
    return is_plain and query.shape[:2] == key.shape[:2] and query.shape[3] == key.shape[3] <= WIDEST_HEAD


def attention_entry(query: Tensor, key: Tensor, quantized_as: torch.dtype | None) -> Attention:
    """Return the entry of a call of ``padded_attention`` in a table of tiles."""
    samples, heads, queries, width = query.shape
    return Attention(
        heads=heads,
        width=width,
        operands=_name(query.dtype),
        result=_name(quantized_as or query.dtype),
        capability=capability_of(query.device),
        samples=power_of_two(samples),
        queries=bucket(queries),
        keys=bucket(key.shape[2]),
    )


def _triton_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *options: Any) -> Tensor:
    if not kernel_takes(query, key, value, mask):
        return attention_with(LIBRARY, query, key, value, mask, *options)
    method = TABLE.method(attention_entry(query, key, options[1]), query.shape[2])
    return attention_with(method, query, key, value, mask, *options)


def attention_with(method: Method, *operands: Any) -> Tensor:
    """Compute ``padded_attention`` by a method."""
    from quantizer.numerics.triton_kernels.attention import attention

    if not isinstance(method, AttentionTile):
        return _attention(*operands, quantize=_triton_quantize)
    query, key, value, mask, scale, quantized_as, next_scale, zero_point = operands
    options: dict[str, Any] = {"quantized_as": quantized_as, "next_scale": next_scale, "zero_point": zero_point}
    return attention(query, key, value, mask, scale, method, **options)


def _attention_without_data(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Tensor:
    samples, heads, queries, _ = query.shape
    result = query.new_empty((samples, queries, heads, value.shape[3]), dtype=options[2] or query.dtype)
    return result.transpose(1, 2)


KERNELS: dict[str, Callable[..., Any]] = {
    "linear_8bit": _triton_linear,
    "norm_8bit": _triton_norm,
    "embedding_norm_8bit": _triton_embedding_norm,
    "quantize_8bit": _triton_quantize,
    "padded_attention": _triton_attention,
}
"""The Triton kernel of each operator, by its name."""

_REFERENCES: dict[str, Callable[..., Any]] = {
    "linear_8bit": _linear,
    "norm_8bit": _norm,
    "embedding_norm_8bit": _embedding_norm,
    "quantize_8bit": _quantize,
    "padded_attention": _attention,
}
_SHAPES: dict[str, Callable[..., Any]] = {
    "linear_8bit": _linear_without_data,
    "norm_8bit": _norm_without_data,
    "embedding_norm_8bit": _embedding_without_data,
    "quantize_8bit": _quantize_without_data,
    "padded_attention": _attention_without_data,
}


def _on_its_device(name: str) -> Callable[..., Any]:
    """Return a call of a kernel on the GPU of its first operand, on which Triton would not launch by itself."""

    def call(first: Tensor, *rest: Any) -> Any:
        device_of: Any = torch.cuda.device_of
        if not first.numel():
            return _REFERENCES[name](first, *rest)
        with device_of(first):
            return KERNELS[name](first, *rest)

    return call


def _define() -> None:
    for name, schema in _SCHEMAS.items():
        for overload, function in (("triton", _on_its_device(name)), ("reference", _REFERENCES[name])):
            operator = f"quantizer::{name}.{overload}"
            torch.library.define(operator, schema)
            torch.library.impl(operator, ("CPU", "CUDA"), function)
            torch.library.register_fake(operator, _SHAPES[name])


_define()

OPERATORS = {name: getattr(torch.ops.quantizer, name) for name in _SCHEMAS}
"""The operators by name; each has the overloads ``triton`` and ``reference``."""
