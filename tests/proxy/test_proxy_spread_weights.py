"""Weights that a forward spreads over the batch before a product: what is frozen is the weight before that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from toy_nets import linear, net

from quantizer import Quantizer
from quantizer.errors import ProxyError
from quantizer.proxy.weight import Computation, Step
from tests.outsiders.case import sqnr

_SPREAD: dict[str, Callable[[Tensor, int], Tensor]] = {
    "expand": lambda w, rows: w.expand(rows, -1, -1),
    "expand of a new axis": lambda w, rows: w.unsqueeze(0).expand(rows, 5, 32),
    "broadcast_to": lambda w, rows: w.broadcast_to(rows, 5, 32),
    "repeat": lambda w, rows: w[None].repeat(rows, 1, 1),
    "tile": lambda w, rows: w.tile(rows, 1, 1),
    "repeat_interleave": lambda w, rows: w[None].repeat_interleave(rows, dim=0),
    "scaled before": lambda w, rows: (w * 0.3).expand(rows, -1, -1),
    "scaled after": lambda w, rows: w.expand(rows, -1, -1) * 0.3,
    "twice": lambda w, rows: w.expand(1, -1, -1).expand(rows, -1, -1),
    "cat": lambda w, rows: torch.cat([w[None]] * rows),
    "stack": lambda w, rows: torch.stack([w] * rows),
}


class Spread(nn.Module):
    """Learned queries [5, 32] that look at x [B, 10, 32]."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.queries, self.key = nn.Parameter(torch.randn(5, 32)), nn.Linear(32, 32)
        self.spread = _SPREAD[how]

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.bmm(self.spread(self.queries, x.shape[0]), self.key(x).transpose(1, 2))
        return torch.bmm((scores / 6).softmax(-1), x)


class Heads(nn.Module):
    """The axis of the batch is not the first one of an einsum, and heads are split off."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.key = nn.Parameter(torch.randn(5, 32)), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        middle = self.queries[:, None].expand(-1, x.shape[0], -1)
        scores = torch.einsum("qbd,bkd->bqk", middle, self.key(x))
        heads = self.queries.view(1, 5, 4, 8).expand(x.shape[0], -1, -1, -1).transpose(1, 2)
        return scores + (heads @ self.key(x).unflatten(-1, (4, 8)).permute(0, 2, 3, 1)).mean(1)


def rows_net() -> nn.Module:
    """A matrix whose rows are the batch: another matrix for another batch."""
    return net("self.row.expand(x.shape[0], 32) @ self.key(x)[0].T", row=nn.Parameter(torch.randn(32)), key=linear())


def _noise(rows: int) -> Tensor:
    return torch.randn(rows, 10, 32).clamp(-2.5, 2.5)


def _quantized(model: nn.Module, sizes: tuple[int, ...] = (8, 8)) -> tuple[Quantizer, nn.Module]:
    q = Quantizer(backend="openvino", preset="plain")
    q.calibrate(model, [_noise(rows) for rows in sizes], progress=False)
    return q, q.quantize(model)


def _holds_at_any_size(model: nn.Module, frozen: nn.Module) -> None:
    for rows in (1, 2, 3, 8):
        x = _noise(rows)
        with torch.no_grad():
            # Ranges of a few rows clip others; another weight has 3 dB.
            assert sqnr(model(x), frozen(x)) > 12


@pytest.mark.parametrize("how", _SPREAD)
def test_a_frozen_weight_is_spread_over_the_batch_that_comes(how: str) -> None:
    torch.manual_seed(0)
    model = Spread(how).eval()
    q, frozen = _quantized(model)
    (site,) = (path for path in q.plan if path.startswith("forward.bmm_0"))
    weight = next(operand for operand in q.plan[site].operands if operand.name == "lhs")
    assert weight.role == "weight"
    assert weight.quantized
    _holds_at_any_size(model, frozen)


@pytest.mark.parametrize("sizes", [(8, 5, 1), (1, 8), (1, 1)], ids=str)
@pytest.mark.parametrize("how", ["expand", "repeat", "scaled after"])
def test_batches_of_several_sizes_have_one_weight(how: str, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Spread(how).eval()
    q, frozen = _quantized(model, sizes)
    assert q.plan["forward.bmm_0"].quantized
    assert {operand.role for operand in q.plan["forward.bmm_0"].operands} == {"weight", "activation"}
    _holds_at_any_size(model, frozen)


def test_any_axis_of_a_batch_of_products_may_be_spread() -> None:
    torch.manual_seed(0)
    model = Heads().eval()
    q, frozen = _quantized(model)
    assert q.coverage.share == 1.0
    _holds_at_any_size(model, frozen)


def test_a_matrix_with_rows_by_the_batch_is_no_weight() -> None:
    torch.manual_seed(0)
    model = rows_net().eval()
    _, frozen = _quantized(model)
    _holds_at_any_size(model, frozen)


def test_another_weight_of_the_same_shape_is_still_refused() -> None:
    torch.manual_seed(0)
    model = Spread("expand").eval()
    _, frozen = _quantized(model)
    with torch.no_grad():
        frozen.queries.copy_(torch.randn(5, 32))
    with pytest.raises(ProxyError, match="is not the frozen one"):
        frozen._modules["site_forward_bmm_0"](torch.bmm, torch.randn(2, 5, 32), torch.randn(2, 32, 10))


def test_a_saved_quantizer_spreads_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Spread("repeat").eval()
    q, frozen = _quantized(model)
    q.save(tmp_path / "q")
    x = _noise(3)
    with torch.no_grad():
        assert torch.equal(Quantizer.load(tmp_path / "q").quantize(model)(x), frozen(x))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_trace_spreads_over_its_batch() -> None:
    torch.manual_seed(0)
    _, frozen = _quantized(Spread("expand").eval())
    with torch.no_grad():
        traced = torch.jit.trace(frozen, _noise(8))
        for rows in (8, 3):
            x = _noise(rows)
            assert torch.equal(traced(x), frozen(x))


def test_a_computation_without_copies() -> None:
    spread = Computation(
        ("w",),
        (
            Step("aten.expand.default", '[[{"input": 0}, [8, -1, -1]], {}]'),
            Step("aten.clone.default", '[[{"step": 0, "output": 0}], {}]'),
            Step("aten.view.default", '[[{"step": 1, "output": 0}, [8, 4, 5, 8]], {}]'),
        ),
    )
    one = spread.without_copies([torch.zeros(5, 32)])
    assert [step.arguments for step in one.steps] == [
        '[[{"input": 0}, [1, -1, -1]], {}]',
        '[[{"step": 0, "output": 0}], {}]',
        '[[{"step": 1, "output": 0}, [1, 4, 5, 8]], {}]',
    ]
    assert one.without_copies([torch.zeros(5, 32)]) == one
    joined = Computation(("w", "v"), (Step("aten.stack.default", '[[[{"input": 0}, {"input": 1}]], {}]'),))
    assert joined.without_copies([torch.zeros(5), torch.ones(5)]) == joined
    assert joined.of([torch.zeros(5), torch.ones(5)]).shape == (2, 5)
