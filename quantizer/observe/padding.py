"""Padding: which tokens are real, and which positions of a tensor belong to them.

The meaning of an ``attention_mask`` depends on the model: 1 for a token and 0 for padding, as tokenizers write it;
booleans of the opposite meaning; numbers to be added to scores; or which token may attend to which. Positions are left
out only if the first meaning is certain: leaving out real tokens would spoil ranges, keeping padding costs little.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_NAME = "attention_mask"
_AXES = 2  # of a mask [B, S]


def padding_mask(keywords: Mapping[str, Any], args: tuple[Any, ...] = ()) -> Tensor | None:
    """Return the mask [B, S] among a model's inputs, True where a token is real; None if no padding is certain."""
    return read_mask(keywords, args)[0]


def read_mask(keywords: Mapping[str, Any], args: tuple[Any, ...] = ()) -> tuple[Tensor | None, str | None]:
    """Return the mask of ``padding_mask``, and why an ``attention_mask`` is ignored (None: it is used, or masks
    nothing)."""
    mask = keywords.get(_NAME)
    if not isinstance(mask, Tensor) or mask.numel() == 0 or bool((mask == mask.flatten()[0]).all()):
        # All values are equal: nothing is masked, as every batch has a token.
        return None, None
    others = {**{str(place): value for place, value in enumerate(args)}, **keywords}
    doubt = _doubt(mask, {name: value for name, value in others.items() if isinstance(value, Tensor)})
    if doubt is None:
        return mask.bool(), None
    kind = str(mask.dtype).removeprefix("torch.")
    return None, (
        f"{_NAME} ({kind} {list(mask.shape)}) is not certainly 1 for tokens and 0 for padding: {doubt}; so padding, if "
        "there is any, is observed like all else. Give it as integers [batch, sequence], or batches without padding"
    )


def without_padding(value: Tensor, mask: Tensor | None, *, channels_last: bool = False) -> Tensor:
    """Return the real positions of an operand [B, .., S, ..]; all positions unless exactly one axis has the length S.

    Values at padding are not used by the model, yet can determine the range.

    Args:
        value: the operand.
        mask: [B, S], True where a token is real; None: all are real.
        channels_last: whether the last axis is known to be no sequence.
    """
    axis = _token_axis(value, mask, channels_last)
    return value if mask is None or axis is None else value.movedim(axis, 1)[mask]


def with_zeroed_padding(value: Tensor, mask: Tensor | None, *, channels_last: bool = False) -> Tensor:
    """Return an operand [B, .., S, ..] with zeros at its padding; which that is, see ``without_padding``."""
    axis = _token_axis(value, mask, channels_last)
    if mask is None or axis is None:
        return value
    hidden = ~mask.to(value.device)
    return value.masked_fill(hidden.reshape([*hidden.shape, *[1] * (value.dim() - _AXES)]).movedim(1, axis), 0.0)


def _token_axis(value: Tensor, mask: Tensor | None, channels_last: bool) -> int | None:
    """Return the axis of the tokens of a mask [B, S] in a value; None without a mask, or if it cannot be told."""
    if mask is None or value.dim() < _AXES + 1 or value.shape[0] != mask.shape[0]:
        return None
    axes = [axis for axis in range(1, value.dim() - channels_last) if value.shape[axis] == mask.shape[1]]
    return axes[0] if len(axes) == 1 else None


def has_padding(output: Tensor, mask: Tensor | None) -> bool:
    """Return whether an output [B, S, ..] has a position for each token of the mask [B, S].

    Logits [B, C] have none, even if there are as many classes as tokens.
    """
    return mask is not None and output.dim() > _AXES and output.shape[:2] == mask.shape


def output_without_padding(output: Tensor, mask: Tensor | None) -> Tensor:
    """Return the real positions of an output [B, S, ..]; an output of another shape as it is."""
    return output[mask] if has_padding(output, mask) else output


def _doubt(mask: Tensor, inputs: Mapping[str, Tensor]) -> str | None:
    """Return why a mask may have another meaning; None if it cannot. ``inputs`` are the model's tensors, by name."""
    if mask.dtype == torch.bool:
        return "booleans may be True for either"
    if mask.is_floating_point() or mask.is_complex():
        return "its numbers may be added to scores"
    if mask.dim() != _AXES:
        return f"it has {mask.dim()} axes"
    if not bool(((mask == 0) | (mask == 1)).all()):
        return "it has other numbers"
    real = mask.bool()
    changes = (real[:, 1:] != real[:, :-1]).sum(1)
    left_or_right = bool(real[:, 0].all()) or bool(real[:, -1].all())
    if not left_or_right or int(changes.max()) > 1:
        return "not every row has its tokens together, on one side in all rows"
    return _doubt_beside(real, {name: value for name, value in inputs.items() if not name.endswith("mask")})


def _doubt_beside(real: Tensor, inputs: Mapping[str, Tensor]) -> str | None:
    """Return why the other inputs leave a doubt that ``real`` [B, S] marks the real tokens; None if they do not."""
    alike = {name: value for name, value in inputs.items() if value.shape[:_AXES] == real.shape}
    if not alike:
        return "no other input has that batch and sequence"
    if any(name.startswith("decoder") for name in alike):
        return "the decoder's inputs are as long, and whose values are whose cannot be told"
    values = [value for value in alike.values() if value.shape == real.shape and not value.is_floating_point()]
    pairs = [(_constant(value[real]), _constant(value[~real])) for value in values]
    if any(shown and not hidden for shown, hidden in pairs):
        return "where it is 1 the tokens are all the same one, as padding is"
    if real.shape[0] == real.shape[1] and not any(hidden and not shown for shown, hidden in pairs):
        return "it is square, and may say which token sees which"
    return None


def _constant(values: Tensor) -> bool:
    return bool((values == values[0]).all())
