"""``initialize()`` and ``deactivate()``: modules built by this thread in between get ``TensorQuantizer``s."""

from __future__ import annotations

import logging

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from quantizer.errors import ProxyError
from quantizer.integrations.pytorch_quantization.nn import (
    QuantConv1d,
    QuantConv2d,
    QuantConv3d,
    QuantConvTranspose1d,
    QuantConvTranspose2d,
    QuantConvTranspose3d,
    QuantLinear,
    TensorQuantizer,
)
from quantizer.proxy.build import instrument, is_proxy, sites_of
from quantizer.proxy.eager_attention import use_eager_attention
from quantizer.rewrite.constructor_patch import Source, patched

logger = logging.getLogger(__name__)

_KINDS = ("linear", "conv", "matmul")
_DEFAULTS = {
    "conv1d": QuantConv1d,
    "conv2d": QuantConv2d,
    "conv3d": QuantConv3d,
    "conv_transpose1d": QuantConvTranspose1d,
    "conv_transpose2d": QuantConvTranspose2d,
    "conv_transpose3d": QuantConvTranspose3d,
}
_OPEN: list[patched] = []


def initialize(*sources: Source) -> None:
    """Add ``TensorQuantizer``s to the modules that this thread builds, until ``deactivate``."""
    if _OPEN:
        raise ProxyError("quant_modules.initialize() is already active; call deactivate() first")
    block = patched(*sources, built=quantize_model, everything=True)
    block.__enter__()
    _OPEN.append(block)


def deactivate() -> None:
    """Stop quantizing new modules, and restore all patched constructors."""
    while _OPEN:
        _OPEN.pop().__exit__(None, None, None)


def quantize_model(model: nn.Module) -> None:
    """Add enabled ``TensorQuantizer``s to the matrix multiplications and convolutions in the source of ``model``
    itself.

    Submodules built before keep their own quantizers.
    """
    if type(model).__module__.startswith("torch.") and next(model.parameters(), None) is None:
        return  # an activation, a loss or an empty container may become part of a float model
    if isinstance(model, LazyModuleMixin):
        logger.warning(
            "initialize(): a %s is not quantized: it changes its class at its first call; build it with explicit sizes",
            type(model).__name__,
        )
        return
    if not is_proxy(model):
        instrument(model)
    use_eager_attention(model)
    for site in sites_of(model):
        quantized = site.operation.kind in _KINDS
        defaults = _DEFAULTS.get(site.operation.name, QuantLinear)
        for name in site.quantizers:
            if isinstance(site._modules[name], TensorQuantizer):
                continue
            weight = name == "_weight_quantizer"
            quantizer = TensorQuantizer(
                defaults.default_quant_desc_weight if weight else defaults.default_quant_desc_input
            )
            if not quantized:
                # Loops over module names expect this quantizer, although the site is never quantized.
                quantizer.disable()
            site.add_module(name, quantizer)
        site.active = quantized
