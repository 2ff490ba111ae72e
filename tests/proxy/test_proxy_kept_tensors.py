"""Tensors kept elsewhere than in parameters and buffers: they are weights, and a frozen proxy has its own."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from quantizer import Quantizer
from quantizer.errors import ProxyError
from quantizer.proxy import kept_tensors, model_sharing


class Helper:
    """An object of the user's that is no module."""

    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def project(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


def _closure(weight: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: functional.linear(x, weight[0] if isinstance(weight, list) else weight)


def _default(weight: Tensor) -> Callable[[Tensor], Tensor]:
    def project(x: Tensor, weight: Tensor = weight) -> Tensor:
        return functional.linear(x, weight)

    return project


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "partial": lambda w: functools.partial(functional.linear, weight=w),
    "partial of a partial": lambda w: functools.partial(functools.partial(functional.linear, weight=w)),
    "closure": _closure,
    "closure over a list": lambda w: _closure([w]),
    "default": _default,
    "bound method": lambda w: Helper(w).project,
    "partial of a method": lambda w: functools.partial(Helper(w).project),
}

HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "list": lambda w: [w],
    "tuple": lambda w: (w,),
    "nested": lambda w: [({0: w},)],
    "data": lambda w: w.data,
    "data in a list": lambda w: [w.data],
    "detached": lambda w: w.detach(),
    "object": Helper,
    "namespace": lambda w: SimpleNamespace(inside=Helper(w)),
}


def _taken(holder: Any) -> Tensor:
    while not isinstance(holder, Tensor):
        holder = getattr(holder, "inside", holder)
        holder = holder.weight if isinstance(holder, Helper) else holder[0]
    return holder


class Kept(nn.Module):
    """A model whose weight is read through what it keeps, alone or beside the module that has registered it."""

    def __init__(self, make: Callable[[Tensor], Any], width: int, *, registered: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(32, width, bias=False) if registered else None
        self.tensor = nn.Linear(32, width, bias=False).weight.detach() if self.linear is None else None
        self.kept = make(self.tensor if self.linear is None else self.linear.weight)
        self.tensor = None

    def forward(self, x: Tensor) -> Tensor:
        return self.kept(x) if callable(self.kept) else x @ _taken(self.kept).t()


def _calibrated(model: nn.Module, data: list[Tensor]) -> Quantizer:
    q = Quantizer(backend="openvino", preset="plain")
    q.calibrate(model, data, progress=False)
    return q


@pytest.mark.parametrize("width", [32, 4096], ids=["small", "large"])
@pytest.mark.parametrize("how", HOLDERS)
def test_a_parameter_is_the_weight_wherever_it_is_kept(how: str, width: int) -> None:
    torch.manual_seed(0)
    model, data = Kept(HOLDERS[how], width).eval(), [torch.randn(32, 32)]
    q = _calibrated(model, data)
    operands = q.plan["forward.matmul_0"].operands
    assert {operand.name: operand.parameter for operand in operands}["rhs"] == "linear.weight"
    frozen = q.quantize(model)
    first = frozen(data[0])
    torch.testing.assert_close(first, model(data[0]), rtol=0.1, atol=0.1)
    with torch.no_grad():
        model.linear.weight.mul_(3)
    if width == 4096:
        # A large one is shared, and the proxy says that it has changed.
        with pytest.raises(ProxyError, match=r"linear\.weight changed since quantize"):
            frozen(data[0])
    else:
        assert torch.equal(frozen(data[0]), first)


@pytest.mark.parametrize("width", [32, 4096], ids=["small", "large"])
@pytest.mark.parametrize("how", FUNCTIONS)
def test_a_frozen_proxy_does_not_follow_a_weight_that_a_function_holds(how: str, width: int) -> None:
    torch.manual_seed(0)
    model, x = Kept(FUNCTIONS[how], width).eval(), torch.randn(32, 32)
    frozen = _calibrated(model, [x]).quantize(model)
    first = frozen(x)
    torch.testing.assert_close(first, model(x), rtol=0.1, atol=0.1)
    with torch.no_grad():
        model.linear.weight.mul_(3)
    if width == 4096:
        with pytest.raises(ProxyError, match=r"linear\.weight changed since quantize"):
            frozen(x)
    else:
        assert torch.equal(frozen(x), first)
    torch.testing.assert_close(model(x), functional.linear(x, model.linear.weight))


@pytest.mark.parametrize("how", FUNCTIONS)
def test_nor_a_tensor_that_nobody_registered(how: str) -> None:
    torch.manual_seed(0)
    x, held = torch.randn(32, 32), []
    model = Kept(lambda w: FUNCTIONS[how](held.append(w) or w), 32, registered=False).eval()
    frozen = _calibrated(model, [x]).quantize(model)
    first, right = frozen(x), model(x)
    held[0].mul_(3)
    assert torch.equal(frozen(x), first)
    torch.testing.assert_close(model(x), 3 * right)


def test_a_cast_of_a_proxy_takes_along_what_is_kept_in_lists() -> None:
    torch.manual_seed(0)
    model = Kept(lambda w: [w], 32).eval()
    proxy = Quantizer(backend="openvino", preset="plain").proxy(model).double()
    assert proxy(torch.randn(4, 32).double()).dtype is torch.float64
    assert model.linear.weight.dtype is model.kept[0].dtype is torch.float32
    assert model.kept[0] is model.linear.weight


class _Read(nn.Module):
    """A module that keeps an object and reads another one through a function."""

    def __init__(self, held: Any, read: Any) -> None:
        super().__init__()
        self.held, self.project = held, functools.partial(max, read)
        self.linear = nn.Linear(2, 2)


@pytest.mark.parametrize("has_tensor", [False, True], ids=["numbers", "a tensor"])
def test_an_object_that_modules_share_is_looked_through_once(has_tensor: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    visits: Counter[int] = Counter()
    parts = kept_tensors._parts

    def counted(value: Any) -> list[Any]:
        visits[id(value)] += 1
        return parts(value)

    def most(modules: int) -> int:
        tensor = [torch.ones(2)] if has_tensor else []
        # The last of a list is looked at first.
        held, read = ([*tensor, *([number] for number in range(20))] for _ in range(2))
        model = nn.ModuleList(_Read(SimpleNamespace(inside=held), read) for _ in range(modules))
        visits.clear()
        model_sharing._take_own(list(model.modules()))
        return max(visits[id(one)] for one in (held, read, *held[1:], *read[1:]))

    monkeypatch.setattr(kept_tensors, "_parts", counted)
    assert most(40) == most(2)
