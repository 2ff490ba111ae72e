"""Padding, which nobody reads: which tokens are real, and what of a tensor belongs to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["has_padding", "output_without_padding", "padding_mask", "without_padding"]


def padding_mask(keywords: Mapping[str, Any]) -> Tensor | None:
    """The mask [B, S] among a model's inputs, True where a token is real; None where nothing is padded."""
    mask = keywords.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    real = mask.bool()
    return None if bool(real.all()) else real


def without_padding(value: Tensor, mask: Tensor | None) -> Tensor:
    """The real positions of an operand [B, .., S, ..]; all of it where no axis, or more than one, has the length S.

    What the network computes at padding is read by nobody, yet it can set the range of everything else.
    """
    if mask is None or value.dim() < 3 or value.shape[0] != mask.shape[0]:
        return value
    axes = [axis for axis in range(1, value.dim()) if value.shape[axis] == mask.shape[1]]
    return value.movedim(axes[0], 1)[mask] if len(axes) == 1 else value


def has_padding(output: Tensor, mask: Tensor | None) -> bool:
    """Whether an output [B, S, ..] has a position for each token of the mask [B, S].

    Logits [B, C] have none, also where there are as many classes as tokens.
    """
    return mask is not None and output.dim() > 2 and output.shape[:2] == mask.shape


def output_without_padding(output: Tensor, mask: Tensor | None) -> Tensor:
    """The real positions of an output [B, S, ..]; all of what has another shape."""
    return output[mask] if has_padding(output, mask) else output
