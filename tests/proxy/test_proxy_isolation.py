"""What a proxy shares with the user's model, and what it must never touch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import Mlp, Snapshot, assert_same, batch, tiny
from torch import Tensor, nn
from toy_nets import net

from quantizer import Quantizer
from quantizer.errors import CalibrationError
from quantizer.plan.reasons import ReasonCode

pytest.importorskip("transformers", reason="these tests make transformers models: install enginequant[hf]")


# -- the user's model ----------------------------------------------------------------------------------------------


def _ran(proxy: nn.Module, inputs: dict[str, Tensor]) -> nn.Module:
    proxy(**inputs)
    return proxy


def _fails() -> nn.Module:
    """Raises when asked to, in the middle of a forward pass."""
    return net("self.second(self.trap(self.first(x), fail))", "x, fail=False", first=Mlp(), second=Mlp(), trap=_Trap())


class _Trap(nn.Module):
    def forward(self, x: Tensor, fail: bool) -> Tensor:
        if fail:
            raise ZeroDivisionError("in the middle")
        return x


@pytest.mark.parametrize("kind", ["proxy", "calib", "amp", "quantize"])
def test_an_exception_in_the_middle_of_a_pass(kind: str) -> None:
    model = _fails().eval()
    x = torch.randn(4, 32)
    before = Snapshot.of(model)
    with torch.no_grad():
        expected = model(x)
        q = Quantizer(preset="plain")
        q.calibrate(model, [x])
        frozen = q.quantize(model)(x)
        proxy = getattr(q, kind)(model)
        with pytest.raises(ZeroDivisionError, match="in the middle"):
            proxy(x, fail=True)
        before.assert_unchanged(model)
        assert_same(model(x), expected)
        # The proxy is usable afterwards, and the failed pass left nothing behind that changes later ones.
        assert_same(proxy(x), frozen if kind == "quantize" else expected)
        if kind == "calib":
            q.calibrate(model, [x])
        assert_same(q.quantize(model)(x), frozen)


def test_no_dispatch_mode_is_left_after_a_failed_pass() -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    model = _fails().eval()
    calib = Quantizer(preset="plain").calib(model)
    for x in (torch.randn(4, 32), torch.full((4, 32), torch.nan), torch.randn(4, 5)):
        with pytest.raises((ZeroDivisionError, CalibrationError, RuntimeError), match=r"in the middle|NaN|shapes"):
            calib(x, fail=True)
        assert _get_current_dispatch_mode() is None


def test_changing_a_proxys_config_leaves_the_models() -> None:
    model: Any = tiny("bert", "sdpa")
    proxy: Any = Quantizer(preset="plain").proxy(model)
    proxy.config.num_labels = 17
    proxy.train()
    assert model.config.num_labels != 17
    assert not model.training


def test_the_users_config_and_rules_are_not_changed() -> None:
    rules = {"names": ["encoder.layer.0"], "module_types": ["BertPooler"]}
    kept = copy.deepcopy(rules)
    q = Quantizer(preset="plain", exclude=rules)
    config = q.config
    model = tiny("bert")
    q.calibrate(model, [batch("bert")])
    q.fallback(_ran(q.amp(model), batch("bert")), num=1)
    q.quantize(model)
    assert rules == kept
    assert q.config is config
    assert q.config == Quantizer(preset="plain", exclude=kept).config


# -- copies --------------------------------------------------------------------------------------------------------


def test_a_shallow_copy_of_a_proxys_layer_runs() -> None:
    model = Mlp()
    proxy: Any = Quantizer(preset="plain").proxy(model)
    x = torch.randn(4, 32)
    assert_same(copy.copy(proxy.up)(x), model.up(x))


# -- methods kept as attributes, classes patched between two proxies -----------------------------------------------


class Chooses(nn.Module):
    """Chooses its forward when it is made, and keeps it as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.forward = self.with_product  # type: ignore[method-assign]
        self.product = self._product

    def _product(self, x: Tensor) -> Tensor:
        return torch.matmul(x, x.transpose(-1, -2))

    def with_product(self, x: Tensor) -> Tensor:
        return self.product(self.linear(x))


@pytest.mark.parametrize("nested", [False, True])
def test_methods_kept_as_attributes(nested: bool) -> None:
    inner = Chooses().eval()
    model = nn.Sequential(inner) if nested else inner
    before = Snapshot.of(model)
    x = torch.randn(20, 32)
    q = Quantizer(preset="plain")
    q.calibrate(model, [x])
    assert {row.kind for row in q.coverage.quantized} == {"linear", "matmul"}
    assert_same(q.proxy(model)(x), model(x))
    assert not torch.equal(q.quantize(model)(x), model(x))
    before.assert_unchanged(model)
    assert inner.forward.__self__ is inner


def test_a_forward_replaced_on_one_module_is_reported() -> None:
    model = nn.Sequential(Mlp(), Mlp()).eval()
    model[0].forward = lambda x: x * 2
    x = torch.randn(8, 32)
    q = Quantizer(preset="plain")
    q.calibrate(model, [x])
    assert_same(q.proxy(model)(x), model(x))
    rows = {row.name: row.reason for row in q.coverage if row.kind == "source"}
    assert rows == {"0": ReasonCode.REPLACED_FORWARD.text()}


def test_a_class_patched_after_a_first_proxy() -> None:
    class Patched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ x.transpose(-1, -2)

    def doubled(self: nn.Module, x: Tensor) -> Tensor:
        return (x @ x.transpose(-1, -2)) * 2

    model = Patched()
    x = torch.randn(20, 32)
    assert_same(Quantizer(preset="plain").proxy(model)(x), model(x))
    Patched.forward = doubled  # type: ignore[method-assign]
    assert_same(Quantizer(preset="plain").proxy(model)(x), model(x))


def test_a_method_of_a_mixin_that_is_no_module() -> None:
    class Mixin:
        def mix(self, x: Tensor) -> Tensor:
            return x @ x.transpose(-1, -2)

    class Mixed(Mixin, nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return super().mix(x)

    model = Mixed().eval()
    x = torch.randn(20, 32)
    q = Quantizer(preset="plain")
    q.calibrate(model, [x])
    assert [row.name for row in q.coverage.quantized] == ["mix.matmul_0"]
    assert_same(q.proxy(model)(x), model(x))


# -- containers, and attributes that are hard to copy --------------------------------------------------------------


def test_a_reference_to_a_parent_is_one_in_the_proxy() -> None:
    class Child(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parents: list[nn.Module] = []

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.parents[0].weight  # type: ignore[operator]

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 32))
            self.child = Child()
            self.child.parents.append(self)

        def forward(self, x: Tensor) -> Tensor:
            return self.child(x)

    model = Parent().eval()
    x = torch.randn(20, 32)
    q = Quantizer(preset="plain")
    proxy: Any = q.proxy(model)
    assert proxy.child.parents[0] is proxy
    assert_same(proxy(x), model(x))
    q.calibrate(model, [x])
    assert [row.name for row in q.coverage.quantized] == ["child.forward.matmul_0"]
    assert not torch.equal(q.quantize(model)(x), model(x))


def test_a_parameter_that_no_module_has_registered() -> None:
    model = net("x @ self.weights[0]", weights=[nn.Parameter(torch.randn(32, 32))]).eval()
    x = torch.randn(20, 32)
    q = Quantizer(preset="plain")
    q.calibrate(model, [x])
    assert q.coverage[0].reason == "the weight is a parameter that no module of the model registers"
    assert_same(q.quantize(model)(x), model(x))


def test_under_autocast() -> None:
    model = Mlp().eval()
    x = torch.randn(20, 32)
    q = Quantizer(preset="plain")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(x)
        assert_same(q.proxy(model)(x), expected)
        assert_same(q.calib(model)(x), expected)
        assert q.quantize(model)(x).dtype == expected.dtype
