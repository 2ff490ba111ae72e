"""What a proxy shares with the user's model, and what it must never touch."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import ARCHITECTURES, ConvNet, Mlp, Snapshot, assert_same, batch, tiny
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.errors import CalibrationError, ProxyError
from quantizer.plan.reasons import ReasonCode

pytest.importorskip("transformers", reason="these tests make transformers models: install enginequant[hf]")


def _settled(architecture: str = "bert", attention: str = "sdpa") -> nn.Module:
    """A model that ran once: transformers adds hooks of its own at the first run."""
    model = tiny(architecture, attention)
    with torch.no_grad():
        model(**batch(architecture), output_hidden_states=True)
    return model


# -- the user's model ----------------------------------------------------------------------------------------------


@pytest.mark.promise("Your model is never changed: same classes, same state dict, same outputs.")
@pytest.mark.parametrize("architecture", ["bert-classification", "mpnet", "vit"])
def test_every_call_leaves_the_model_as_it_was(architecture: str) -> None:
    model = _settled(architecture, "eager")
    inputs = batch(architecture, padded=True)
    before = Snapshot.of(model)
    with torch.no_grad():
        expected = model(**inputs)
        q = Quantizer(preset="plain", exclude={"sites": ["**.matmul_1"]})
        for step in (
            lambda: q.proxy(model)(**inputs),
            lambda: q.inspect(model),
            lambda: q.calibrate(model, [inputs]),
            lambda: q.calibrate(model, [inputs], resume=True),
            lambda: q.fallback(_ran(q.amp(model), inputs), num=1),
            lambda: q.quantize(model)(**inputs),
            lambda: (q.coverage, q.ranges, q.sensitivity, q.plan),
            lambda: q.diff(model),
            q.clear_fallback,
        ):
            step()
            before.assert_unchanged(model)
            assert_same(model(**inputs), expected)


def _ran(proxy: nn.Module, inputs: dict[str, Tensor]) -> nn.Module:
    proxy(**inputs)
    return proxy


def test_a_model_that_never_ran_gets_no_hooks_from_its_proxies() -> None:
    model = tiny("bert")
    inputs = batch("bert")
    before = Snapshot.of(model)
    q = Quantizer(preset="plain")
    with torch.no_grad():
        q.proxy(model)(**inputs, output_hidden_states=True, output_attentions=True)
        q.calib(model)(**inputs, output_hidden_states=True)
        q.quantize(model)(**inputs, output_hidden_states=True)
    before.assert_unchanged(model)


class _Fails(nn.Module):
    """Raises when asked to, in the middle of a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Mlp()
        self.second = Mlp()
        self.trap = _Trap()

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        return self.second(self.trap(self.first(x), fail))


class _Trap(nn.Module):
    def forward(self, x: Tensor, fail: bool) -> Tensor:
        if fail:
            raise ZeroDivisionError("in the middle")
        return x


@pytest.mark.parametrize("kind", ["proxy", "calib", "amp", "quantize"])
def test_an_exception_in_the_middle_of_a_pass(kind: str) -> None:
    model = _Fails().eval()
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

    model = _Fails().eval()
    calib = Quantizer(preset="plain").calib(model)
    for x in (torch.randn(4, 32), torch.full((4, 32), torch.nan), torch.randn(4, 5)):
        with pytest.raises((ZeroDivisionError, CalibrationError, RuntimeError), match=r"in the middle|NaN|shapes"):
            calib(x, fail=True)
        assert _get_current_dispatch_mode() is None


@pytest.mark.parametrize("change", ["half", "double", "to_dtype", "bfloat16"])
@pytest.mark.parametrize("kind", ["proxy", "calib", "amp", "quantize"])
def test_casting_a_proxy_leaves_the_model(kind: str, change: str) -> None:
    model = ConvNet().eval()
    x = torch.randn(2, 3, 16, 16)
    q = Quantizer(preset="plain")
    q.calibrate(model, [x])
    before = Snapshot.of(model)
    expected = model(x)
    proxy = getattr(q, kind)(model)
    cast: Callable[[nn.Module], nn.Module] = {
        "half": lambda m: m.half(),
        "double": lambda m: m.double(),
        "to_dtype": lambda m: m.to(torch.float64),
        "bfloat16": lambda m: m.bfloat16(),
    }[change]
    assert cast(proxy) is proxy
    assert next(proxy.parameters()).dtype != torch.float32
    before.assert_unchanged(model)
    assert_same(model(x), expected)


def test_casting_a_submodule_of_a_proxy_leaves_the_model() -> None:
    """A submodule taken out of a proxy and cast must not reach the model either."""
    model = Mlp()
    proxy = Quantizer(preset="plain").proxy(model)
    before = Snapshot.of(model)
    proxy.up.half()
    before.assert_unchanged(model)


def test_a_half_proxy_computes_what_a_half_model_does() -> None:
    model = tiny("bert", "eager")
    inputs = batch("bert", padded=True)
    proxy = Quantizer(preset="plain").proxy(model).half()
    assert_same(proxy(**inputs), tiny("bert", "eager").half()(**inputs))


def test_tied_weights_stay_tied_after_a_cast() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(20, 32)
            self.head = nn.Linear(32, 20, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embedding(ids))

    model = Tied()
    proxy: Any = Quantizer(preset="plain").proxy(model)
    assert proxy.head.weight is model.embedding.weight
    proxy.double()
    assert proxy.head.weight is proxy.embedding.weight
    assert proxy.head.weight is not model.embedding.weight
    assert model.head.weight.dtype == torch.float32


def test_an_off_proxy_shares_parameters_and_sees_training() -> None:
    model = Mlp()
    proxy: Any = Quantizer(preset="plain").proxy(model)
    assert [id(p) for p in proxy.parameters()] == [id(p) for p in model.parameters()]
    x = torch.randn(4, 32)
    with torch.no_grad():
        model.up.weight.mul_(2)
    assert_same(proxy(x), model(x))


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


# -- how a proxy presents itself -----------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_proxy_is_called_as_its_model(architecture: str) -> None:
    model = tiny(architecture)
    q = Quantizer(preset="plain")
    q.calibrate(model, [batch(architecture)])
    for proxy in (q.proxy(model), q.calib(model, resume=True), q.quantize(model)):
        assert str(type(proxy)) == str(type(model))
        assert isinstance(proxy, type(model))
        for name, module in model.named_modules():
            assert str(type(proxy.get_submodule(name))) == str(type(module))
            assert isinstance(proxy.get_submodule(name), type(module))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_state_dict_keys_of_an_off_proxy(architecture: str) -> None:
    model = tiny(architecture)
    proxy = Quantizer(preset="plain").proxy(model)
    assert list(proxy.state_dict()) == list(model.state_dict())
    assert [name for name, _ in proxy.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert_same(dict(proxy.state_dict()), dict(model.state_dict()))
    proxy.load_state_dict(model.state_dict())


@pytest.mark.parametrize("kind", ["proxy", "calib", "amp", "quantize"])
def test_a_proxy_of_a_proxy_is_an_error(kind: str) -> None:
    model = Mlp()
    q = Quantizer(preset="plain")
    q.calibrate(model, [torch.randn(4, 32)])
    for proxy in (q.proxy(model), q.calib(model, resume=True), q.quantize(model)):
        with pytest.raises(ProxyError, match="proxy already; pass the float model"):
            getattr(q, kind)(proxy)
        with pytest.raises(ProxyError, match="proxy already; pass the float model"):
            getattr(Quantizer(preset="plain"), "proxy" if kind != "calib" else "calib")(proxy)


@pytest.mark.parametrize("kind", ["proxy", "calib"])
def test_no_module_is_an_error(kind: str) -> None:
    with pytest.raises(ProxyError, match=r"torch\.nn\.Module is needed, got dict"):
        getattr(Quantizer(preset="plain"), kind)({})


# -- copies --------------------------------------------------------------------------------------------------------


def _pickled(model: nn.Module) -> nn.Module:
    copied: nn.Module = pickle.loads(pickle.dumps(model))
    return copied


def _torch_saved(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copied: nn.Module = torch.load(buffer, weights_only=False)
    return copied


@pytest.mark.parametrize("duplicate", [copy.deepcopy, _pickled, _torch_saved], ids=["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("kind", ["proxy", "quantize"])
@pytest.mark.parametrize("architecture", ["bert-classification", "vit"])
def test_copies_of_a_proxy(architecture: str, kind: str, duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model = tiny(architecture)
    inputs = batch(architecture, padded=True)
    q = Quantizer(preset="plain", sites={"residual_add": True})
    q.calibrate(model, [inputs])
    proxy = getattr(q, kind)(model)
    with torch.no_grad():
        expected = proxy(**inputs)
        copied = duplicate(proxy)
        assert_same(copied(**inputs), expected)
        assert str(type(copied)) == str(type(model))
        assert_same(copied(**inputs, output_hidden_states=True), proxy(**inputs, output_hidden_states=True))
        assert not {id(p) for p in copied.parameters()} & {id(p) for p in model.parameters()}
        with pytest.raises(ProxyError, match="proxy already"):
            Quantizer(preset="plain").proxy(copied)
        before = Snapshot.of(model)
        copied.half()
        before.assert_unchanged(model)


def test_a_shallow_copy_of_a_proxys_layer_runs() -> None:
    model = Mlp()
    proxy: Any = Quantizer(preset="plain").proxy(model)
    x = torch.randn(4, 32)
    assert_same(copy.copy(proxy.up)(x), model.up(x))


def test_an_attribute_with_a_sites_name_is_an_error() -> None:
    model = Mlp()
    model.up.site_forward_linear_0 = "mine"  # type: ignore[assignment]
    with pytest.raises(ProxyError, match=r"site_forward_linear_0.*rename it"):
        Quantizer(preset="plain").proxy(model)


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


class ResidualSequential(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x) + self[-1](self[0](x)) + sum(layer(x) for layer in self[1:])


class ResidualList(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = x + layer(x)
        for place in range(len(self)):
            x = x + self[place](x)
        return x


class ResidualDict(nn.ModuleDict):
    def forward(self, x: Tensor) -> Tensor:
        for name, layer in self.items():
            x = x + layer(x) + self[name](x)
        for layer in self.values():
            x = x + layer(x)
        for name in self:
            x = x + self[name](x)
        return x * len(self) * len(list(self.keys()))


class ResidualChildren(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = x + layer(x)
        return x


def _layers() -> list[nn.Module]:
    return [nn.Linear(32, 32), nn.Linear(32, 32)]


CONTAINERS = [
    pytest.param(lambda: ResidualSequential(*_layers()), id="sequential"),
    pytest.param(lambda: ResidualList(_layers()), id="list"),
    pytest.param(lambda: ResidualDict(zip("ab", _layers(), strict=True)), id="dict"),
    pytest.param(ResidualChildren, id="children"),
]


@pytest.mark.parametrize("make", CONTAINERS)
def test_containers_with_sites_of_their_own(make: Callable[[], nn.Module]) -> None:
    model = make().eval()
    x = torch.randn(20, 32)
    q = Quantizer(preset="plain", sites={"residual_add": True})
    with torch.no_grad():
        assert_same(q.proxy(model)(x), model(x))
        q.calibrate(model, [x])
        assert {row.kind for row in q.coverage.quantized} == {"linear", "residual_add"}
        q.quantize(model)(x)


def test_a_model_that_cannot_be_copied() -> None:
    import threading

    model = Mlp()
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(ProxyError, match=r"this Mlp cannot be copied.*lock.*__deepcopy__"):
        Quantizer(preset="plain").proxy(model)


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
    class Unregistered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = [nn.Parameter(torch.randn(32, 32))]

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weights[0]

    model = Unregistered().eval()
    x = torch.randn(20, 32)
    q = Quantizer(preset="plain")
    q.calibrate(model, [x])
    assert q.coverage[0].reason == "the weight is a parameter that no module of the model has registered"
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
