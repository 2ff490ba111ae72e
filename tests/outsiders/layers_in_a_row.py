"""Linear layers whose result goes straight on: to another layer, an index, a mean, a concatenation; other outputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outsiders.case import Case, noise


class _Chain(nn.Module):
    """Layers [32, 32] without a bias, and what is computed between two of them."""

    def __init__(self, between: Callable[[Tensor], Tensor], bias: bool = False, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32, bias=bias) for _ in range(layers)])
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = self.between(layer(x))
        return self.layers[-1](x)


class _Kept(nn.Module):
    """A layer without a bias whose rectified result a layer and an addition read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(32, 32, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        held = self.first(x).relu()
        return self.second(held) + held


class _Joined(nn.Module):
    """A layer of tokens that were joined."""

    def __init__(self, join: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.join = nn.Linear(32, 32), nn.Linear(32, 32), join

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.join(self.first(x), x))


class _Output(nn.Module):
    def __init__(self, output: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.layer, self.output = nn.Linear(32, 16), output

    def forward(self, x: Tensor) -> object:
        return self.output(self.layer(x))


class _Compiled(nn.Module):
    """A block of TorchScript with blocks in it."""

    def __init__(self, traced: bool) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(32, 32), nn.Sequential(nn.GELU(), nn.Linear(32, 32)))
        self.block = torch.jit.trace(block, torch.randn(2, 32)) if traced else torch.jit.script(block)
        self.out = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.block(x))


class _TiedDouble(nn.Module):
    """One weight of two products in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight.double()
        return (torch.relu(x.double() @ weight.t()) @ weight.t()).float()


class _TiedBack(nn.Module):
    """One square weight that is read transposed, and then as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x)) @ self.layer.weight


class _OverPlaces(nn.Module):
    """A mixer's layers over places, added to what they read: a transposed tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 16), nn.Linear(16, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.mT
        return x + self.down(F.gelu(self.up(x)))


class _Repeated(nn.Module):
    """The first token behind a weight that is repeated for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.layer = nn.Parameter(noise(32, 32) * 0.2), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer((x @ self.weight.repeat(x.shape[0], 1, 1))[:, 0])


class _Numbers(nn.Module):
    """Constants of some shape behind a layer without a bias, or behind an attention of one head or of two."""

    def __init__(self, shape: tuple[int, ...], add: bool = False, heads: int | None = None) -> None:
        super().__init__()
        self.first, self.second, self.heads, self.add = nn.Linear(32, 32, bias=False), nn.Linear(32, 32), heads, add
        self.numbers = nn.Parameter(torch.rand(shape) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.heads is None else x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        y = self.first(y) if self.heads is None else torch.tanh(y @ y.mT * 0.1) @ y
        y = y + self.numbers if self.add else y * self.numbers
        return self.second(y if self.heads is None else y.transpose(1, 2).flatten(2))


def _rows(rows: int) -> Tensor:
    return noise(rows, 32)


def _tokens(rows: int) -> Tensor:
    return noise(rows, 5, 32)


_FLAT = {
    "nothing": lambda x: x,
    "factor": lambda x: x * 0.3,
    "shift": lambda x: x / 0.3 - 1,
    "wide_clamp": lambda x: x.clamp(-50, 50),
}
_OVER_TOKENS = {
    "first": lambda x: x[:, 0],
    "last_scaled": lambda x: (x * 0.5)[:, -1],
    "first_negative": lambda x: (-x)[:, 0],
    "two": lambda x: x[:, 0] + x[:, 1],
    "rest_first": lambda x: x[:, 1:][:, 0],
    "mean": lambda x: x.mean(1),
    "sum": lambda x: x.sum(1),
}
_NUMBERS = {
    "of_tokens": lambda: _Numbers((5, 1)),
    "added_to_tokens": lambda: _Numbers((5, 1), add=True),
    "of_a_table": lambda: _Numbers((5, 32)),
    "of_one_head": lambda: _Numbers((32,), heads=1),
    "of_channels_of_heads": lambda: _Numbers((16,), heads=2),
    "of_heads": lambda: _Numbers((2, 1, 1), heads=2),
    "added_to_heads": lambda: _Numbers((2, 1, 1), add=True, heads=2),
    "of_tokens_of_heads": lambda: _Numbers((5, 1), heads=2),
}
_JOINS = {
    "tokens": lambda y, x: torch.cat((y, x), 1),
    "relu_of_tokens": lambda y, x: torch.relu(torch.cat((y, x), 1)),
    "class_token": lambda y, x: torch.cat((torch.zeros_like(x[:, :1]), y), 1),
    "single_tokens": lambda y, x: torch.cat((y[:, :1], x[:, :1]), 1),
    "stack": lambda y, x: torch.stack((y, x), 1),
    "roll": lambda y, x: y.roll(1, 1),
    "transposed": lambda y, x: torch.cat((y.mT, x.mT), 2).mT,
    "channels": lambda y, x: torch.cat((y, x), -1)[..., ::2],
}

CASES = {
    **{
        f"flat_{name}": Case(net=lambda between=between: _Chain(between, layers=3), batch=_rows)
        for name, between in _FLAT.items()
    },
    "flat_relu": Case(net=lambda: _Chain(torch.relu, layers=3), batch=_rows),
    "flat_relu6": Case(net=lambda: _Chain(F.relu6, layers=3), batch=_rows),
    "flat_clamp": Case(net=lambda: _Chain(lambda x: x.clamp(-0.5, 0.5), layers=3), batch=_rows),
    "flat_relu_kept": Case(net=_Kept, batch=_rows),
    **{
        f"tokens_{name}": Case(net=lambda between=between: _Chain(between), batch=_tokens)
        for name, between in _OVER_TOKENS.items()
    },
    "tokens_first_scaled_bias": Case(net=lambda: _Chain(lambda x: (x * 0.5)[:, 0], bias=True), batch=_tokens),
    **{f"joined_{name}": Case(net=lambda join=join: _Joined(join), batch=_tokens) for name, join in _JOINS.items()},
    # The output is rounded to bfloat16 and given in float32.
    "output_bfloat16": Case(net=lambda: _Output(lambda x: x.bfloat16()), batch=_rows, speed="scattered"),
    "output_number": Case(net=lambda: _Output(lambda x: (x, x.square().mean())), batch=_rows),
    "compiled_scripted": Case(net=lambda: _Compiled(False), batch=_tokens, integer=0.1),
    "compiled_traced": Case(net=lambda: _Compiled(True), batch=_tokens, integer=0.1),
    # OpenVINO alone multiplies two activations as integers.
    **{f"numbers_{name}": Case(net=net, batch=_tokens, integer=0.75) for name, net in _NUMBERS.items()},
    # Only OpenVINO multiplies by a weight that is no operand of a linear layer in integers.
    "tied_back": Case(
        net=_TiedBack,
        batch=_rows,
        integer=0.5,
        speed="scattered",
        config={"preset": "plain", "weights": {"granularity": "per_tensor"}},
    ),
    "over_places": Case(net=_OverPlaces, batch=_tokens),
    "repeated_first": Case(net=_Repeated, batch=_tokens, config={"preset": "plain"}),
    # Values are cast to float64 and back around each product.
    "tied_double": Case(net=_TiedDouble, batch=_rows, speed="scattered"),
}
