"""A site: one call of a quantizable operation, as a child of the module whose code makes it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from functools import partial
from typing import Any
from typing import Protocol

import torch
from torch import Tensor
from torch import nn

from quantizer.errors import ProxyError
from quantizer.operations.catalogue import Operation
from quantizer.operations.catalogue import operation
from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.proxy.split_attention import attention
from quantizer.proxy.split_attention import observed_probabilities
from quantizer.rewrite.find_sites import SiteSource

__all__ = ["CallOverride", "Observer", "Site"]


class Observer(Protocol):
    """A listener to each call of a site while a proxy observes."""

    def before(self, site: Site, values: list[Any], inside: Callable[[], Tensor]) -> None:
        """Take the operands, in the catalogue's order, None where one is missing; ``inside`` computes one more."""

    def after(self, site: Site, result: Any) -> None:
        """Take the result of the float operation."""


class CallOverride(Protocol):
    """An override of a site's calls, to see what they would give with other ranges."""

    def __call__(self, site: Site, function: Callable[..., Any], args: list[Any], keywords: dict[str, Any]) -> Any:
        """Return the float result of ``function(*args, **keywords)``."""


def _call_method(name: str, value: Any, /, *args: Any, **keywords: Any) -> Any:
    return getattr(value, name)(*args, **keywords)


_FORMS: dict[tuple[str, str], Callable[..., Any]] = {
    ("operator", "matmul"): operator.matmul,
    ("operator", "add"): operator.add,
    ("inplace", "matmul"): operator.imatmul,
    ("inplace", "add"): operator.iadd,
}


class Site(nn.Module):
    """Stands in the rewritten source where the operation stood, and calls it.

    While nothing is switched on it calls the original with the original arguments and nothing else.

    Attributes:
        source: where it stands in the source.
        path: its name: the host module's path and the source's name.
        observer: told of each call (None: nobody).
        judge: makes each call in the site's place (None: nobody does).
        active: at least one operand is rounded.
        frozen: its weights are stored, so that nothing of it can be trained.
        quantizers: names of the child modules that hold the operand quantizers, in the catalogue's order.
    """

    def __init__(self, source: SiteSource, path: str) -> None:
        super().__init__()
        self.source = source
        self.path = path
        self.observer: Observer | None = None
        self.judge: CallOverride | None = None
        self.active = False
        self.frozen = False
        entry = operation(source.operation)
        # The names that users of NVIDIA's toolkit know end in _input_quantizer and _weight_quantizer.
        self.quantizers = tuple(_quantizer_name(operand.name) for operand in entry.operands)
        for name in self.quantizers:
            self.add_module(name, OperandQuantizer())
        # An operand of its own inside: the call must be taken apart to round it.
        self._fused = any(operand.index is None for operand in entry.operands)
        self._implied = None if source.form == "call" else _implied(source, entry)

    @property
    def host_path(self) -> str:
        """The path of the module whose code makes the call; empty for the root."""
        return self.path.removesuffix(self.source.name).rstrip(".")

    @property
    def operation(self) -> Operation:
        """The catalogue's entry."""
        return operation(self.source.operation)

    def quantizer(self, index: int) -> OperandQuantizer:
        """Return the quantizer of one operand."""
        found = self._modules[self.quantizers[index]]
        assert isinstance(found, OperandQuantizer)
        return found

    def quantizer_of(self, operand: str) -> OperandQuantizer:
        """Return the quantizer of the operand called ``operand``."""
        return self.quantizer([entry.name for entry in self.operation.operands].index(operand))

    def forward(self, *args: Any, **keywords: Any) -> Any:
        if self._implied is None:
            function, *rest = args
        else:
            function, rest = self._implied, list(args)
        if self.active:
            return self._active(function, rest, keywords)
        if self.judge is not None:
            return self.judge(self, function, rest, keywords)
        if self.observer is None:
            return function(*rest, **keywords)
        self.observer.before(self, self._operands(rest, keywords), partial(observed_probabilities, rest, keywords))
        result = function(*rest, **keywords)
        self.observer.after(self, result)
        return result

    def rounded(self, function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Return the result with the operands rounded whose quantizers are on; no tensor of the caller changes."""
        if self._fused:
            names = (operand.name for operand in self.operation.operands)
            return attention({name: self.quantizer_of(name) for name in names}, *args, **keywords)
        args, keywords = list(args), dict(keywords)
        target = args[0] if self.source.in_place else None
        self._round(args, keywords)
        if target is not None and args[0] is target:
            args[0] = target.clone()
        return function(*args, **keywords)

    def _active(self, function: Callable[..., Any], args: list[Any], keywords: dict[str, Any]) -> Any:
        if self.frozen and self.training and torch.is_grad_enabled():
            raise ProxyError(
                f"{self.path}: this model is frozen, its weights are integers, and it is called in train mode with "
                "gradients: train what qat(model) gives, then call quantize(model) again; to run it, call eval() first"
            )
        if not self.source.in_place:
            return self.rounded(function, args, keywords)
        target = args[0]
        self._round(args, keywords, kept=torch.is_grad_enabled())
        if args[0] is not target and self.operation.name == "add":
            # Other names for the tensor must see the sum, and its rounded copy has no other name.
            return target.copy_(torch.add(*args, **keywords))
        return function(*args, **keywords)

    def _operands(self, args: list[Any], keywords: dict[str, Any]) -> list[Any]:
        return [
            args[index] if index < len(args) else keywords.get(operand.keyword or "")
            for operand in self.operation.operands
            if (index := operand.index) is not None
        ]

    def _round(self, args: list[Any], keywords: dict[str, Any], kept: bool = False) -> None:
        """Replace the operands in place by what their quantizers make of them.

        ``kept``: gradients of scales are computed from the operands, and the call will write into one of them.
        """
        for position, operand in enumerate(self.operation.operands):
            quantizer = self.quantizer(position)
            place: tuple[Any, Any] | None = None
            if operand.index is not None and operand.index < len(args):
                place = args, operand.index
            elif operand.keyword is not None and operand.keyword in keywords:
                place = keywords, operand.keyword
            if place is not None:
                holder, key = place
                needed = kept and quantizer.change is not None and isinstance(holder[key], Tensor)
                holder[key] = quantizer(holder[key].clone() if needed else holder[key])

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle of the site has: nobody watches it."""
        return {**super().__getstate__(), "observer": None, "judge": None}  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        return f"{self.source.operation}, line {self.source.line}"


def _implied(source: SiteSource, entry: Operation) -> Callable[..., Any]:
    return partial(_call_method, source.called) if source.form == "method" else _FORMS[source.form, entry.name]


def _quantizer_name(operand: str) -> str:
    return f"_{operand}_quantizer" if operand in ("input", "weight") else f"_{operand}_input_quantizer"
