"""What the parameters of a frozen model say: its type, its device, its size."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import assert_same
from torch import Tensor, nn

from quantizer import Quantizer

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Casts(nn.Module):
    """Computes in the type of its first parameter, and has none but what is stored."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16, bias=False)
        self.rest = nn.Sequential(nn.ReLU(), nn.Linear(16, 8, bias=False))

    @property
    def dtype(self) -> torch.dtype:
        """The type of the first floating parameter, as models of libraries ask for it."""
        return next(param.dtype for param in self.parameters() if param.is_floating_point())

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(next(self.parameters()).dtype)
        x = self.first(x).to(self.dtype).to(next(iter(self.rest[1].parameters())).device)
        return self.rest(x).to(next(self.rest.parameters()).dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_that_asks_its_parameters_for_their_type(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Casts().eval().to(dtype)
    q = Quantizer(preset="plain", backend="openvino")
    with torch.no_grad():
        q.calibrate(model, [X])
        frozen: Any = q.quantize(model)
        expected = frozen(X)
        assert expected.dtype == dtype
        assert_same(q.qat(model).eval()(X), expected)
        for other in (copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen))):
            assert_same(other(X), expected)
        torch._dynamo.reset()
        assert_same(torch.compile(frozen, backend="eager")(X), expected)
    assert [p.shape for p in frozen.parameters()] == [p.shape for p in model.parameters()]
    assert {p.dtype for p in frozen.parameters()} == {dtype}
    assert frozen.dtype == dtype
    assert str(type(frozen)) == str(type(model))


def test_what_is_listed_is_what_is_computed_with_and_cannot_be_trained() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4, bias=False)).eval()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [X])
    frozen: Any = q.quantize(model)
    listed, named = list(frozen.parameters()), dict(frozen.named_parameters())
    assert [p.shape for p in listed] == [p.shape for p in model.parameters()]
    assert_same(listed[0], frozen[0].weight)
    assert not listed[0].requires_grad
    assert "0.weight" not in named
    assert "0.weight" not in frozen.state_dict()
    assert set(named) == {"0.bias", "1.weight", "1.bias"}
    assert all(any(p is other for other in listed) for p in named.values())
    assert next(frozen[0].parameters(recurse=False)).shape == (8, 8)
    assert [*itertools.islice(frozen[1].parameters(), 2)] == [frozen[1].weight, frozen[1].bias]


class Scaled(nn.Module):
    """Lists its parameter to nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        yield from ()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_a_part_without_stored_weights_lists_what_it_did() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Scaled()).eval()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [X])
    assert list(q.quantize(model)[1].parameters()) == []


def test_an_asymmetric_or_tied_weight_is_listed_as_often_as_in_the_model() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(16, 8)
            self.head = nn.Linear(8, 16, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.table(ids))

    model = Tied().eval()
    q = Quantizer(preset="plain", backend="openvino")
    ids = torch.arange(8)[None]
    q.calibrate(model, [ids])
    frozen = q.quantize(model)
    assert len(list(frozen.parameters())) == len(list(model.parameters())) == 1
