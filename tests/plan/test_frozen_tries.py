"""Frozen proxies that are restored and frozen again: equal, bit for bit, to those that are built anew."""

from __future__ import annotations

import random
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calibrated import make_calibrated
from helpers import ConvNet, Mlp, Snapshot, assert_same
from torch import Tensor, nn
from tries import seen, without

from quantizer.errors import ProxyError
from quantizer.plan.apply import FrozenTries, frozen_proxy
from quantizer.plan.site_plan import Plan, with_fallback


class _Stateful(nn.Module):
    """A net with state of every kind that a pass can change: buffer, tensor, number, list and object."""

    class Memory:
        """An object that a pass writes into."""

        def __init__(self) -> None:
            self.calls: list[int] = []

    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp(16)
        self.memory = self.Memory()
        self.also = [self.memory]
        self.counts = self.same_counts = [0]
        self.kept = torch.zeros(16)
        self.register_buffer("total", torch.zeros(16))
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.memory.calls.append(self.count)
        self.kept += x.detach().mean((0, 1))
        self.total.add_(x.detach().mean((0, 1)))
        self.counts[0] += 1
        assert self.also[0] is self.memory, "what was one object stays one"
        assert self.same_counts is self.counts, "what was one list stays one"
        return self.body(x) + self.kept + self.total + len(self.memory.calls)


def _cast(proxy: nn.Module) -> None:
    proxy.half()


def _train(proxy: nn.Module) -> None:
    proxy.train()
    with torch.no_grad():
        proxy(torch.randn(2, 5, 16))


def _rewire(proxy: nn.Module) -> None:
    proxy.body = nn.Identity()  # type: ignore[assignment]
    proxy.register_forward_hook(lambda module, args, output: output * 0)
    proxy.memory.calls.extend([7, 7])  # type: ignore[union-attr]


def _overwrite(proxy: nn.Module) -> None:
    with torch.no_grad():
        for value in proxy.state_dict().values():
            value.zero_()


def _stateful() -> tuple[nn.Module, Plan, Tensor]:
    torch.manual_seed(3)
    model, x = _Stateful().eval(), torch.randn(2, 5, 16)
    return model, make_calibrated(model, [x], backend="openvino").plan, x


@pytest.mark.parametrize("harm", [_cast, _train, _rewire, _overwrite])
def test_nothing_is_left_of_what_was_done_with_a_proxy(harm: Callable[[nn.Module], None]) -> None:
    model, plan, x = _stateful()
    tries, choice = FrozenTries(model), random.Random(1)
    before = Snapshot.of(model)
    for share in (0.0, 0.5, 0.0):
        tried = without(plan, choice, share)
        harm(tries.of(tried))
        assert_same(seen(tries.of(tried), x), seen(frozen_proxy(model, tried), x))
    before.assert_unchanged(model)


def test_a_proxy_that_is_kept_is_left_alone() -> None:
    model, plan, x = _stateful()
    tries = FrozenTries(model)
    kept = tries.of(plan)
    parts = tries.of(with_fallback(plan, {"body.up.forward.linear_0": "tried"})).body
    assert next(kept.buffers()) is not next(tries.of(plan).buffers())
    assert_same(kept(x), frozen_proxy(model, plan)(x))
    assert tries.of(plan).body is not parts


def test_a_proxy_that_nobody_keeps_is_used_again() -> None:
    model, plan, _ = _stateful()
    tries = FrozenTries(model)
    proxy = weakref.ref(tries.of(plan))
    assert tries.of(plan) is proxy()


def test_changed_weights_are_not_computed_with() -> None:
    model = ConvNet().eval()
    x = torch.randn(2, 3, 16, 16)
    plan = make_calibrated(model, [x], backend="openvino").plan
    tries = FrozenTries(model)
    tries.of(plan)
    with torch.no_grad():
        model.body.weight[0] += 1
    assert_same(seen(tries.of(plan), x), seen(frozen_proxy(model, plan), x))
    model.stem.weight = nn.Parameter(model.stem.weight * 2)
    assert_same(seen(tries.of(plan), x), seen(frozen_proxy(model, plan), x))
    model.head.weight.data.mul_(-1)
    assert_same(seen(tries.of(plan), x), seen(frozen_proxy(model, plan), x))


def test_a_part_that_got_another_name_is_built_anew() -> None:
    model, x = nn.Sequential(OrderedDict(first=nn.Linear(8, 8))).eval(), torch.randn(4, 8)
    tries = FrozenTries(model)
    tries.of(make_calibrated(model, [x], backend="openvino").plan)
    model.second = model._modules.pop("first")
    plan = make_calibrated(model, [x], backend="openvino").plan
    assert_same(seen(tries.of(plan), x), seen(frozen_proxy(model, plan), x))


def test_a_plan_that_fails_does_not_end_a_search() -> None:
    model, x = Mlp().eval(), torch.randn(3, 32)
    plan = make_calibrated(model, [x], backend="openvino").plan
    tries = FrozenTries(model)
    for _ in range(2):
        with pytest.raises(ProxyError, match="belongs to another model"):
            tries.of({path: plan[path] for path in list(plan)[1:]})
        assert_same(seen(tries.of(plan), x), seen(frozen_proxy(model, plan), x))


class _CopiesItself(Mlp):
    """A model that says itself how it is copied."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "copied": True}


def test_a_model_with_a_copy_of_its_own_is_built_anew() -> None:
    model, x = _CopiesItself().eval(), torch.randn(3, 32)
    plan = make_calibrated(model, [x], backend="openvino").plan
    tries = FrozenTries(model)
    first = tries.of(plan)
    assert_same(seen(first, x), seen(frozen_proxy(model, plan), x))
    references = weakref.ref(first)
    del first
    assert tries.of(plan) is not references()
