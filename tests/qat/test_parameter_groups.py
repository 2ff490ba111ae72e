"""Which parameter of a proxy is trained at which rate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.algorithms.qat import parameter_groups
from quantizer.errors import QuantizerError


class Gate(nn.Module):
    """Two linears that read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.query(x) * self.key(x)


DATA = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(1))


def trainable(**asked: Any) -> tuple[Quantizer, nn.Module]:
    quantizer = Quantizer(preset="plain", backend="openvino")
    model = Gate()
    quantizer.calibrate(model, [DATA], progress=False)
    return quantizer, quantizer.qat(model, copy=True, **asked)


def test_ranges_of_activations_have_a_rate_of_their_own() -> None:
    quantizer, proxy = trainable(scales="learned")
    rest, ranges = groups = parameter_groups(proxy, 1e-5)
    every = [parameter for group in groups for parameter in group["params"]]
    assert {id(parameter) for parameter in every} == {id(parameter) for parameter in proxy.parameters()}
    assert len(every) == len(set(map(id, every)))
    # Both linears read one tensor, whose scale is one.
    assert [parameter.shape for parameter in ranges["params"]] == [torch.Size([])]
    assert rest["lr"] == 1e-5
    before = quantizer.scales()
    optimizer = torch.optim.AdamW(groups, eps=0)
    (1e6 * proxy(DATA).square().mean()).backward()
    optimizer.step()
    after = quantizer.scales()
    for name, scale in after.items():
        # The first step of Adam is as large as its rate.
        moved = (scale / before[name]).log().abs()
        rate = 0.2 if name.endswith(".input") else 1e-3
        torch.testing.assert_close(moved, torch.full_like(moved, rate), rtol=1e-3, atol=0)


@pytest.mark.parametrize("kind", ["fixed", "average"])
def test_without_learned_scales_there_is_one_group(kind: str) -> None:
    (group,) = parameter_groups(trainable(scales=kind)[1], 1e-5)
    assert group["lr"] == 1e-5
    assert len(group["params"]) == 4


def test_what_is_frozen_is_in_no_group() -> None:
    _, proxy = trainable(scales="learned")
    for name, parameter in proxy.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    (group,) = parameter_groups(proxy, 1e-5)
    assert len(group["params"]) == 2


def test_mistakes_are_said() -> None:
    _, proxy = trainable()
    with pytest.raises(QuantizerError, match=r"Gate is not a proxy; pass the result of qat\(\) to parameter_groups"):
        parameter_groups(Gate(), 1e-5)
    with pytest.raises(QuantizerError, match="learning_rate is 0, expected a number above 0"):
        parameter_groups(proxy, 0)
    with pytest.raises(QuantizerError, match="scale_learning_rate is inf, expected a number above 0"):
        parameter_groups(proxy, 1e-5, scale_learning_rate=float("inf"))
