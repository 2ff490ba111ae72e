"""One more pass of a proxy over inputs that it has had before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch import nn
from torch.utils import _pytree as pytree

__all__ = ["copied", "pass_of"]


def copied(args: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs with tensors of their own: a model may change in place what it is given."""
    own: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(Tensor, Tensor.clone, (args, dict(keywords)))
    return own


def pass_of(proxy: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """What the proxy gives for a copy of the inputs; its hooks do not run."""
    args, keywords = copied(args, keywords)
    return proxy.forward(*args, **keywords)
