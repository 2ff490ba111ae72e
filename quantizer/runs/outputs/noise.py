"""The noise of float sums, added to the products of a quantized model: how far it alone moves the outputs.

No engine adds up in the order of PyTorch. In a model that rounds, a sum that differs in its last bits is now and then
rounded to the neighbouring step, that moves sums of later layers by more, and so on: DINOv2's logits move by as much as
quantization itself moves them, with any order of sums. Where PyTorch's own output happens to be closer to that of the
float model, no engine is wrong for not being so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.proxy.site import Site

_SUM = 1e-6
"""Relative error of a sum of some hundred products in float32."""


def rounds(model: nn.Module) -> bool:
    """Return whether a model is a proxy that rounds operands."""
    return bool(_rounding_sites(model))


@contextmanager
def float_noise(proxy: nn.Module, seed: int) -> Iterator[None]:
    """Multiply each result of the sites that round by 1 + e; e is normal, with the standard deviation of a sum's error.

    Args:
        proxy: the proxy.
        seed: that of the noise; the same seed gives the same noise.
    """
    generator = torch.Generator().manual_seed(seed)

    def add(site: Site, _: Any, result: Any) -> Any:
        # Results in place are the caller's own tensors.
        if site.source.in_place or not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        relative = _SUM if result.dtype == torch.float32 else torch.finfo(result.dtype).eps
        noise = torch.randn(result.shape, generator=generator)
        return result * (1 + relative * noise).to(result)

    hooks = [site.register_forward_hook(add) for site in _rounding_sites(proxy)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _rounding_sites(model: nn.Module) -> list[Site]:
    return [module for module in model.modules() if isinstance(module, Site) and module.active]
