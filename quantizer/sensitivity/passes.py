"""One more pass of a proxy over inputs that it has had before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from quantizer.observe.replay_batches import copied

__all__ = ["pass_of"]


def pass_of(proxy: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """Return what the proxy gives for a copy of the inputs; its hooks do not run."""
    args, keywords = copied(args, keywords)
    return proxy.forward(*args, **keywords)
