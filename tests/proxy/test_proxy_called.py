"""Products that are called through attributes, items and partials: the reason says what hides them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from quantizer import Quantizer

MULTIPLY = partial(torch.matmul)
CATALOGUE = "the operation is not in the catalogue"
TEXT = "source that cannot be rewritten"


class Net(nn.Module):
    """A linear of its own behind a product that ``call`` makes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(32, 32))
        self.last = nn.Linear(32, 32)
        self.projected = partial(functional.linear, weight=self.weight)
        self.nested = partial(partial(functional.linear), weight=self.weight)
        self.multiply = torch.matmul
        self.mm = torch.matmul  # the name of another operation
        self.attend = partial(functional.scaled_dot_product_attention, is_causal=True)
        self.table: dict[str, Callable[..., Tensor]] = {"multiply": torch.matmul}

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.call(x))

    def call(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class OfAttribute(Net):
    def call(self, x: Tensor) -> Tensor:
        return self.projected(x)


class OfNested(Net):
    def call(self, x: Tensor) -> Tensor:
        return self.nested(input=x)


class OfGlobal(Net):
    def call(self, x: Tensor) -> Tensor:
        return MULTIPLY(x, self.weight)


class OfLocal(Net):
    def call(self, x: Tensor) -> Tensor:
        projected = partial(functional.linear, weight=self.weight)
        return projected(x)


class AtOnce(Net):
    def call(self, x: Tensor) -> Tensor:
        return partial(functional.linear, weight=self.weight)(x)


class OfAttention(Net):
    def call(self, x: Tensor) -> Tensor:
        return self.attend(x, x, x)


class Held(Net):
    def call(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.weight)


class HeldAsAnother(Net):
    def call(self, x: Tensor) -> Tensor:
        return self.mm(x, self.weight)


class Item(Net):
    def call(self, x: Tensor) -> Tensor:
        return self.table["multiply"](x, self.weight)


class Local(Net):
    def call(self, x: Tensor) -> Tensor:
        multiply = torch.matmul
        return multiply(x, self.weight)


class ByName(Net):
    def call(self, x: Tensor) -> Tensor:
        return getattr(functional, "linear")(x, self.weight)  # noqa: B009 - what is tested


class Unknown(Net):
    def call(self, x: Tensor) -> Tensor:
        return next(map(partial(functional.linear, weight=self.weight), [x]))


class Operator(Net):
    def call(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        return torch.ops.aten._addmm_activation(rows.new_zeros(rows.shape[1]), rows, self.weight).view_as(x)


@pytest.mark.parametrize(
    ("model", "reason", "detail"),
    [
        (OfAttribute, TEXT, "call: self.projected is a functools.partial of linear"),
        (OfNested, TEXT, "call: self.nested is a functools.partial of linear"),
        (OfGlobal, TEXT, "call: MULTIPLY is a functools.partial of matmul"),
        (OfLocal, TEXT, "call: projected is a functools.partial of linear"),
        (AtOnce, TEXT, "is a functools.partial of linear"),
        (OfAttention, TEXT, "call: self.attend is a functools.partial of scaled_dot_product_attention"),
        (Held, TEXT, "call: self.multiply is an attribute that holds matmul"),
        (HeldAsAnother, TEXT, "call: self.mm is an attribute that holds matmul"),
        (Item, TEXT, "call: self.table['multiply'] is an expression that gives matmul"),
        (Local, TEXT, "call: multiply is a local name for matmul"),
        (ByName, TEXT, "is an expression that gives linear"),
        (Unknown, TEXT, "call: next: what that calls is known only when it runs"),
        (Operator, CATALOGUE, "call: torch.ops.aten._addmm_activation"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_the_reason_says_what_hides_the_product(model: Any, reason: str, detail: str) -> None:
    net, x = model().eval(), torch.randn(4, 6, 32)
    q = Quantizer(preset="plain", backend="openvino")
    with torch.no_grad():
        assert torch.equal(q.calib(net)(x), net(x))
    (escaped, *others) = q.coverage.escaped
    assert (escaped.reason, detail in escaped.detail) == (reason, True), escaped
    assert all(other.reason == escaped.reason for other in others)
    assert {row.name: row.quantized for row in q.coverage.rows} == {"last.forward.linear_0": True}
