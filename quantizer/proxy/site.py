"""Sites and places: modules that the rewritten source calls in place of operations.

A site is a call of a quantizable operation. A place is a call of an operation after a convolution that an engine fuses
with it, such as an activation function. A place has no quantized operands. If a target runs a convolution in integers
only with a quantized result, the place has a site for its result.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quantizer.errors import ProxyError
from quantizer.numerics import torch_operators as ops
from quantizer.numerics.formats import UINT8
from quantizer.proxy.call_numbers import count_call, current_call
from quantizer.proxy.eager_attention import attention, observed_probabilities
from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.rewrite.operations import Operand, Operation, in_graphs, operation
from quantizer.rewrite.source_sites import SiteSource

OUTPUT = "output"
"""The operation, and the name, of a site for the result of another call."""


class ObservedPass(Protocol):
    """An observed pass of a proxy, which receives each call of a site or place."""

    def before(self, site: Site, values: list[Any], inside: Callable[[], Tensor], ends: Tensor | None = None) -> None:
        """Receive the operands in the catalogue's order, None for missing ones; ``inside`` computes one more.

        ``ends`` are the ends of the groups of rows, for an operation with groups.
        """

    def after(self, site: Site, result: Any) -> None:
        """Receive the result of the float operation."""

    def enter(self, place: Place, values: list[Any]) -> None:
        """Receive the tensors of a call of a place, before the call."""


class Observer(Protocol):
    """Observer of the passes of a proxy."""

    def pass_of(self, call: SourceCall) -> ObservedPass | None:
        """Return the pass of a call; None if a part of the model runs alone, which is not a batch."""


class CallOverride(Protocol):
    """A function that makes a site's calls, to compare results with other ranges."""

    def __call__(self, site: Site, function: Callable[..., Any], args: list[Any], keywords: dict[str, Any]) -> Any:
        """Return the float result of ``function(*args, **keywords)``."""


def _call_method(name: str, value: Any, /, *args: Any, **keywords: Any) -> Any:
    return getattr(value, name)(*args, **keywords)


def _same(value: Tensor) -> Tensor:
    return value


_MAX_NORM = 3
"""Position of ``max_norm`` among the arguments of a lookup."""

_FORMS: dict[tuple[str, str], Callable[..., Any]] = {
    ("operator", "matmul"): operator.matmul,
    ("operator", "add"): operator.add,
    ("operator", "mul"): operator.mul,
    ("inplace", "matmul"): operator.imatmul,
    ("inplace", "add"): operator.iadd,
    ("inplace", "mul"): operator.imul,
}


class SourceCall(nn.Module):
    """A module that the rewritten source calls in place of an operation, outside of the user's model.

    Attributes:
        source: the operation's position in the source.
        path: its name: the path of the host module and the name in the source.
        observer: receives each call; None: no observer.
    """

    def __init__(self, source: SiteSource, path: str) -> None:
        super().__init__()
        self.source = source
        self.path = path
        self.observer: Observer | None = None
        self._implied = None if source.form == "call" else _implied(source, self.operation)

    @property
    def host_path(self) -> str:
        """The path of the module whose code makes the call; empty for the root."""
        return self.path.removesuffix(self.source.name).rstrip(".")

    @property
    def operation(self) -> Operation:
        return operation(self.source.operation)

    def _function_of(self, args: tuple[Any, ...]) -> tuple[Callable[..., Any], list[Any]]:
        if self._implied is not None:
            return self._implied, list(args)
        function, *function_args = args
        return function, function_args

    def extra_repr(self) -> str:
        return f"{self.source.operation}, line {self.source.line}"

    def __getstate__(self) -> dict[str, Any]:
        """Drop the observer, which copies and pickles do not have."""
        return {**super().__getstate__(), "observer": None}  # type: ignore[no-untyped-call]


class Site(SourceCall):
    """A module that the rewritten source calls in place of a quantizable operation, and that calls the operation.

    While all quantizers are off, it calls the original function with the original arguments.

    Attributes:
        judge: makes each call instead of the site; None: the site does.
        active: whether at least one operand is rounded.
        counts_calls: whether its calls are counted, because some operand has ranges of single calls.
        frozen: whether its weights are stored as integers, so that the site cannot be trained.
        quantizers: the names of its operand quantizers, which are child modules, in the catalogue's order.
        bias_shift: float [C], added to the bias of each call with rounded operands, or [N, C] with one per call of a
            pass; None: no shift.
    """

    def __init__(self, source: SiteSource, path: str) -> None:
        super().__init__(source, path)
        self.judge: CallOverride | None = None
        self.active = False
        self.counts_calls = False
        self.frozen = False
        entry = operation(source.operation)
        # As in NVIDIA's toolkit, names end in _input_quantizer and _weight_quantizer.
        self.quantizers = tuple(_quantizer_name(operand.name) for operand in entry.operands)
        for name in self.quantizers:
            self.add_module(name, OperandQuantizer())
        # An operand without an argument is computed inside. To round it, the call is split into matrix multiplications.
        self._fused = any(operand.index is None for operand in entry.operands)
        self._in_graphs = in_graphs(entry)
        self.register_buffer("bias_shift", None)
        self.bias_shift: Tensor | None

    def quantizer(self, index: int) -> OperandQuantizer:
        quantizer = self._modules[self.quantizers[index]]
        assert isinstance(quantizer, OperandQuantizer)
        return quantizer

    def quantizer_of(self, operand: str) -> OperandQuantizer:
        """Return the quantizer of the operand called ``operand``."""
        return self.quantizer([entry.name for entry in self.operation.operands].index(operand))

    def reset(self) -> None:
        """Turn the site off, and remove the ranges of its operands and the shift of its bias."""
        self.active, self.counts_calls, self.bias_shift = False, False, None
        for index in range(len(self.quantizers)):
            self.quantizer(index).reset()

    def shift_of(self, call: int | None) -> Tensor | None:
        """Return the shift of the bias in a call, float [C], by the number of the call in its pass."""
        shift = self.bias_shift
        if shift is None or shift.dim() == 1:
            return shift
        return shift[call] if call is not None and 0 <= call < len(shift) else None

    def bias_of(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Return the bias among the arguments of a call; None without one."""
        bias = self.operation.bias
        place = None if bias is None else _place(bias, args, keywords)
        return None if place is None else place[0][place[1]]

    @property
    def holds_shift(self) -> bool:
        """True if calls without a bias may get one: engines add the bias of a convolution for free."""
        return self.operation.kind == "conv"

    def argument(self, index: int, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Return the argument of a call for an operand; None if missing."""
        operand = self.operation.operands[index]
        assert operand.index is not None
        return args[operand.index] if operand.index < len(args) else keywords.get(operand.keyword or "")

    def forward(self, *args: Any, **keywords: Any) -> Any:
        result = self._call(*args, **keywords)
        output = self._modules.get(OUTPUT)
        if output is None:
            return result
        assert isinstance(output, Site)
        rounded = output.of_result(result)
        if rounded is result or not self.source.in_place:
            return rounded
        return result.copy_(rounded)

    def of_result(self, result: Any) -> Any:
        """Return the result of another call, rounded if this site is on."""
        return self._call(_same, result) if isinstance(result, Tensor) else result

    def _call(self, *args: Any, **keywords: Any) -> Any:
        function, function_args = self._function_of(args)
        if self._in_graphs is not None and torch.compiler.is_compiling():
            function = self._in_graphs
        if self.counts_calls or self.judge is not None:
            count_call(self.path)
        if self.active:
            return self._active(function, function_args, keywords)
        if self.judge is not None:
            return self.judge(self, function, function_args, keywords)
        observed = None if self.observer is None else self.observer.pass_of(self)
        if observed is None:
            return function(*function_args, **keywords)
        inside = partial(observed_probabilities, function_args, keywords)
        observed.before(self, self._operands(function_args, keywords), inside, self._ends(function_args, keywords))
        result = function(*function_args, **keywords)
        observed.after(self, result)
        return result

    def rounded(self, function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Return the result with all enabled operands rounded; tensors of the caller do not change."""
        if self._fused:
            names = (operand.name for operand in self.operation.operands)
            return attention({name: self.quantizer_of(name) for name in names}, *args, **keywords)
        if self.operation.kind == "embedding" and (rows := self._rows(function, args, keywords)) is not None:
            return rows
        args, keywords = list(args), dict(keywords)
        target = args[0] if self.source.in_place else None
        self._round(args, keywords)
        if target is not None and args[0] is target:
            args[0] = target.clone()
        return function(*args, **keywords)

    def _active(self, function: Callable[..., Any], args: list[Any], keywords: dict[str, Any]) -> Any:
        self.refuse_training()
        if not self.source.in_place:
            return self.rounded(function, args, keywords)
        target = args[0]
        self._round(args, keywords, copy_learned=torch.is_grad_enabled())
        if args[0] is not target and self.operation.name == "add":
            # The sum must be written to the caller's tensor, not to its rounded copy.
            return target.copy_(torch.add(*args, **keywords))
        return function(*args, **keywords)

    def refuse_training(self) -> None:
        """Raise if the site is frozen and called in train mode with gradients."""
        if self.frozen and self.training and torch.is_grad_enabled():
            raise ProxyError(
                f"{self.path}: this model is frozen with integer weights and cannot be trained: train the proxy of "
                "qat(model), then call quantize(model) again; to run the frozen model, call eval() first"
            )

    def _rows(self, function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]) -> Tensor | None:
        """Return the result of a lookup from only the rows that it reads; None if the complete table is needed."""
        ids = args[0] if args else keywords.get("input")
        limited = (args[_MAX_NORM] if len(args) > _MAX_NORM else keywords.get("max_norm")) is not None
        if limited or not isinstance(ids, Tensor) or ids.is_nested:
            return None
        return self.quantizer(0).rows(self.argument(0, args, keywords), ids, partial(function, *args, **keywords))

    def _operands(self, args: list[Any], keywords: dict[str, Any]) -> list[Any]:
        return [
            self.argument(place, args, keywords)
            for place, operand in enumerate(self.operation.operands)
            if operand.index is not None
        ]

    def _ends(self, args: list[Any], keywords: dict[str, Any]) -> Any:
        """Return the ends of the groups of rows; None if the operation or the call has no groups."""
        grouped = self.operation.grouped
        place = None if grouped is None else _place(grouped, args, keywords)
        return None if place is None else place[0][place[1]]

    def _round(self, args: list[Any], keywords: dict[str, Any], copy_learned: bool = False) -> None:
        """Replace the operands in ``args`` and ``keywords`` by the outputs of their quantizers.

        With ``copy_learned``, operands with learned scales are copied first, because backward needs their values and
        the call overwrites one.
        """
        for position, operand in enumerate(self.operation.operands):
            quantizer = self.quantizer(position)
            place = _place(operand, args, keywords)
            if place is not None:
                holder, key = place
                needed = copy_learned and quantizer.change is not None and isinstance(holder[key], Tensor)
                holder[key] = quantizer(holder[key].clone() if needed else holder[key])
        bias, shift = self.operation.bias, self.shift_of(current_call(self.path))
        if bias is None or shift is None:
            return
        place = _place(bias, args, keywords)
        if place is not None and isinstance(place[0][place[1]], Tensor):
            holder, key = place
            holder[key] = holder[key] + shift.to(holder[key])
        elif self.holds_shift:
            added = shift.to(self.argument(0, args, keywords))
            if place is None:
                keywords["bias"] = added
            else:
                place[0][place[1]] = added

    def __getstate__(self) -> dict[str, Any]:
        """Drop the override, which copies and pickles do not have."""
        return {**super().__getstate__(), "judge": None}


def _place(operand: Operand, args: Any, keywords: Any) -> tuple[Any, Any] | None:
    """Return the container of an operand's argument and its index or name in it; None if the call has none."""
    if operand.index is not None and operand.index < len(args):
        return args, operand.index
    return (keywords, operand.keyword) if operand.keyword is not None and operand.keyword in keywords else None


def _implied(source: SiteSource, entry: Operation) -> Callable[..., Any]:
    return partial(_call_method, source.called) if source.form == "method" else _FORMS[source.form, entry.name]


def _quantizer_name(operand: str) -> str:
    return f"_{operand}_quantizer" if operand in ("input", "weight") else f"_{operand}_input_quantizer"


def move_beside_parameters(site: Site, proxy: nn.Module) -> None:
    """Move the scales of a site to the device of its module's parameters, or of the nearest module around with any.

    A loaded plan is on the CPU, and so are scales that training changed.
    """
    path = site.host_path
    nearest = next(proxy.get_submodule(path).parameters(), None)
    while nearest is None and path:
        path = path.rpartition(".")[0]
        nearest = next(proxy.get_submodule(path).parameters(), None)
    if nearest is None or nearest.is_meta:
        return
    # Moving nothing takes longer than all other steps of a plan.
    if any(tensor.device != nearest.device for tensor in (*site.parameters(), *site.buffers())):
        site.to(nearest.device)


class Place(SourceCall):
    """A module that the rewritten source calls in place of an operation without quantized operands."""

    @property
    def result_site(self) -> Site | None:
        """The site of the result; None without one."""
        site = self._modules.get(OUTPUT)
        assert site is None or isinstance(site, Site)
        return site

    def forward(self, *args: Any, **keywords: Any) -> Any:
        function, function_args = self._function_of(args)
        output = self.result_site
        if output is None:
            return function(*function_args, **keywords)
        observed = None if self.observer is None else self.observer.pass_of(self)
        if observed is not None:
            observed.enter(self, function_args)
        result = self._computed(output, function, function_args, keywords)
        rounded = output.of_result(result)
        if rounded is result or not self.source.in_place:
            return rounded
        return result.copy_(rounded)

    def _computed(self, output: Site, function: Callable[..., Any], args: list[Any], keywords: dict[str, Any]) -> Any:
        gate = _GATES.get(self.source.operation)
        if gate is None or not output.active or not output.quantizer(0).enabled:
            return function(*args, **keywords)
        # An engine multiplies the integers of both.
        x, *flags = [*args, *keywords.values()]
        result = x * _rounded_gate(gate(x))
        return x.copy_(result) if any(flags) else result


_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.sigmoid,
    "hardswish": nn.functional.hardsigmoid,
    "mish": lambda x: torch.tanh(nn.functional.softplus(x)),
}
"""Activation functions that multiply x by a gate from 0 to 1, with the function that computes the gate."""


def _rounded_gate(x: Tensor) -> Tensor:
    """Return x [*], from 0 to 1, rounded to 255 levels."""
    scale = torch.tensor(1 / UINT8.qmax, dtype=torch.float32, device=x.device)
    zero_point = torch.zeros((), dtype=torch.uint8, device=x.device)
    rounded: Tensor = ops.fake_quantize(x, scale, UINT8.name, None, None, zero_point)
    return rounded


def add_output_sites(proxy: nn.Module, paths: Collection[str] | None = None) -> None:
    """Add a site for the result to the convolutions, adds and places of a proxy that have none.

    ``paths`` are the names of the sites to add; None: all.
    """
    for module in list(proxy.modules()):
        if not isinstance(module, SourceCall) or OUTPUT in module._modules:
            continue
        if not isinstance(module, Place) and module.operation.kind not in ("conv", "residual_add"):
            continue
        if paths is not None and f"{module.path}.{OUTPUT}" not in paths:
            continue
        name = f"{module.source.name}.{OUTPUT}"
        file, line = module.source.file, module.source.line
        source = SiteSource(name=name, operation=OUTPUT, form="call", file=file, line=line)
        site = Site(source, f"{module.path}.{OUTPUT}")
        site.train(module.training)
        module.add_module(OUTPUT, site)
