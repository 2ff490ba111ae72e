"""Convolutions and linears with every activation behind them: none may keep a product from integers."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from outsiders.case import Case, noise, smooth


class _Gate(nn.Module):
    """A tensor times a function of it."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return x * self.function(x)


_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "silu": nn.SiLU,
    "hardswish": nn.Hardswish,
    "hardsigmoid": nn.Hardsigmoid,
    "leaky_relu": nn.LeakyReLU,
    "prelu": lambda: nn.PReLU(32),
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "elu": nn.ELU,
    "mish": nn.Mish,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gate_hardsigmoid": lambda: _Gate(nn.Hardsigmoid()),
    "softplus": nn.Softplus,
}


def _convolutions(act: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1),
        act(),
        nn.Conv2d(32, 32, 3, 1, 1),
        act(),
        nn.Conv2d(32, 32, 3, 1, 1),
        act(),
        nn.Conv2d(32, 16, 1),
    )


def _linears(act: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), act(), nn.Linear(32, 32), act(), nn.Linear(32, 32))


def _picture(rows: int) -> Tensor:
    return smooth(noise(rows, 3, 32, 32))


def _vectors(rows: int) -> Tensor:
    return noise(rows, 7, 32)


CASES = {
    f"conv_{name}": Case(net=lambda act=act: _convolutions(act), batch=_picture) for name, act in _ACTIVATIONS.items()
} | {
    f"linear_{name}": Case(net=lambda act=act: _linears(act), batch=_vectors)
    for name, act in _ACTIVATIONS.items()
    if name in ("relu", "silu", "hardswish", "gelu_tanh", "mish")
}
