"""Choosing the attention implementation of a proxy.

Transformers models read the name of their attention function from their config at each call, and make their masks
accordingly. Fused attention hides both products; ``eager`` shows them. The proxy's configs are its own copies, so this
does not reach the user's model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from quantizer.rewrite.host_argument import EAGER
from quantizer.rewrite.host_argument import RECORDED

__all__ = ["as_recorded", "use_eager_attention"]

_SETTING = "_attn_implementation"


def use_eager_attention(proxy: nn.Module) -> None:
    """Switch every config found in the proxy's modules to eager attention, and torch's layers to their Python path."""
    for module in proxy.modules():
        vars(module)[EAGER] = True
        config = module.__dict__.get("config")
        if hasattr(config, _SETTING):
            setattr(config, _SETTING, "eager")


@contextmanager
def as_recorded(proxy: nn.Module, recorded: bool) -> Iterator[None]:
    """Let a proxy compute what it does with gradients, or without them, whether or not they are recorded.

    torch's encoder writes 0 at padded positions where no gradient is wanted, and leaves them as they are elsewhere.
    """
    for module in proxy.modules():
        vars(module)[RECORDED] = recorded
    try:
        yield
    finally:
        for module in proxy.modules():
            vars(module).pop(RECORDED, None)
