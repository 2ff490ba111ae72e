"""Choosing the attention implementation of a proxy.

Transformers models read the name of their attention function from their config at each call, and make their masks
accordingly. Fused attention hides both products; ``eager`` shows them. The proxy's configs are its own copies, so this
does not reach the user's model.
"""

from __future__ import annotations

from torch import nn

from quantizer.source.lend import EAGER

__all__ = ["use_eager_attention"]

_SETTING = "_attn_implementation"


def use_eager_attention(proxy: nn.Module) -> None:
    """Switch every config found in the proxy's modules to eager attention, and torch's layers to their Python path."""
    for module in proxy.modules():
        vars(module)[EAGER] = True
        config = module.__dict__.get("config")
        if hasattr(config, _SETTING):
            setattr(config, _SETTING, "eager")
