"""Attention of a proxy, computed as MatMul, Softmax, MatMul, so that both matrix multiplications can be rounded.

Transformers models read the name of their attention function from their config at each call, and make their masks for
it. Fused attention hides both matrix multiplications; ``eager`` computes them separately. The configs of a proxy are
copies, so the user's model does not change.

``attention`` replaces ``F.scaled_dot_product_attention``, with the same arguments
(https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html). Legend: query
[.., H, L, E], key [.., G, S, E], value [.., G, S, V]; H query heads, G key and value heads (G = H except for grouped
queries); probabilities [.., H, L, S].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quantizer.rewrite.host_argument import EAGER, RECORDED

_SETTING = "_attn_implementation"


def use_eager_attention(proxy: nn.Module) -> None:
    """Switch the configs of all modules of a proxy to eager attention, and torch's layers to their Python path."""
    use_python_paths(proxy)
    for module in proxy.modules():
        config = module.__dict__.get("config")
        if hasattr(config, _SETTING):
            setattr(config, _SETTING, "eager")


def use_python_paths(proxy: nn.Module) -> None:
    """Switch torch's own layers to their Python path, where their sites are; other attention does not change."""
    for module in proxy.modules():
        vars(module)[EAGER] = True


@contextmanager
def attention_of(model: nn.Module, proxy: nn.Module) -> Iterator[bool]:
    """Use the model's attention in its proxy inside the block; yield whether it differs from the proxy's."""
    changed = []
    own = dict(model.named_modules(remove_duplicate=False))
    for path, module in proxy.named_modules(remove_duplicate=False):
        config, other = (vars(each).get("config") for each in (module, own.get(path, module)))
        name = getattr(other, _SETTING, None)
        if hasattr(config, _SETTING) and getattr(config, _SETTING) != name:
            changed.append((config, getattr(config, _SETTING)))
            setattr(config, _SETTING, name)
    try:
        yield bool(changed)
    finally:
        for config, former in reversed(changed):
            setattr(config, _SETTING, former)


@contextmanager
def as_recorded(proxy: nn.Module, recorded: bool) -> Iterator[None]:
    """Make a proxy compute as with or without recorded gradients inside the block, whatever the actual gradient mode.

    torch's encoder writes 0 at padded positions only if no gradients are recorded.
    """
    for module in proxy.modules():
        vars(module)[RECORDED] = recorded
    try:
        yield
    finally:
        for module in proxy.modules():
            vars(module).pop(RECORDED, None)


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
    """Return the attention; ``rounded`` has a function that rounds each operand before its matrix multiplication."""
    probabilities = _probabilities(rounded, query, key, attn_mask, is_causal, scale, enable_gqa)
    if dropout_p > 0:
        probabilities = functional.dropout(probabilities, dropout_p)
    value = _repeated(value, query) if enable_gqa else value
    result = rounded["probabilities"](probabilities) @ rounded["value"](value)
    if attn_mask is None:
        return result
    # The output is 0 for a query with all keys masked. Its scores are equal instead of -inf, so softmax is not NaN.
    hidden = ~attn_mask if attn_mask.dtype == torch.bool else torch.isneginf(attn_mask)
    return result.masked_fill(hidden.all(-1, keepdim=True), 0.0)


def observed_probabilities(args: Sequence[Any], keywords: Mapping[str, Any]) -> Tensor:
    """Return the probabilities of a call, before dropout, by a separate computation without gradients."""
    arguments = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False))
    arguments.update(keywords)
    options = {name: arguments.get(name, default) for name, default in _DEFAULTS.items()}
    with torch.no_grad():
        return _probabilities(_UNROUNDED, arguments["query"], arguments["key"], **options)


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
    # Not math.sqrt, because sizes are tensors in torch.jit.trace.
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    # Half of the lowest number, so that adding a score does not overflow.
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
    """Return keys or values [.., G, S, E] of grouped queries as [.., H, S, E], each head repeated H / G times."""
    times = query.shape[-3] // shared.shape[-3]
    spread = shared.unsqueeze(-3).expand(*shared.shape[:-2], times, *shared.shape[-2:])
    return spread.flatten(-4, -3)
