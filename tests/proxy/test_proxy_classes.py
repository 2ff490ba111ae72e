"""Generated classes: what a model's own code sees of them, containers that have sites, and threads that make them."""

from __future__ import annotations

import abc
import copy
import pickle
import sys
import threading
import types
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from class_nets import Asks, Edited, Mapping, OldSuper, Reversed, Sliced, SlicedList, Stack, Tail, Whole, X, layers
from helpers import assert_same, imported
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.proxy.build import sites_of


def _check(model: nn.Module) -> nn.Module:
    """Proxy and original agree bit for bit, also compiled; calibrated and frozen it is close. Gives the proxy."""
    model.eval()
    q = Quantizer(preset="plain", backend="openvino", sites={"residual_add": False})
    proxy = q.proxy(model)
    with torch.no_grad():
        expected = model(X)
        assert_same(proxy(X), expected)
        assert_same(model(X), expected)
        q.calibrate(model, [X])
        frozen = q.quantize(model)(X)
    assert (frozen - expected).norm() < 0.1 * expected.norm()
    return proxy


# -- containers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Sliced, SlicedList, Tail, Whole, Mapping, Reversed, Stack])
def test_a_container_with_sites_shows_its_own_children(kind: Any) -> None:
    given = {Sliced: layers, Tail: layers, Whole: layers, Stack: list}.get(kind)
    if given is not None:
        model = kind(*given())
    else:
        model = kind({str(i): x for i, x in enumerate(layers())} if kind is Mapping else layers())
    proxy = _check(model)
    assert any(isinstance(child, type(next(sites_of(proxy)))) for child in proxy._modules.values())


@pytest.mark.parametrize("how", ["insert", "append", "extend", "delete", "pop"])
@pytest.mark.parametrize("kind", ["list", "chain"])
def test_a_list_with_sites_can_be_changed(kind: str, how: str) -> None:
    model = Edited(kind, how).eval()
    proxy = Quantizer(preset="plain").proxy(model)
    with torch.no_grad():
        for _ in range(2):
            assert_same(proxy(X), model(X))
    assert [name for name, _ in model.items.named_children()] == [
        name for name in proxy.get_submodule("items")._modules if not name.startswith("site_")
    ]


def test_a_slice_is_of_the_class_as_it_was_written() -> None:
    class Again(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x + self[0](x) if len(self) == 1 else self[1:](self[0](x)) + x

    model = Again(*layers()).eval()
    proxy: Any = Quantizer(preset="plain").proxy(model)
    assert type(proxy[1:]) is Again
    with torch.no_grad():
        assert_same(proxy(X), model(X))


@pytest.mark.parametrize("model", [Sliced(*layers()), SlicedList(layers()), Whole(*layers())])
def test_copies_of_containers_see_their_own_children_too(model: nn.Module) -> None:
    proxy = Quantizer(preset="plain").proxy(model.eval())
    with torch.no_grad():
        for other in (copy.deepcopy(proxy), pickle.loads(pickle.dumps(proxy))):
            assert_same(other(X), model(X))


# -- classes -------------------------------------------------------------------------------------------------------

_TABLE: dict[str, type] = {}


class Registered(nn.Module):
    """A registry of models, as many libraries keep one."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        _TABLE[cls.__name__] = cls


class Block(Registered):
    """Is found under its name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


class Listing(abc.ABCMeta):
    """A metaclass that keeps a list."""

    made: ClassVar[list[type]] = []

    def __init__(cls, *args: Any) -> None:
        super().__init__(*args)
        Listing.made.append(cls)


class Listed(nn.Module, metaclass=Listing):
    """Its metaclass knows it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


def test_registries_hear_of_no_generated_class() -> None:
    known = list(Listing.made)
    for model in (Block(), Listed()):
        proxy = _check(model)
        assert str(type(proxy)) == str(type(model))
        assert isinstance(proxy, type(model))
        assert not isinstance(model, type(proxy))
    assert {"Block": Block} == _TABLE
    assert Listing.made == known
    assert_same(_TABLE["Block"]()(X).shape, X.shape)

    class Late(type(Quantizer(preset="plain").proxy(Block()))):  # type: ignore[misc]
        """A class of the user's own is announced, whatever it derives from."""

    assert _TABLE.pop("Late") is Late


def test_exact_classes_are_those_of_the_model() -> None:
    model = Asks()
    proxy = _check(model)
    before = Asks.count
    proxy(X)
    assert Asks.count == before + 1
    assert "count" not in vars(type(proxy))
    names = {site.path for site in sites_of(proxy)}
    assert {"scaled.matmul_0", "scaled.matmul_1", "linear.forward.linear_0"} <= names
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [X])
    quantized = {row.name for row in q.coverage.quantized}
    assert {"scaled.matmul_0", "scaled.matmul_1"} <= quantized
    assert_same(type(q.quantize(model)).__name__, "Asks")


def test_super_of_the_class_of_self_and_a_new_instance() -> None:
    torch.manual_seed(0)
    model = OldSuper().eval()
    proxy = Quantizer(preset="plain").proxy(model)
    with torch.no_grad():
        assert_same(proxy(X), model(X))


def test_exact_classes_are_those_of_the_model_when_compiled() -> None:
    model = Asks().eval()
    proxy = Quantizer(preset="plain").proxy(model)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(proxy, backend="eager")(X)
        assert_same(compiled, model(X))
        sliced = Sliced(*layers()).eval()
        compiled = torch.compile(Quantizer(preset="plain").proxy(sliced), backend="eager")(X)
        assert_same(compiled, sliced(X))


# -- threads -------------------------------------------------------------------------------------------------------

_BLOCK = """
class B{i}(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return scores(x) @ self.linear(x) + x
"""
_FILE = (
    "import torch\nfrom torch import nn\n\n\ndef scores(x):\n    return (x @ x.transpose(-1, -2)).softmax(-1)\n\n"
    + "".join(_BLOCK.format(i=i) for i in range(20))
    + "\n\ndef model():\n    return nn.Sequential("
    + ", ".join(f"B{i}()" for i in range(20))
    + ")\n"
)


def test_threads_that_make_their_first_proxies_find_every_site(tmp_path: Path) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for turn in range(3):
            module = imported(tmp_path, f"sample_threads_{turn}", _FILE)
            found = _sites_by_threads(module)
            del sys.modules[f"sample_threads_{turn}"]
            assert found == [80] * 5
    finally:
        sys.setswitchinterval(interval)


def _sites_by_threads(module: types.ModuleType) -> list[int]:
    """How many sites four threads find that start together, and one that comes afterwards."""
    models = [module.model().eval() for _ in range(4)]
    found: list[int] = []
    start = threading.Barrier(4)

    def work(model: nn.Module) -> None:
        start.wait()
        found.append(len(list(sites_of(Quantizer(preset="plain").proxy(model)))))

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [*found, len(list(sites_of(Quantizer(preset="plain").proxy(module.model().eval()))))]
