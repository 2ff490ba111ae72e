"""Corners of following magnitudes: empty tensors, fused attention, and what is written in place."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from toy_nets import linear, net

from quantizer import Quantizer
from quantizer.observe.float16_overflow import OverflowTracker, ParameterMagnitudes, largest_inside, result_bound


def wide(model: nn.Module, *inputs: Tensor) -> set[str]:
    q = Quantizer(preset="plain", backend="tensorrt-rtx", sites={"residual_add": False})
    q.calibrate(model.eval(), [inputs], progress=False)
    return set(q.coverage.regions.wide)


class Experts(nn.Module):
    """Each token goes to one expert; the large ones make a normalization look at what it computes inside."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(3)])
        self.attend = nn.Linear(16, 16)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            result[chosen == number] = expert(x[chosen == number])
            mine = self.attend(x[chosen == number])[None, None]
            functional.scaled_dot_product_attention(mine, mine, mine)
        return result


@pytest.mark.parametrize("tokens", [8, 0])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_experts_without_tokens_and_empty_batches(tokens: int, mode: type) -> None:
    torch.manual_seed(0)
    model = Experts()
    q = Quantizer(preset="plain", backend="openvino")
    x = torch.randn(tokens, 16) * 1e4
    with mode():
        q.calib(model.eval())(x, torch.zeros(tokens, dtype=torch.long))
    assert q.coverage.text()


def test_weights_without_columns() -> None:
    assert (
        wide(
            net(
                "(x @ self.weight).sum(-1, keepdim=True) + x @ self.kernel",
                weight=nn.Parameter(torch.randn(16, 0)),
                kernel=nn.Parameter(torch.randn(16, 16)),
            ),
            torch.randn(4, 16),
        )
        == set()
    )


class Attention(nn.Module):
    """Its scores are beyond float16 where ``factor`` is large; what it is given and gives is not."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.inner = net("F.scaled_dot_product_attention(query, key, value)", "query, key, value")
        with torch.no_grad():
            self.query.weight.mul_(factor)
            self.key.weight.mul_(factor)
            self.value.weight.mul_(0.01)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(self.query(x), self.key(x), self.value(x))
        return found


@pytest.mark.parametrize(("factor", "expected"), [(1.0, set()), (300.0, {"inner"})])
def test_large_queries_and_keys_with_small_values(factor: float, expected: set[str]) -> None:
    x = torch.randn(2, 4, 8, 16, generator=torch.Generator().manual_seed(1))
    model = Attention(factor)
    with torch.no_grad():
        query, key = model.query(x), model.key(x)
    assert max(float(query.abs().max()), float(key.abs().max())) < 65504
    assert (float((query @ key.transpose(-1, -2)).abs().max()) > 65504) == bool(expected)
    assert wide(model, x) == expected


def halves() -> nn.Module:
    return net("x[..., :4] + x[..., 4:8]")


class Writes(nn.Module):
    """Writes huge values into a tensor that has another name, beside one that has nothing to do with it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.of_small, self.of_view = halves(), halves()

    def forward(self, x: Tensor) -> Tensor:
        small, large = self.first(x), self.second(x)
        view = large.unflatten(-1, (2, 8))
        large.mul_(1e6)
        return self.of_small(small).sum(-1) + self.of_view(view).sum((-1, -2)) * 1e-12


def test_what_is_written_in_place_is_in_all_that_share_its_memory_and_in_nothing_else() -> None:
    found = wide(Writes(), torch.randn(4, 16))
    assert "of_view" in found
    assert "of_small" not in found
    assert "first" not in found


def _junk() -> None:
    kept = [torch.full((8, 64), 3e30) for _ in range(100)]
    del kept


MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "empty": lambda x: torch.empty(x.shape),
    "empty_like": torch.empty_like,
    "empty_strided": lambda x: torch.empty_strided(x.shape, (1, len(x))),
    "new_empty": lambda x: x.new_empty(x.shape),
    "new_empty_strided": lambda x: x.new_empty_strided(x.shape, (x.shape[1], 1)),
    "Tensor": lambda x: torch.Tensor(*x.shape),
    "resize_": lambda x: x[:1].clone().resize_(*x.shape),
    "resize_ of nothing": lambda x: torch.tensor([]).resize_(x.shape),
}


@pytest.mark.parametrize("name", MADE)
def test_memory_that_nobody_wrote_holds_no_values(name: str) -> None:
    class Filled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            _junk()
            made, hidden = MADE[name](x), torch.relu(self.first(x))
            made[:, :32] = hidden[:, :32]
            made.narrow(1, 32, 31).copy_(0.5 * hidden[:, 33:])
            # The last channel is padding, which no one reads.
            return self.last(made)[:, :63]

    torch.manual_seed(0)
    x = torch.randn(8, 64)
    q = Quantizer(preset="plain", backend="tensorrt-rtx")
    q.calibrate(Filled().eval(), [x] * 2, progress=False)
    assert not q.coverage.regions.wide
    (last,) = (o for o in q.plan["last.forward.linear_0"].operands if o.name == "input")
    assert last.maximum is not None
    assert last.maximum < 10


def test_a_value_that_nothing_reads_is_no_value_of_the_model() -> None:
    class Unread(nn.Module):
        def __init__(self, read: bool) -> None:
            super().__init__()
            self.linear, self.read = nn.Linear(16, 16), read

        def forward(self, x: Tensor) -> Tensor:
            large = x * 1e30
            # A comparison reads it, though it makes no floating-point value.
            return self.linear(x) * (large > large.mean()) if self.read else self.linear(x)

    assert wide(Unread(read=False), torch.randn(4, 16)) == set()
    assert wide(Unread(read=True), torch.randn(4, 16)) == {""}


class Compares(nn.Module):
    """Only asks which values are positive."""

    def forward(self, x: Tensor) -> Tensor:
        return (x > 0).long()


def test_a_module_that_only_compares_large_values_is_wide() -> None:
    torch.manual_seed(0)
    model = net("self.last(self.compares(self.first(x) * 1e6) * x)", first=linear(), compares=Compares(), last=linear())
    assert "compares" in wide(model, torch.randn(4, 32))


def test_a_large_parameter_widens_the_module_that_reads_it_alone() -> None:
    torch.manual_seed(0)
    inner = net("self.layer(x) * (self.large * 1e-6)", layer=linear(), large=nn.Parameter(torch.full((32,), 1e6)))
    model = net("self.outer(x)", outer=net("self.inner(x)", inner=inner))
    assert wide(model, torch.randn(4, 32)) == {"outer.inner"}


@pytest.mark.parametrize("value", [torch.empty(3, device="meta"), torch._efficientzerotensor(3)])
def test_a_tensor_without_memory_holds_no_large_value(value: Tensor) -> None:
    assert not OverflowTracker(ParameterMagnitudes(), [value]).regions().wide_inputs


def test_a_bound_that_leaves_values_out_stays() -> None:
    # As of padding, which an operand has and nothing reads.
    x, factor = torch.tensor([3e5, 1.0]), torch.tensor([[0.0, 6e4]] * 3)
    for bound, expected in ((10.0, {}), (1e6, {"reader": 3e5})):
        tracker = OverflowTracker(ParameterMagnitudes(), [x])
        tracker.at_most(x, bound)
        tracker.see(torch.ops.aten.mul.Tensor, (x, factor), {}, x * factor, lambda: (("reader", 0),))
        assert tracker.regions().wide == expected


_X, _W, _B = torch.full((4, 9), 3.0), torch.full((9, 5), 2.0), torch.full((5,), 7.0)
_IMAGE, _KERNEL = torch.full((1, 2, 5, 5), 3.0), torch.full((4, 2, 3, 3), 2.0)
_ATEN = torch.ops.aten


@pytest.mark.parametrize(
    ("func", "args", "keywords"),
    [
        (_ATEN.add.Tensor, (_X, _X), {"alpha": 5}),
        (_ATEN.add.Tensor, (_X, _X), {}),
        (_ATEN.add.Scalar, (_X, 100.0), {}),
        (_ATEN.sub.Tensor, (_X, -_X), {"alpha": 5}),
        (_ATEN.rsub.Scalar, (_X, -100.0), {}),
        (_ATEN.mul.Tensor, (_X, _X), {}),
        (_ATEN.mul.Scalar, (_X, -100.0), {}),
        (_ATEN.div.Scalar, (_X, -0.01), {}),
        (_ATEN.mm.default, (_X, _W), {}),
        (_ATEN.bmm.default, (_X[None], _W[None]), {}),
        (_ATEN.addmm.default, (_B, _X, _W), {}),
        (_ATEN.addmm.default, (_B, _X, _W), {"alpha": 3, "beta": 2}),
        (_ATEN.baddbmm.default, (_B, _X[None], _W[None]), {}),
        (_ATEN.convolution.default, (_IMAGE, _KERNEL, _B[:4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1), {}),
        (_ATEN.native_layer_norm.default, (_X * torch.eye(4, 9), [9], torch.full((9,), 5.0), torch.ones(9), 1e-5), {}),
        (_ATEN.masked_fill.Scalar, (_X, _X > 0, 50.0), {}),
        (_ATEN.cat.default, ([_X, -2 * _X],), {}),
        (_ATEN.sigmoid.default, (_X,), {}),
        (_ATEN.relu.default, (_X,), {}),
    ],
    ids=lambda value: str(value) if callable(value) else "",
)
def test_no_result_is_larger_than_its_bound(func: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    flat = [value for arg in args for value in (arg if isinstance(arg, list) else [arg]) if isinstance(value, Tensor)]
    bounds = [float(value.abs().max()) for value in flat if value.is_floating_point()]
    name = func.name().partition(".")[0]
    bound = result_bound(name, args, keywords, bounds, lambda place: float(args[place].norm(dim=-2).max()))
    result = func(*args, **keywords)
    largest = float((result[0] if isinstance(result, tuple) else result).abs().max())
    assert largest <= bound * (1 + 1e-6)
    # Nor is the bound far from what equal values give.
    assert bound <= 4 * largest + 8


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (_ATEN.exp.default, (_X,)),
        (_ATEN.pow.Tensor_Scalar, (_X, 2.0)),
        (_ATEN.div.Scalar, (_X, 0.0)),
        (_ATEN.div.Tensor, (_X, _X)),
        (_ATEN.convolution.default, (_IMAGE, _KERNEL.mT, None, [1, 1], [0, 0], [1, 1], True, [0, 0], 1)),
        (_ATEN.avg_pool2d.default, (_IMAGE, [2, 2], [2, 2], [0, 0], False, True, 1)),
        (_ATEN.zeros.default, ([2],)),
    ],
    ids=lambda value: str(value) if callable(value) else "",
)
def test_where_no_bound_is_known(func: Any, args: tuple[Any, ...]) -> None:
    bounds = [float(arg.abs().max()) for arg in args if isinstance(arg, Tensor)]
    assert result_bound(func.name().partition(".")[0], args, {}, bounds, lambda _: 0.0) == math.inf


@pytest.mark.parametrize("factors", [(1.0, 1e5), (1e5, 1.0), (300.0, 300.0)])
def test_products_of_queries_and_keys_are_inside_an_attention(factors: tuple[float, float]) -> None:
    query, key = (torch.rand(1, 2, 3, 4) * factor for factor in factors)
    largest = float(query.norm(dim=-1).max() * key.norm(dim=-1).max())
    bounds = [float(query.max()), float(key.max()), 1.0]
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert largest_inside(name, (query, key, key), bounds, [query]) == largest
    assert largest_inside(name, (query, key, key), [1.0, 1.0, 1.0], [query]) == 0.0
    assert largest_inside("aten::mm", (query, key), bounds, [query]) == 0.0
    assert largest_inside(name, (query, key[:, :0], key), bounds, [query]) == 0.0


def test_the_variance_is_inside_a_normalization() -> None:
    x = torch.tensor([[-400.0, 400.0], [1.0, 2.0]])
    made = torch.ops.aten.native_layer_norm(x, [2], None, None, 1e-5)
    assert largest_inside("aten::native_layer_norm", (x, [2]), [400.0], made) == pytest.approx(160000.0, rel=1e-4)
    assert largest_inside("aten::native_layer_norm", (x, [2]), [200.0], made) == 0.0
