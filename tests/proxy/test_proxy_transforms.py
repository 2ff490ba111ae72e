"""Products inside ``torch.vmap`` and ``torch.func``: they are not quantized, with their reason, and all else is
quantized."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from quantizer import Quantizer

# torch says so of its own doings, on the way to jvp.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")


class Net(nn.Module):
    """A linear, and ``self.inner`` as a transform computes it."""

    def __init__(self, transform: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.outer = nn.Linear(32, 32)
        self.inner = nn.Linear(32, 32)
        self.transform = transform

    def block(self, x: Tensor) -> Tensor:
        return x + self.inner(x)

    def attend(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.transform(self, x))


def _both(net: Net, x: Tensor) -> Tensor:
    return net.block(x) + torch.vmap(net.block)(x)


TRANSFORMS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "vmap": lambda net, x: torch.vmap(net.block)(x),
    "vmap of attention": lambda net, x: torch.vmap(net.attend)(x),
    "vmap over weights": lambda net, x: torch.vmap(lambda row: x @ row.expand(32, 32))(net.inner.weight).mean(0),
    "grad": lambda net, x: torch.func.grad(lambda y: net.inner(y).tanh().sum())(x),
    "jvp": lambda net, x: torch.func.jvp(net.block, (x,), (x,))[1],
    "jacrev": lambda net, x: torch.func.jacrev(lambda y: net.block(y).sum(-1).tanh())(x[0])[None],
    "both": _both,
}
INSIDE = "it runs inside torch.vmap or a transform of torch.func"
X = torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("options", [{}, {"exclude": {"names": ["inner"]}}], ids=["all", "excluded"])
@pytest.mark.parametrize("gradients", [False, True], ids=["no_grad", "grad"])
def test_it_stays_float_in_every_mode(name: str, options: dict[str, Any], gradients: bool) -> None:
    model = Net(TRANSFORMS[name]).eval()
    q = Quantizer(preset="plain", backend="openvino", **options)
    with torch.set_grad_enabled(gradients):
        expected = model(X)
        assert torch.equal(q.proxy(model)(X), expected)
        assert torch.allclose(q.calib(model)(X), expected, atol=1e-6)
        assert torch.allclose(q.amp(model)(X), expected, atol=1e-6)
        for proxy in (q.qat(model), q.quantize(model)):
            assert not torch.equal(proxy(X), expected)
            assert torch.allclose(proxy(X), expected, atol=0.1)
    rows = {row.name: row for row in q.coverage.rows}
    assert rows["outer.forward.linear_0"].quantized
    inner = rows["inner.forward.linear_0"]
    assert not inner.quantized
    ran = name not in ("vmap of attention", "vmap over weights")
    assert not ran or inner.reason == ("excluded by rule" if options else INSIDE)


@pytest.mark.parametrize("calibrator", ["auto", "percentile"])
def test_ranges_that_run_batches_again(calibrator: str, tmp_path: Path) -> None:
    model = Net(TRANSFORMS["vmap"]).eval()
    q = Quantizer(
        preset="plain", backend="openvino", activations={"calibrator": calibrator, "smoothquant_alpha": "auto"}
    )
    q.calibrate(model, [X], progress=False)
    expected = q.quantize(model)(X)
    q.save(tmp_path / "saved")
    again = Quantizer.load(tmp_path / "saved")
    assert torch.equal(again.quantize(model)(X), expected)
    assert again.coverage.not_quantized[0].detail == INSIDE


def test_a_frozen_model_inside_a_transform_of_the_caller_rounds_as_outside() -> None:
    model = Net(lambda net, x: net.block(x)).eval()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [X], progress=False)
    frozen = q.quantize(model)
    assert torch.allclose(torch.vmap(frozen)(X), frozen(X), atol=1e-6)
