"""Padding in the output of torch's encoder, for one whose layers run on padded and not on nested tensors.

Legend: src, output [B, S, E]; padding [B, S], the mask as the encoder holds it, 0 at tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quantizer.rewrite.host_argument import RECORDED, takes_apart

_BATCHED = 3
_NESTED_ON = ("cpu", "cuda", "xpu")


def padded(host: Any, nested: bool, output: Tensor, src: Tensor, padding: Tensor | None, mask: Tensor | None) -> Tensor:
    """Return the output of all layers, with 0 where torch has it; rewritten text calls this ``_quantizer_padded``.

    The position of the padding is computed from the data without a branch, so that a graph holds it too.
    """
    if nested:
        result: Tensor = output.to_padded_tensor(0.0, src.size())
        return result
    if padding is None or not takes_apart(host) or not _would_be_nested(host, src, mask):
        return output
    tokens = padding == 0
    # torch takes this path only if every row has its padding behind its tokens.
    places = torch.arange(tokens.shape[1], device=tokens.device)
    behind = ((places < tokens.sum(1, keepdim=True)) == tokens).all()
    return output.masked_fill((~tokens & behind).unsqueeze(-1), 0.0)


def _would_be_nested(encoder: Any, src: Tensor, mask: Tensor | None) -> bool:
    """Return whether torch's encoder would run on nested tensors with its fast path; the conditions are torch's own."""
    first: nn.Module = encoder.layers[0]
    recorded = getattr(encoder, RECORDED, None)
    recorded = torch.is_grad_enabled() if recorded is None else recorded
    return (
        torch.backends.mha.get_fastpath_enabled()
        and getattr(encoder, "use_nested_tensor", False)
        and not first.training
        and src.dim() == _BATCHED
        and not src.is_nested
        and mask is None
        and not torch.is_autocast_enabled()
        and src.device.type in _NESTED_ON
        and not (recorded and any(value.requires_grad for value in (src, *first.parameters())))
    )
