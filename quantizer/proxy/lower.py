"""Lowered proxies: the choice of a torch kernel for each frozen site, and the sites that call the kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.errors import ProxyError
from quantizer.numerics.formats import qtype
from quantizer.numerics.weight_codes import spend_deprecation_warning
from quantizer.proxy.build import sites_of
from quantizer.proxy.call_numbers import count_call, next_call
from quantizer.proxy.integer_kernels import (
    Activation,
    IntegerConvolution,
    IntegerLinear,
    IntegerMatmul,
    Kernel,
    LazyWeight,
    ScaledMatmul,
    TableLookup,
    Window,
)
from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.proxy.site import OUTPUT, Site
from quantizer.proxy.triton_linear import TritonLinear
from quantizer.utils.cpu import has_vnni
from quantizer.utils.display import Rows

# ruff: noqa: A002 - the names of torch's arguments


Arguments = tuple[Any, Any, Any, Window] | None
"""Activation, weight, bias or None, and window; None for a call that no kernel supports."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """An operation that kernels compute.

    Attributes:
        activation: the operand that is quantized at each call; None for an operation without one.
        weight: the operand that is stored.
        channels: the axis of the weight that becomes the channels of the result.
        arguments: sorts the arguments of a call.
    """

    activation: str | None
    weight: str
    channels: int
    arguments: Callable[..., Arguments]


def _linear(input: Any, weight: Any, bias: Any = None) -> Arguments:
    return input, weight, bias, ()


def _matmul(input: Any, other: Any, *, out: Any = None) -> Arguments:
    return None if out is not None else (input, other, None, ())


def _mm(input: Any, mat2: Any, *, out: Any = None) -> Arguments:
    return None if out is not None else (input, mat2, None, ())


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1, out: Any = None) -> Arguments:
    return None if out is not None or beta != 1 or alpha != 1 else (mat1, mat2, input, ())


def _convolution(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: Any = 1
) -> Arguments:
    return input, weight, bias, (stride, padding, dilation, groups)


def _embedding(
    input: Any,
    weight: Any,
    padding_idx: Any = None,
    max_norm: Any = None,
    norm_type: Any = 2.0,
    scale_grad_by_freq: Any = False,
    sparse: Any = False,
) -> Arguments:
    return None if max_norm is not None else (input, weight, None, ())


CALLS: dict[str, Call] = {
    "linear": Call(activation="input", weight="weight", channels=0, arguments=_linear),
    "matmul": Call(activation="lhs", weight="rhs", channels=1, arguments=_matmul),
    "mm": Call(activation="lhs", weight="rhs", channels=1, arguments=_mm),
    "addmm": Call(activation="lhs", weight="rhs", channels=1, arguments=_addmm),
    "conv1d": Call(activation="input", weight="weight", channels=0, arguments=_convolution),
    "conv2d": Call(activation="input", weight="weight", channels=0, arguments=_convolution),
    "embedding": Call(activation=None, weight="weight", channels=0, arguments=_embedding),
}
"""The supported operations by their names in the catalogue."""


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Float types that kernels take and return; they compute their float part in float32."""

_CPU, _GPU = "cpu", "cuda"
_SPATIAL = {"conv1d": 1, "conv2d": 2}


@dataclass(frozen=True, slots=True)
class Lowering:
    """Settings of the choice of kernels.

    Attributes:
        widest: the largest integer of a weight that this CPU multiplies without saturating; None: any.
        kernels: ``cpu`` or ``cuda``; None: the device of the weight.
        triton: on a GPU, Triton's kernels for linear layers with ranges from calibration.
    """

    widest: int | None = None
    kernels: str | None = None
    triton: bool = False


def choose(site: Site, lowering: Lowering) -> Kernel | str:
    """Return the kernel of a site, or the reason why it keeps the simulated rounding."""
    call = CALLS.get(site.source.operation)
    if call is None:
        return f"torch has no integer kernel for {site.source.operation}"
    if site.source.in_place:
        return "it writes into its operand"
    weight = site.quantizer_of(call.weight)
    if weight.stored is None:
        return "no kernel multiplies two activations" if call.channels else "its weight is not quantized"
    axes = weight.stored.dim() - 2
    if axes != _SPATIAL.get(site.source.operation, 0):
        return f"no kernel supports a weight with {axes + 2} axes"
    scales = _scales(weight, call)
    if scales is None:
        return f"no kernel supports weights in {weight.dtype} with these scales"
    if weight.stored_dtype not in FLOATS:
        return f"no kernel returns {str(weight.stored_dtype).removeprefix('torch.')}, the type of the weight"
    if call.activation is None:
        is_int8 = qtype(weight.dtype).storage is torch.int8
        return TableLookup(weight.stored, scales) if is_int8 else f"no lookup supports {weight.dtype}"
    activation = site.quantizer_of(call.activation)
    reason = _unfit(activation, weight.stored.shape[1 - call.channels])
    return reason if reason is not None else _product(call, weight, scales, activation, lowering)


def _scales(weight: OperandQuantizer, call: Call) -> Tensor | None:
    """Return one scale per output channel; None if the weight has another granularity."""
    assert weight.stored is not None
    assert weight.scale is not None
    channels = weight.stored.shape[call.channels]
    if weight.block_size is not None:
        return None
    if weight.axis is None:
        return weight.scale.detach().float().reshape(1).expand(channels).contiguous()
    along = weight.axis % weight.stored.dim() == call.channels
    return weight.scale.detach().float().reshape(channels).contiguous() if along else None


def _unfit(activation: OperandQuantizer, k: int) -> str | None:
    """Return why no kernel supports an activation; None if one may."""
    if not activation.enabled or (activation.scale is None and not activation.dynamic):
        return "only its weight is quantized"
    kind = qtype(activation.dtype)
    if kind.bits < 8 * kind.storage.itemsize:
        return f"no kernel supports activations in {activation.dtype}"
    if activation.axis is not None:
        return "its activation has one scale per channel"
    if activation.dynamic and activation.block_size not in (None, k):
        return f"its activation has one range per {activation.block_size} values, but a kernel sums {k} values"
    return None


def _product(
    call: Call, weight: OperandQuantizer, scales: Tensor, activation: OperandQuantizer, lowering: Lowering
) -> Kernel | str:
    assert weight.stored is not None
    device = lowering.kernels or weight.stored.device.type
    weights, values = qtype(weight.dtype), qtype(activation.dtype)
    if weights.is_float != values.is_float:
        return f"no kernel multiplies {activation.dtype} by {weight.dtype}"
    spatial = weight.stored.dim() - 2
    codes = (weight.stored if call.channels == 0 else weight.stored.t()).contiguous()
    if device == _GPU:
        if spatial:
            return "torch has no integer convolution on a GPU"
        if lowering.triton and not activation.dynamic:
            return TritonLinear(codes, scales, Activation(activation, codes.device))
        return (ScaledMatmul if weights.is_float else IntegerMatmul)(
            codes, scales, Activation(activation, codes.device)
        )
    if device != _CPU:
        return f"torch has no integer kernels on {device}"
    if weights.is_float:
        return f"CPUs have no kernels for {weight.dtype}; move the model to a GPU with compute capability 8.9 or later"
    if not torch._C._has_mkldnn:
        return "this torch was built without oneDNN"
    if lowering.widest is not None and int(codes.int().abs().max()) > lowering.widest:
        return "this CPU adds products of bytes in 16 bits, which saturate"
    if spatial and activation.dynamic and activation.block_size is not None:
        return "its activation has one range per row"
    return (IntegerConvolution if spatial else IntegerLinear)(codes, scales, Activation(activation))


class LoweredSite(Site):
    """A frozen site that calls a kernel if there is one, and otherwise rounds as before.

    Attributes:
        lowering: the settings of the choice.
        chosen: the kernel, or why there is none; None: to be chosen again, after a copy or a load.
        by_call: the kernels of calls with their own ranges; empty: all calls share one range.
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
        """Return the kernel for the current device of the weight, or why there is none."""
        if self.chosen is None:
            self.chosen, self._added = choose(self, self.lowering), None
            if not isinstance(self.chosen, str):
                call = CALLS[self.source.operation]
                weight = self.quantizer_of(call.weight)
                frozen = weight.frozen
                number = 0 if call.activation is None else len(self.quantizer_of(call.activation).calls)
                self.by_call = self.chosen.of_calls(number)
                self._looks_up, self._type = call.activation is None, weight.stored_dtype
                self._arguments, self._check = call.arguments, None if frozen is None else frozen.check
        return self.chosen

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        # A site has no hooks. torch's search for them takes as long as the quantization of a token.
        return self.forward(*args, **keywords)

    def forward(self, *args: Any, **keywords: Any) -> Any:
        kernel = self.chosen or self.choice()
        if isinstance(kernel, str):
            return super().forward(*args, **keywords)
        self.refuse_training()
        number = next_call(self.path) if self.counts_calls else None
        if number is not None and number < len(self.by_call):
            kernel = self.by_call[number]
        call_args = args[1:] if self._implied is None else args
        sorted_arguments = self._arguments(*call_args, **keywords)
        if sorted_arguments is not None:
            x, weight, bias, window = sorted_arguments
            if self._check is not None:
                self._check(weight)
            out = self._type_of_result(x)
            if out is not None and x.numel():
                result = self._computed(kernel, x, bias, self.shift_of(number), window, out)
                if result is not None:
                    if self.counts_calls:
                        count_call(self.path)
                    needed = torch.is_grad_enabled() and x.requires_grad and not torch.compiler.is_compiling()
                    # Made by the function itself, so that it is not a view, which the model could not change in place.
                    return _WithoutGradient.of(x, result, self.path) if needed else result
        return super().forward(*args, **keywords)

    def _type_of_result(self, x: Tensor) -> torch.dtype | None:
        """Return the type that the float operation would return, with autocast; None if no kernel supports it."""
        if not x.is_floating_point():
            return self._type if self._looks_up else None
        if self._looks_up or x.dtype not in FLOATS:
            return None
        device = x.device.type
        if torch.is_autocast_enabled(device):
            autocast_type = torch.get_autocast_dtype(device)
            return autocast_type if autocast_type in FLOATS else None
        return x.dtype if x.dtype is self._type else None

    def _computed(
        self, kernel: Kernel, x: Tensor, bias: Any, shift: Tensor | None, window: Any, out: torch.dtype
    ) -> Any:
        """Return the result, with a bias of another shape added after the kernel; None for unsupported calls."""
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
        """Return the bias with a shift; the sum is cached for a parameter, which cannot change."""
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
        quantizer = self._modules.get(f"_{operand}_quantizer")
        # A fast path, because each read of a module's weight calls this.
        return quantizer if isinstance(quantizer, OperandQuantizer) else super().quantizer_of(operand)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.chosen = None
        moved = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Choose now, because torch.compile may make the first call, and cannot make a kernel in its graph.
        self.choice()
        return moved

    def _load_from_state_dict(self, *args: Any) -> None:
        self.chosen = None
        super()._load_from_state_dict(*args)

    def __getstate__(self) -> dict[str, Any]:
        """Drop the kernel, because its packed weight cannot be copied."""
        state = {**super().__getstate__(), "chosen": None, "by_call": [], "_added": None}
        return {name: value for name, value in state.items() if name not in _CHOSEN}


class _WithoutGradient(torch.autograd.Function):
    """The result of a kernel, which raises in the backward pass because the kernel has no gradient."""

    @classmethod
    def of(cls, x: Tensor, result: Tensor, path: str) -> Tensor:
        wrapped: Tensor = cls.apply(x, lambda: result, path)  # type: ignore[no-untyped-call]
        return wrapped

    @staticmethod
    def forward(ctx: Any, x: Tensor, made: Callable[[], Tensor], path: str) -> Tensor:
        ctx.path = path
        return made()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise ProxyError(
            f"{ctx.path}: integer kernels of a lowered model have no gradients; use the model of quantize(model), "
            "which rounds the same and has gradients, or exclude these sites"
        )


_CHOSEN = ("_arguments", "_check", "_looks_up", "_type")
"""Attributes that the choice of a kernel sets."""


_MARK = "_quantizer_lowered"


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteKernel:
    """The kernel of a quantized site of a lowered proxy, or the reason for a missing one.

    Attributes:
        name: the site.
        operation: the operation that it calls.
        kernel: the integer operator of torch; None: its operands are rounded, and it computes in float.
        reason: why there is no kernel; empty if there is one.
    """

    name: str
    operation: str
    kernel: str | None
    reason: str


class Kernels(Rows[SiteKernel]):
    """The quantized sites of a lowered model, with the kernel of each."""

    look = "kernels"


def lower(proxy: nn.Module, lowering: Lowering) -> nn.Module:
    """Make the sites of a frozen proxy compute with torch's integer kernels, in place, and return the proxy."""
    spend_deprecation_warning()
    vars(proxy)[_MARK] = True
    _need_no_gradients(proxy)
    for site in sites_of(proxy):
        if site.active:
            LoweredSite.of(site, lowering)
    return proxy


@contextmanager
def with_kernels(weights: Iterable[tuple[Site, OperandQuantizer, Tensor]]) -> Iterator[None]:
    """Compute active sites of a proxy by integer kernels in the block, where there are any.

    The results are those of simulated rounding up to the order of float sums, in half the time.

    Args:
        weights: site, quantizer and float value of each quantized weight of the proxy.
    """
    if not has_vnni():
        # Without these instructions, products of bytes are not exact, or no faster than float.
        yield
        return
    spend_deprecation_warning()
    with ExitStack() as restored:
        for site, quantizer, weight in weights:
            call = CALLS.get(site.source.operation)
            # Simulated lookups round only the rows that they read. A result with an output site is rounded as well.
            multiplies = call is not None and call.activation is not None and OUTPUT not in site._modules
            if site.active and multiplies and weight.device.type == _CPU:
                restored.callback(_simulated, site, quantizer)
                quantizer.store(weight)
                LoweredSite.of(site, Lowering())
        yield


def _simulated(site: Site, quantizer: OperandQuantizer) -> None:
    """Turn a lowered site into one that simulates rounding, and its weight into a float one."""
    site.__class__, quantizer.stored = Site, None
    for name in ("lowering", "chosen", "by_call", "_added", *_CHOSEN):
        vars(site).pop(name, None)


def _need_no_gradients(proxy: nn.Module) -> None:
    """Replace parameters by ones without gradients, so that only inputs of the model can require them.

    The new parameters share the memory of the user's model, whose ``requires_grad`` does not change.
    """
    # With the parameter itself, so that its id stays valid.
    fixed: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in proxy.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                if id(parameter) not in fixed:
                    fixed[id(parameter)] = parameter, nn.Parameter(parameter.detach(), requires_grad=False)
                module._parameters[name] = fixed[id(parameter)][1]
    for site in sites_of(proxy):
        for place in range(len(site.operation.operands)):
            frozen = site.quantizer(place).frozen
            if frozen is not None:
                frozen.follow(fixed)


def is_lowered(model: nn.Module) -> bool:
    """Return whether a model is a lowered proxy, or a copy of one."""
    return _MARK in vars(model)


def kernels_of(lowered: nn.Module) -> list[SiteKernel]:
    """Return the kernel of each quantized site, or the reason for a missing one."""
    if not is_lowered(lowered):
        raise ProxyError("kernels() expects the model that lower() returned")
    entries = []
    for site in sites_of(lowered):
        if isinstance(site, LoweredSite):
            choice = site.choice()
            kernel, reason = (None, choice) if isinstance(choice, str) else (choice.name, "")
            entry = SiteKernel(name=site.path, operation=site.source.operation, kernel=kernel, reason=reason)
            entries.append(entry)
    return entries
