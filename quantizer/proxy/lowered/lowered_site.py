"""A site that computes with a kernel of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.errors import ProxyError
from quantizer.proxy.call_numbers import count_call, next_call
from quantizer.proxy.lowered.calls import CALLS
from quantizer.proxy.lowered.choose import FLOATS, Lowering, choose
from quantizer.proxy.lowered.kernels import Kernel, LazyWeight
from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.proxy.site import Site


class LoweredSite(Site):
    """A frozen site that calls a kernel where there is one, and rounds as before where there is none.

    Attributes:
        lowering: what the choice of the kernel depends on.
        chosen: the kernel, or why there is none; None: it has to be chosen anew, after a copy or a load.
        by_call: the kernels of the calls of a pass that have ranges of their own; empty: all calls have one range.
    """

    lowering: Lowering
    chosen: Kernel | str | None
    by_call: list[Kernel]
    _arguments: Callable[..., Any]
    _check: Callable[[Tensor], None] | None
    _looks_up: bool
    _type: torch.dtype
    _added: tuple[Tensor, Tensor, Tensor] | None

    @staticmethod
    def of(site: Site, lowering: Lowering) -> None:
        """Turn a frozen site into a lowered one."""
        site.__class__ = LoweredSite
        assert isinstance(site, LoweredSite)
        site.lowering, site.chosen, site.by_call, site._added = lowering, None, [], None
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
                held = self.quantizer_of(call.weight)
                frozen = held.frozen
                number = 0 if call.activation is None else len(self.quantizer_of(call.activation).calls)
                self.by_call = self.chosen.of_calls(number)
                self._looks_up, self._type = call.activation is None, held.stored_dtype
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
        number = next_call(self.path) if self.counts_calls else None
        if number is not None and number < len(self.by_call):
            kernel = self.by_call[number]
        rest = args[1:] if self._implied is None else args
        given = self._arguments(*rest, **keywords)
        if given is not None:
            x, weight, bias, window = given
            if self._check is not None:
                self._check(weight)
            out = self._type_of_result(x)
            if out is not None and x.numel():
                result = self._computed(kernel, x, bias, self.shift_of(number), window, out)
                if result is not None:
                    if self.counts_calls:
                        count_call(self.path)
                    needed = torch.is_grad_enabled() and x.requires_grad and not torch.compiler.is_compiling()
                    # Only made here, so that it is no view, which the model could not change in place.
                    return _WithoutGradient.of(x, result, self.path) if needed else result
        return super().forward(*args, **keywords)

    def _type_of_result(self, x: Tensor) -> torch.dtype | None:
        """Return the type that the float operation would return, that of autocast where it is on; None: no kernel."""
        if not x.is_floating_point():
            return self._type if self._looks_up else None
        if self._looks_up or x.dtype not in FLOATS:
            return None
        device = x.device.type
        if torch.is_autocast_enabled(device):
            made = torch.get_autocast_dtype(device)
            return made if made in FLOATS else None
        return x.dtype if x.dtype is self._type else None

    def _computed(
        self, kernel: Kernel, x: Tensor, bias: Any, shift: Tensor | None, window: Any, out: torch.dtype
    ) -> Any:
        """Return the result; None if the kernel cannot make this call. A bias of another shape is added after it."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._computed(kernel, x, bias, shift, window, out)
        bias = self._shifted(bias, shift)
        if not self._looks_up:
            x = x.float()
        if bias is None:
            return kernel(x, None, window, out)
        if isinstance(bias, Tensor) and bias.dim() == 1 and bias.dtype in FLOATS:
            return kernel(x, bias.float(), window, out)
        result = kernel(x, None, window, torch.float32)
        return None if result is None else (result + bias).to(out)

    def _shifted(self, bias: Any, shift: Tensor | None) -> Any:
        """Return the bias with a shift; the sum with a parameter, which is frozen, is kept."""
        if shift is None:
            return bias
        if bias is None:
            return shift.float() if self.holds_shift else None
        if self._added is not None and self._added[0] is bias and self._added[1] is shift:
            return self._added[2]
        total = bias + shift.to(bias)
        if isinstance(bias, nn.Parameter) and not torch.compiler.is_compiling():
            self._added = bias, shift, total
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
        state = {**super().__getstate__(), "chosen": None, "by_call": [], "_added": None}
        return {name: value for name, value in state.items() if name not in _CHOSEN}


class _WithoutGradient(torch.autograd.Function):
    """The result of a kernel, which says on the way back that the kernel has no gradient."""

    @classmethod
    def of(cls, x: Tensor, result: Tensor, path: str) -> Tensor:
        """Return the result of a site that computed it from x."""
        made: Tensor = cls.apply(x, lambda: result, path)  # type: ignore[no-untyped-call]
        return made

    @staticmethod
    def forward(ctx: Any, x: Tensor, made: Callable[[], Tensor], path: str) -> Tensor:
        ctx.path = path
        return made()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise ProxyError(
            f"{ctx.path}: a gradient is asked of a lowered model, whose integer kernels have none; use what "
            "quantize(model) gives, which rounds alike and has gradients, or exclude the sites that it passes"
        )


_CHOSEN = ("_arguments", "_check", "_looks_up", "_type")
"""What the choice of a kernel sets."""
