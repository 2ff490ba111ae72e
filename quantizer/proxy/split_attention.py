"""``F.scaled_dot_product_attention`` as MatMul, Softmax, MatMul, so that both products can be rounded.

Legend: query [.., H, L, E], key [.., G, S, E], value [.., G, S, V]; H query heads, G key and value heads (G = H except
for grouped queries); probabilities [.., H, L, S]. The arguments and their meaning are those of
https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Round = Callable[[Tensor], Tensor]


def attention(
    rounded: Mapping[str, Round],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the attention; its entry in ``rounded`` rounds each operand right before the product."""
    probabilities = _probabilities(rounded, query, key, attn_mask, is_causal, scale, enable_gqa)
    if dropout_p > 0:
        probabilities = functional.dropout(probabilities, dropout_p)
    value = _repeated(value, query) if enable_gqa else value
    result = rounded["probabilities"](probabilities) @ rounded["value"](value)
    if attn_mask is None:
        return result
    # A query with all keys masked gives zeros. Its scores are equal instead of -inf, whose softmax would be NaN.
    hidden = ~attn_mask if attn_mask.dtype == torch.bool else torch.isneginf(attn_mask)
    return result.masked_fill(hidden.all(-1, keepdim=True), 0.0)


def observed_probabilities(args: Sequence[Any], keywords: Mapping[str, Any]) -> Tensor:
    """Return the probabilities of a call, before dropout, by a separate computation without gradients."""
    given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False))
    given.update(keywords)
    wanted = {name: given.get(name, default) for name, default in _DEFAULTS.items()}
    with torch.no_grad():
        return _probabilities(_UNROUNDED, given["query"], given["key"], **wanted)


_DEFAULTS: dict[str, Any] = {"attn_mask": None, "is_causal": False, "scale": None, "enable_gqa": False}
_UNROUNDED: dict[str, Round] = {"query": lambda x: x, "key": lambda x: x}


def _probabilities(
    rounded: Mapping[str, Round],
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    key = _repeated(key, query) if enable_gqa else key
    scores = rounded["query"](query) @ rounded["key"](key.transpose(-2, -1))
    # Not math.sqrt: while torch.jit.trace records, a size is a tensor.
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    # Half of the lowest number: a score added to it does not overflow.
    lowest = torch.finfo(scores.dtype).min / 2
    if is_causal:
        rows, columns = (torch.arange(scores.shape[axis], device=scores.device) for axis in (-2, -1))
        scores = scores.masked_fill(columns > rows[:, None], lowest)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, lowest)
    elif attn_mask is not None:
        scores = scores + attn_mask.clamp(min=lowest)
    return scores.softmax(-1)


def _repeated(shared: Tensor, query: Tensor) -> Tensor:
    """Return keys or values [.., G, S, E] of grouped queries as [.., H, S, E]: each H / G times in a row."""
    times = query.shape[-3] // shared.shape[-3]
    spread = shared.unsqueeze(-3).expand(*shared.shape[:-2], times, *shared.shape[-2:])
    return spread.flatten(-4, -3)
