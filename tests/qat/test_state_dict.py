"""Checkpoints of a proxy in training: what they hold, and which are refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from helpers import Mlp
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.errors import TrainingError
from quantizer.proxy.build import sites_of


class Shared(nn.Module):
    """Two linears that read one tensor, and a residual add."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.last = nn.Linear(32, 32), nn.Linear(32, 32), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.one(x) * self.two(x).sigmoid())


def data(seed: int = 1) -> Tensor:
    return torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(seed))


def proxy_of(scales: Any = "fixed", *, seed: int = 1, **config: Any) -> nn.Module:
    model, q = Shared().train(), Quantizer(preset="plain", backend="openvino", **config)
    q.calibrate(model, [data(seed)], progress=False)
    return q.qat(model, scales=scales)


def trained(proxy: nn.Module) -> nn.Module:
    optimizer = torch.optim.SGD(proxy.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        proxy(data(step)).square().mean().backward()
        optimizer.step()
    return proxy


@pytest.mark.parametrize("scales", ["fixed", "average", "learned"])
def test_a_checkpoint_gives_the_proxy_back(scales: Any, tmp_path: Path) -> None:
    first, second = trained(proxy_of(scales)), proxy_of(scales, seed=2)
    assert not torch.equal(first(data(9)), second(data(9)))
    # safetensors takes no tensor twice, and a strict load takes no unknown name and misses none.
    safetensors.torch.save_file(first.state_dict(), tmp_path / "proxy.safetensors")
    second.load_state_dict(safetensors.torch.load_file(tmp_path / "proxy.safetensors"))
    assert torch.equal(first(data(9)), second(data(9)))
    assert first.state_dict().keys() == second.state_dict().keys()


def test_a_shared_scale_stays_shared() -> None:
    proxy = proxy_of("learned")
    shared = {id(site.quantizer_of("input").change) for site in sites_of(proxy) if site.path.startswith(("one", "two"))}
    assert len(shared) == 1
    before = len(proxy.state_dict())
    proxy.load_state_dict(trained(proxy_of("learned")).state_dict())
    sites = {site.path: site for site in sites_of(proxy)}
    one, two = (sites[f"{name}.forward.linear_0"].quantizer_of("input").change for name in ("one", "two"))
    assert one is two is not None
    assert one.item() != 0
    assert len(proxy.state_dict()) == before


def test_a_proxy_within_another_module() -> None:
    whole, other = nn.ModuleDict({"student": proxy_of("learned")}), nn.ModuleDict({"student": proxy_of("learned")})
    trained(whole["student"])
    other.load_state_dict(whole.state_dict())
    assert torch.equal(whole["student"](data(9)), other["student"](data(9)))
    with pytest.raises(TrainingError, match="the checkpoint belongs to another configuration"):
        nn.ModuleDict({"student": proxy_of("fixed")}).load_state_dict(whole.state_dict(), strict=False)


@pytest.mark.parametrize(
    ("scales", "config", "said"),
    [
        ("learned", {}, r"10 operands differ, .*scale \[\] fixed in the checkpoint, .*scale \[\] learned here"),
        ({"**.weight": "average"}, {}, r"4 operands differ, .*scale \[32\] fixed in .*, .*scale \[32\] average here"),
        ("fixed", {"weights": {"granularity": "per_tensor"}}, r"4 operands differ, .*axis 0, .* in .*, per tensor, .*"),
        ("fixed", {"exclude": {"names": ["two"]}}, r"2 operands differ, .*two\.forward.*: int8, .* not quantized here"),
        ("fixed", {"sites": {"residual_add": False}}, r"2 operands differ, .*forward\.add_0.*, not quantized here"),
    ],
    ids=["learned", "average", "per-tensor", "excluded", "no-residual"],
)
def test_another_configuration_is_refused(scales: Any, config: dict[str, Any], said: str) -> None:
    checkpoint = proxy_of().state_dict()
    proxy = proxy_of(scales, **config)
    before = copy.deepcopy(proxy.state_dict())
    for strict in (True, False):
        with pytest.raises(TrainingError, match="the checkpoint belongs to another configuration") as told:
            proxy.load_state_dict(checkpoint, strict=strict)
    assert "Create the proxy with the Quantizer of that training" in str(told.value)
    assert told.match(said)
    assert all(torch.equal(before[name], value) for name, value in proxy.state_dict().items())


def test_a_float_checkpoint_is_loaded() -> None:
    proxy, weights = proxy_of(), Shared().state_dict()
    weights["one.weight"] = torch.ones(32, 32)
    found = proxy.load_state_dict(weights, strict=False)
    assert not found.unexpected_keys
    assert torch.equal(proxy.get_parameter("one.weight"), weights["one.weight"])
    # And the other way round: the model takes what is its own.
    model = Shared()
    assert not model.load_state_dict(trained(proxy).state_dict(), strict=False).missing_keys
    assert torch.equal(model.one.weight, proxy.get_parameter("one.weight"))


def test_a_damaged_checkpoint() -> None:
    proxy = proxy_of()
    checkpoint = proxy.state_dict()
    for text, said in ((b'{"a', "cannot be read"), (b"\xff\xfe", "cannot be read"), (b"[]", "is not a mapping")):
        checkpoint["quantizer_decisions"] = torch.tensor(list(text), dtype=torch.uint8)
        with pytest.raises(TrainingError, match=f"the checkpoint is damaged: its quantizer_decisions {said}"):
            proxy.load_state_dict(checkpoint)


def test_ranges_of_the_first_batches() -> None:
    model, fresh = Shared(), Shared()
    first, second = (
        Quantizer(preset="plain", backend="openvino").qat(model),
        Quantizer(preset="plain", backend="openvino").qat(fresh),
    )
    # Before the first batch there is nothing to disagree about.
    second.load_state_dict(first.state_dict())
    for seed in range(8):
        first(data(seed))
    with pytest.raises(TrainingError, match=r"ranges of 10 operands, but nothing was calibrated here yet.*save\(\)"):
        second.load_state_dict(first.state_dict())
    for seed in range(8):
        second(data(seed + 50))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(data(9)), second(data(9)))


def test_what_the_first_batches_say_less_of_is_left_float() -> None:
    """A residual that looks quantizable in one batch, and does not in the next, is float from then on."""
    torch.manual_seed(0)
    model, q = Mlp().eval(), Quantizer(preset="plain", backend="openvino")
    proxy = q.qat(model)
    add = next(site for site in sites_of(proxy) if site.path == "forward.add_0")
    proxy(data())
    assert add.active
    assert add.quantizer_of("lhs").enabled
    outlier = data()
    outlier[0, 0, 0] = 100
    proxy(outlier)
    assert not q.plan["forward.add_0"].quantized
    assert not add.active
    assert not any(add.quantizer(position).enabled for position in range(2))
    assert torch.equal(proxy(data(9)), q.quantize(model)(data(9)))


def test_nothing_to_train() -> None:
    model = Shared().requires_grad_(False)
    q = Quantizer(preset="plain", backend="openvino")
    with pytest.raises(TrainingError, match=r"no parameter of this Shared requires a gradient.*requires_grad_\(\)"):
        q.qat(model)
    q.calibrate(model, [data()], progress=False)
    with pytest.raises(TrainingError, match="there is nothing to train"):
        q.qat(model)
    # The scales alone are something to train.
    assert any(parameter.requires_grad for parameter in q.qat(model, scales="learned").parameters())
