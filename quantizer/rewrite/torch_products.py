"""The ATen operations that multiply matrices, and their multiply-adds.

They are independent of sites and of source code, so that both can be checked against them. A multiply-add is one
multiplication and the addition of its result. Masked elements, and those skipped as causal, count as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Arguments = Sequence[Any]

COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
"""Dispatch key of operations that torch computes by other operations."""


@dataclass(frozen=True, slots=True)
class Product:
    """An operation: the positions of its operands among the arguments, and a function that counts its multiply-adds."""

    operands: tuple[int, ...]
    count: Callable[[Arguments, Any], int]

    def tensors(self, args: Arguments) -> list[Tensor]:
        """Return the operands; each tensor of a list of weights is one operand."""
        operands: list[Tensor] = []
        for place in self.operands:
            value = args[place] if place < len(args) else None
            values = value if isinstance(value, list | tuple) else [value]
            operands += [item for item in values if isinstance(item, Tensor)]
        return operands


def _matrices(first: int) -> Product:
    """Return the operation [.., M, K] by [.., K, N] of the arguments ``first`` and ``first`` + 1."""
    return Product((first, first + 1), lambda args, _: args[first].numel() * args[first + 1].shape[-1])


def _vector(first: int) -> Product:
    """Return the operation [.., K] by [K] of the arguments ``first`` and ``first`` + 1."""
    return Product((first, first + 1), lambda args, _: args[first].numel())


def _convolution(args: Arguments, result: Any) -> int:
    source, weight, transposed = args[0], args[1], len(args) > 6 and bool(args[6])
    # Each element of the result takes one filter; if transposed, each element of the input does.
    elements: int = source.numel() if transposed else result.numel()
    return elements * int(weight[0].numel())


def _attention(args: Arguments, result: Any) -> int:
    query, key, value = args[:3]
    return int(query.numel() * key.shape[-2] + math.prod(query.shape[:-1]) * key.shape[-2] * value.shape[-1])


def _tokens(source: Tensor) -> tuple[int, int]:
    """Return the number of tokens and the sum of squared sequence lengths of [B, S, E], which may be nested."""
    if source.is_nested:
        lengths = [int(row.shape[0]) for row in source.unbind()]
        return sum(lengths), sum(length * length for length in lengths)
    return source.shape[0] * source.shape[1], source.shape[0] * source.shape[1] ** 2


def _self_attention(weights: Sequence[int]) -> Callable[[Arguments, Any], int]:
    """Return a counter for an attention or encoder layer on [B, S, E], with linears at the positions ``weights``."""

    def count(args: Arguments, result: Any) -> int:
        tokens, pairs = _tokens(args[0])
        return int(tokens * sum(args[place].numel() for place in weights) + 2 * pairs * args[0].size(-1))

    return count


def _recurrent(weights: Sequence[int]) -> Callable[[Arguments, Any], int]:
    """Return a counter for recurrent layers on [T, B, I]: each time step multiplies every weight matrix once."""

    def count(args: Arguments, result: Any) -> int:
        source = args[0]
        steps = math.prod(source.shape[:-1])
        values = [args[place] for place in weights]
        flat = [item for value in values for item in (value if isinstance(value, list | tuple) else [value])]
        return int(steps * sum(weight.numel() for weight in flat if isinstance(weight, Tensor) and weight.dim() == 2))

    return count


RECURRENT_KERNELS = {
    "aten::mkldnn_rnn_layer": Product((0, 1, 2), _recurrent((1, 2))),
    "aten::_cudnn_rnn": Product((0, 1), _recurrent((1,))),
    "aten::miopen_rnn": Product((0, 1), _recurrent((1,))),
}
"""Kernels that run a complete recurrence, by qualified name."""

FUSED_KERNELS = {
    "aten::_transformer_encoder_layer_fwd": Product((0, 3, 5, 14, 16), _self_attention((3, 5, 14, 16))),
    "aten::_native_multi_head_attention": Product((0, 5, 7), _self_attention((5, 7))),
}
"""Fast paths of torch that fuse several matrix multiplications, by qualified name."""

PRODUCTS: dict[str, Product] = {
    **{f"aten::{name}": _matrices(0) for name in ("mm", "bmm", "_int_mm", "_grouped_mm", "_scaled_mm")},
    "aten::_scaled_grouped_mm": _matrices(0),
    **{f"aten::{name}": _matrices(1) for name in ("addmm", "addmm_", "_addmm_activation", "baddbmm", "baddbmm_")},
    **{f"aten::{name}": _matrices(1) for name in ("addbmm", "addbmm_", "_sparse_addmm", "sspaddmm")},
    **{f"aten::{name}": _vector(0) for name in ("mv", "dot", "vdot")},
    **{f"aten::{name}": _vector(1) for name in ("addmv", "addmv_")},
    "aten::_trilinear": Product((0, 1, 2), lambda args, _: args[0].shape[0] * args[1].numel()),
    "aten::conv_tbc": Product((0, 1), lambda args, result: result.numel() * args[1].shape[0] * args[1].shape[1]),
    **{
        f"aten::{name}": Product((0, 1), _convolution)
        for name in ("convolution", "_convolution", "convolution_overrideable")
    },
    **{
        f"aten::_scaled_dot_product_{name}": Product((0, 1, 2), lambda args, result: _attention(args, result))
        for name in (
            "flash_attention",
            "flash_attention_for_cpu",
            "efficient_attention",
            "cudnn_attention",
            "fused_attention_overrideable",
        )
    },
    **RECURRENT_KERNELS,
    **FUSED_KERNELS,
}
"""All ATen operations that multiply matrices and that a dispatch mode can see, by qualified name."""


def product_name(func: Any) -> str | None:
    """Return the name of a dispatched operation in ``PRODUCTS``; None if it multiplies no matrices."""
    # The overload's name follows a dot.
    name: str = func.name().partition(".")[0]
    return name if name in PRODUCTS else None


def is_composite(func: Any) -> bool:
    """Return whether torch computes an operation by others, such as ``linear`` by ``addmm``, and only the others count.

    An operation with its own kernel is not composite, even if torch has a decomposition in Python for graphs, because
    that one adds in another order or returns another layout.
    """
    if not isinstance(func, torch._ops.OpOverload):
        return False
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(str(func._name), COMPOSITE)
    except RuntimeError:  # operators for tracing alone, such as sym_size, are not in the dispatcher
        return False
