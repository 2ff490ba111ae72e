"""The operators that an engine file may call: those that an import and its lowering make, and no others.

A file names its operators by text. A name that is not listed here is refused before anything is looked up.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed as _decomposed  # registers the operators

del _decomposed

_ATEN = """
    abs.default acos.default acosh.default add.Scalar add.Tensor amax.default amin.default arange.default
    arange.start_step argmax.default argmin.default asin.default asinh.default atan.default atanh.default
    avg_pool1d.default avg_pool2d.default avg_pool3d.default batch_norm.default bitwise_and.Tensor bitwise_not.default
    bitwise_or.Tensor bitwise_xor.Tensor cat.default ceil.default celu.default clamp.Tensor clamp.default
    constant_pad_nd.default contiguous.default convolution.default cos.default cosh.default cumsum.default div.Tensor
    div.Tensor_mode einsum.default elu.default embedding.default eq.Tensor erf.default exp.default expand.default
    flatten.using_ints
    flip.default floor.default fmod.Tensor full.default gather.default ge.Tensor gelu.default group_norm.default
    gru.input gt.Tensor hardswish.default index.Tensor index_put.default instance_norm.default isinf.default
    isnan.default layer_norm.default le.Tensor leaky_relu.default linalg_vector_norm.default log.default log_softmax.int
    logical_and.default logical_not.default logical_or.default logical_xor.default logsumexp.default lstm.input
    lt.Tensor matmul.default max_pool1d.default max_pool2d.default max_pool3d.default maximum.default mean.dim
    minimum.default mish.default mul.Scalar mul.Tensor neg.default pad.default permute.default pixel_shuffle.default
    pow.Tensor_Tensor prod.dim_int reciprocal.default relu.default remainder.Tensor repeat.default reshape.default
    rms_norm.default rnn_relu.input rnn_tanh.input round.default scalar_tensor.default
    scaled_dot_product_attention.default scatter.src scatter_reduce.two select.int sigmoid.default
    sign.default sin.default sinh.default slice.Tensor softmax.int softplus.default split_with_sizes.default
    sqrt.default square.default squeeze.default squeeze.dims stack.default sub.Tensor sum.dim_IntList sym_numel.default
    sym_size.int tan.default tanh.default tensor_split.sections threshold.default to.dtype topk.default transpose.int
    tril.default triu.default unflatten.int unsqueeze.default upsample_bicubic2d.vec upsample_bilinear2d.vec
    upsample_linear1d.vec upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec upsample_trilinear3d.vec
    where.self
"""
_QUANTIZED = """
    dequantize_per_channel.default dequantize_per_tensor.default quantize_per_channel.default
    quantize_per_tensor.default
"""
_ONEDNN = """
    qconv_pointwise.default qconv_prepack.default qlinear_pointwise.binary qlinear_pointwise.default
    qlinear_prepack.default
"""
_PLAIN = {f"operator.{name}": getattr(operator, name) for name in ("add", "eq", "floordiv", "getitem", "mul", "sub")}
"""Of sizes, and of results that are several."""


def _overloads(namespace: str, names: str) -> dict[str, Any]:
    found = {}
    for name in names.split():
        packet, _, overload = name.partition(".")
        found[f"{namespace}.{name}"] = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return found


_ALLOWED = _PLAIN | _overloads("aten", _ATEN) | _overloads("quantized_decomposed", _QUANTIZED)
# A torch without oneDNN has no such operators, and no engine of this backend.
_ALLOWED |= _overloads("onednn", _ONEDNN) if torch._C._has_mkldnn else {}
_NAMES = {target: name for name, target in _ALLOWED.items()}


def allowed_operator(name: str) -> Any:
    """Return the operator of a name.

    Raises:
        ValueError: the engine has none of that name.
    """
    if name not in _ALLOWED:
        raise ValueError(f"operator {name[:200]!r} is not one of those that the engine has")
    return _ALLOWED[name]


def operator_name(target: Any) -> str:
    """Return the name under which a file holds an operator.

    Raises:
        ValueError: a file may not hold it.
    """
    if target not in _NAMES:
        raise ValueError(f"operator {target} is not one of those that an engine file may hold")
    return _NAMES[target]
