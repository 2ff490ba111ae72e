"""Whose tensors a proxy in training has: the model's, whatever is done to them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import ConvNet
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.errors import ProxyError

CASTS: dict[str, Callable[[nn.Module], Any]] = {
    "same": lambda proxy: proxy.to("cpu"),
    "double": lambda proxy: proxy.double(),
    "device": lambda proxy: proxy.to("meta"),
    "layer": lambda proxy: proxy.get_submodule("norm").double(),
}


def qat(**options: Any) -> tuple[Quantizer, nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = ConvNet().train()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [torch.randn(4, 3, 16, 16)], progress=False)
    return q, model, q.qat(model, **options)


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_the_model_has_the_tensors_of_its_proxy(cast: Callable[[nn.Module], Any]) -> None:
    _, model, proxy = qat()
    cast(proxy)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        *path, last = name.split(".")
        assert getattr(proxy.get_submodule(".".join(path)), last) is tensor, name


def test_a_cast_proxy_trains_the_model() -> None:
    q, model, proxy = qat()
    proxy.to("cpu").double()
    x = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    optimizer = torch.optim.SGD(proxy.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    proxy(x).square().mean().backward()
    optimizer.step()
    # A batch norm does not see what a bias adds before it.
    same = {name for name, value in model.state_dict().items() if torch.equal(before[name], value)}
    assert same <= {"stem.bias"}
    assert model.stem.weight.dtype is torch.float64
    proxy.eval().float()
    assert torch.equal(q.quantize(model)(x.float()), proxy(x.float()))


def test_a_copy_shares_nothing() -> None:
    _, model, proxy = qat(copy=True)
    before = copy.deepcopy(model.state_dict())
    proxy.double()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.stem.weight.dtype is torch.float32


def test_a_proxy_that_is_copied_leaves_the_model_alone() -> None:
    _, model, proxy = qat()
    copied = copy.deepcopy(proxy).double()
    assert copied.get_parameter("stem.weight").dtype is torch.float64
    assert model.stem.weight.dtype is torch.float32
    assert proxy.get_parameter("stem.weight") is model.stem.weight


class Compiled(nn.Module):
    """A part that TorchScript compiled, whose weight a layer of Python may share."""

    def __init__(self, compiled: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.compiled = compiled(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()))
        self.last = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Compute [*, 16]."""
        result: Tensor = self.last(self.compiled(x))
        return result


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("own", [False, True], ids=["in place", "copy"])
@pytest.mark.parametrize("compiled", [torch.jit.script, lambda module: torch.jit.trace(module, torch.randn(8, 16))])
def test_a_part_that_torchscript_compiled_is_trained(compiled: Any, own: bool) -> None:
    x, model, q = torch.randn(8, 16), Compiled(compiled), Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [x], progress=False)
    before = copy.deepcopy(model.state_dict())
    proxy = q.qat(model, copy=own)
    for name, parameter in model.named_parameters():
        assert (proxy.get_parameter(name) is parameter) is not own
        assert proxy.get_parameter(name).is_leaf
    optimizer = torch.optim.SGD(proxy.parameters(), lr=0.1)
    proxy(x).square().mean().backward()
    optimizer.step()
    # A batch norm does not see what a bias adds before it.
    trained = {name for name, value in model.state_dict().items() if not torch.equal(before[name], value)}
    assert trained == (set() if own else {*before} - {"compiled.0.bias"}) | (trained & {"compiled.0.bias"})
    proxy.eval()
    assert torch.equal(q.quantize(model)(x), proxy(x))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_compiled_part_that_changes_after_quantize_is_an_error() -> None:
    """It shares its large weights with the model, as all parts do."""
    model, x = nn.Sequential(torch.jit.script(nn.Linear(300, 300)), nn.Linear(300, 4)).eval(), torch.randn(4, 300)
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [x], progress=False)
    frozen = q.quantize(model)
    frozen(x)
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(ProxyError, match=r"0\.weight changed since quantize\(model\)"):
        frozen(x)
