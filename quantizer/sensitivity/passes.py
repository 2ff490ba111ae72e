"""A pass of a proxy over inputs of an earlier pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from quantizer.observe.replay_batches import copied

__all__ = ["pass_of"]


def pass_of(proxy: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """Return the proxy's output for a copy of the inputs; hooks of the whole proxy do not run."""
    args, keywords = copied(args, keywords)
    return proxy.forward(*args, **keywords)
