"""A site that computes with a kernel of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import nn

from quantizer.proxy.lowered.calls import CALLS
from quantizer.proxy.lowered.choose import Lowering
from quantizer.proxy.lowered.choose import choose
from quantizer.proxy.lowered.kernels import Kernel
from quantizer.proxy.lowered.stored_weight import LazyWeight
from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.proxy.site import Site

__all__ = ["LoweredSite"]


class LoweredSite(Site):
    """A frozen site that calls a kernel where there is one, and rounds as before where there is none.

    Attributes:
        lowering: what the choice of the kernel depends on.
        chosen: the kernel, or why there is none; None: it has to be chosen anew, after a copy or a load.
    """

    lowering: Lowering
    chosen: Kernel | str | None
    _arguments: Callable[..., Any]
    _check: Callable[[Tensor], None] | None
    _shift: Tensor | None
    _added: tuple[Tensor, Tensor] | None

    @staticmethod
    def of(site: Site, lowering: Lowering) -> None:
        """Turn a frozen site into a lowered one."""
        site.__class__ = LoweredSite
        assert isinstance(site, LoweredSite)
        site.lowering, site.chosen, site._added = lowering, None, None
        call = CALLS.get(site.source.operation)
        if call is not None:
            weight = site.quantizer_of(call.weight)
            if weight.handed_over:
                LazyWeight.of(weight)
        site.choice()

    def choice(self) -> Kernel | str:
        """Return the kernel, or why there is none, chosen for where the weight is now."""
        if self.chosen is None:
            self.chosen, self._added = choose(self, self.lowering), None
            if not isinstance(self.chosen, str):
                call = CALLS[self.source.operation]
                frozen = self.quantizer_of(call.weight).frozen
                self._shift = self.bias_shift
                self._arguments, self._check = call.arguments, None if frozen is None else frozen.check
        return self.chosen

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        # Without torch's search for hooks, of which a site has none: it takes as long as the quantization of a token.
        return self.forward(*args, **keywords)

    def forward(self, *args: Any, **keywords: Any) -> Any:
        kernel = self.chosen or self.choice()
        if isinstance(kernel, str):
            return super().forward(*args, **keywords)
        self.refuse_training()
        rest = args[1:] if self._implied is None else args
        given = self._arguments(*rest, **keywords)
        if given is not None:
            x, weight, bias, window = given
            if self._check is not None:
                self._check(weight)
            if not x.is_floating_point() if kernel.name == _LOOKUP else x.dtype is torch.float32 and x.numel():
                result = self._computed(kernel, x, bias, window)
                if result is not None:
                    return result
        return super().forward(*args, **keywords)

    def _computed(self, kernel: Kernel, x: Tensor, bias: Any, window: Any) -> Any:
        """Return the result; None if the kernel cannot make this call. A bias of another shape is added after it."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._computed(kernel, x, bias, window)
        if self._shift is not None:
            bias = self._shifted(bias, self._shift)
        plain = bias is None or (isinstance(bias, Tensor) and bias.dim() == 1 and bias.dtype is torch.float32)
        if plain:
            return kernel(x, bias, window)
        result = kernel(x, None, window)
        return None if result is None else result + bias

    def _shifted(self, bias: Any, shift: Tensor) -> Any:
        """Return the bias with the site's shift; the sum with a parameter, which is frozen, is kept."""
        if bias is None:
            return shift.float() if self.holds_shift else None
        if self._added is not None and self._added[0] is bias:
            return self._added[1]
        total = bias + shift.to(bias)
        if isinstance(bias, nn.Parameter) and not torch.compiler.is_compiling():
            self._added = bias, total
        return total

    def quantizer_of(self, operand: str) -> OperandQuantizer:
        """Return the quantizer of the operand called ``operand``."""
        found = self._modules.get(f"_{operand}_quantizer")
        # Each read of a module's weight asks.
        return found if isinstance(found, OperandQuantizer) else super().quantizer_of(operand)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.chosen = None
        moved = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Now and not in the first call: that may be one of torch.compile, which cannot make a kernel in its graph.
        self.choice()
        return moved

    def _load_from_state_dict(self, *given: Any) -> None:
        self.chosen = None
        super()._load_from_state_dict(*given)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the kernel, whose weight is in a layout that cannot be copied."""
        state = {**super().__getstate__(), "chosen": None, "_added": None}
        return {name: value for name, value in state.items() if name not in ("_arguments", "_check", "_shift")}


_LOOKUP = "aten::embedding"
