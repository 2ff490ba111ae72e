"""Copies of what a model is given: a forward may write into its inputs, and the data is the user's."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quantizer.common.structure import flattened

__all__ = ["copied", "own"]


def own(value: Any, *, detached: bool = True) -> Any:
    """Return a structure with copies in the place of its leaves; what is one leaf in two places stays one.

    ``detached``: whether a copied tensor is outside of the graph of gradients.
    """
    found, rebuilt = flattened(value)
    memo: dict[int, Any] = {}
    for leaf in found:
        if isinstance(leaf, Tensor) and id(leaf) not in memo:
            memo[id(leaf)] = leaf.detach().clone() if detached else leaf.clone()
    return rebuilt([copy.deepcopy(leaf, memo) for leaf in found])


def copied(args: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return a copy of the inputs: a loader may reuse the tensors, and a model may write into them."""
    made: tuple[tuple[Any, ...], Mapping[str, Any]] = own((args, dict(keywords)))
    return made
