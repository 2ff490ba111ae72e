"""What the measure ``gradient`` keeps for its backward pass, and that keeping less changes none of its figures."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calibrated import make_calibrated
from helpers import Mlp
from torch import Tensor, nn

from quantizer.algorithms.sensitivity.gradient import RepeatedCalls

_WIDTH = 16


class _Attention(nn.Module):
    """A block: attention over [rows, length, 16], its scores [rows, length, length]."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.mlp = Mlp(_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.matmul(self.query(x), self.key(x).transpose(-1, -2))
        return self.mlp(x + torch.matmul(scores.softmax(-1), x))


class _Counting(_Attention):
    """A block whose second call gives something else."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class _Overwriting(_Attention):
    """A block that changes its input in place, which no product of its own needs for a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x * 1)
        x.mul_(2)
        return result


class _Named(nn.Module):
    """Blocks one after another whose paths have no number, so that none is repeated."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.ModuleDict({"a": block(), "b": block(), "c": block()})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.inner.values():
            x = layer(x)
        return x


class _Numbered(_Named):
    """The same blocks with numbers in their paths."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__(block)
        self.inner = nn.ModuleDict({str(number): layer for number, layer in enumerate(self.inner.values())})


def _errors(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], list[bool]]:
    """The errors of a model's groups in its order, and whether the calls of each backward pass could be repeated."""
    held: list[bool] = []
    leave = RepeatedCalls.__exit__

    def noted(self: RepeatedCalls, *error: Any) -> bool:
        ended = leave(self, *error)
        held.append(self.held)
        return ended

    with monkeypatch.context() as patch:
        patch.setattr(RepeatedCalls, "__exit__", noted)
        batches = [torch.randn(2, 5, _WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
        quantizer = make_calibrated(model, [batch.clone() for batch in batches], backend="openvino")
        amp = quantizer.amp(model)
        for batch in batches:
            amp(batch.clone())
    ranking = sorted(quantizer.sensitivity.rows, key=lambda entry: entry.position)
    return [entry.error for entry in ranking], held


@pytest.mark.parametrize(
    ("block", "repeats"), [(_Attention, True), (_Counting, False), (_Overwriting, False)], ids=lambda value: str(value)
)
def test_repeated_blocks_change_no_error(
    block: Callable[[], nn.Module], repeats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbered, held = _errors(_Numbered(block).eval(), monkeypatch)
    named, _ = _errors(_Named(block).eval(), monkeypatch)
    assert numbered == named
    assert min(numbered) > 0
    assert held == [repeats, repeats]


class _Layer(nn.Module):
    """A layer that makes a tensor which its gradient needs, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.inner: weakref.ref[Tensor] | None = None

    def forward(self, x: Tensor, cache: object = None) -> Tensor:
        self.calls += 1
        made = x.exp()
        self.inner = weakref.ref(made)
        return made.sin() + x

    def fails_when_repeated(self, x: Tensor) -> Tensor:
        if self.calls > 0:
            raise KeyError("a cache that the first call emptied")
        return _Layer.forward(self, x)


def test_what_a_block_makes_inside_is_not_kept() -> None:
    layer, x = _Layer(), torch.randn(4, requires_grad=True)
    expected = torch.autograd.grad(_Layer()(x).sum(), x)[0]
    with RepeatedCalls([layer]) as calls:
        output = layer(x).sum()
        gc.collect()
        assert layer.inner is not None
        assert layer.inner() is None
        assert torch.equal(torch.autograd.grad(output, x)[0], expected)
    assert calls.held
    assert layer.calls == 2
    assert "forward" not in vars(layer)


def test_a_call_with_an_object_is_not_repeated() -> None:
    layer, x = _Layer(), torch.randn(4, requires_grad=True)
    with RepeatedCalls([layer]) as calls:
        torch.autograd.grad(layer(x, cache=[object()]).sum(), x)
    assert calls.held
    assert layer.calls == 1


def test_an_error_of_a_repeated_call_ends_the_block() -> None:
    layer, x = _Layer(), torch.randn(4, requires_grad=True)
    vars(layer)["forward"] = own = layer.fails_when_repeated
    with RepeatedCalls([layer]) as calls:
        torch.autograd.grad(layer(x).sum(), x)
    assert not calls.held
    assert vars(layer)["forward"] is own, "a forward that the model keeps is there again"


def test_an_error_of_a_first_call_is_the_users() -> None:
    layer = _Layer()
    with pytest.raises(AttributeError, match="exp"), RepeatedCalls([layer]):
        layer(3)
    assert "forward" not in vars(layer)
