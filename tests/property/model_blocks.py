"""Modules written by hand that random models are put together from: what text alone would not bring about.

All take and give [B, T, C] or [B, C], and keep the shape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint


@dataclass
class Answer:
    """An output with names, of which torch knows nothing."""

    value: Any
    more: Any = None


@dataclass
class Registered:
    """One that torch can look into."""

    value: Any
    more: Any = None


pytree.register_dataclass(Registered)


class Residual(nn.Module):
    """x + f(x), in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(x)))
        y += x
        return y


class Twice(Residual):
    """A subclass that calls the forward of its base, and a product of its own."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.own = nn.Parameter(torch.randn(width, width) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.own + x


class Gated(nn.Module):
    """Two halves of one product, one of them the other's gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.both = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.both(x).chunk(2, dim=-1)
        return value * torch.sigmoid(gate)


def _logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **keywords: Any) -> Any:
        return function(*args, **keywords)

    return wrapper


class Decorated(nn.Module):
    """Decorated methods, one of them static."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    @staticmethod
    @_logged
    def _squared(x: Tensor) -> Tensor:
        return torch.matmul(x, x.transpose(-1, -2))

    @_logged
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y + 0.1 * torch.matmul(self._squared(y).softmax(-1), y)


def _mixed(first: Tensor, second: Tensor, *, scale: float = 0.1) -> Tensor:
    return (first @ second.transpose(-1, -2) * scale).softmax(-1) @ second


class Static(nn.Module):
    """A helper without a module, called by its name, in a lambda and through ``partial``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        half = functools.partial(_mixed, scale=0.5)
        return (lambda y: _mixed(y, y))(self.layer(x)) + half(x, x)


class Tied(nn.Module):
    """One weight in two linears, and read once more as it is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.second(torch.relu(self.first(x))), self.first.weight.t())


class Normed(nn.Module):
    """The norm of a weight, read outside of its product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.layer.weight.norm() * 0.1


class Counting(nn.Module):
    """A buffer that counts calls, and one that follows the values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("level", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.level = self.level * 0.5 + x.detach().abs().mean() * 0.5
        return self.layer(x)


class Remembering(nn.Module):
    """An attribute that is set at each call."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.shape: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        self.shape = tuple(x.shape)
        return self.layer(x).reshape(self.shape)


class Experts(nn.Module):
    """Each row goes to one of three experts, the last of which gets none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        chosen = (rows[:, 0] > 0).long()
        result = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            result[chosen == number] = expert(self.norm(rows[chosen == number]))
        return result.view(x.shape)


class Checkpointed(nn.Module):
    """A part that is computed once more in the backward pass."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def _part(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self._part, x, use_reentrant=False)
        return result


class Mapped(nn.Module):
    """A product in a function that torch maps over the rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        mapped: Tensor = torch.vmap(lambda row: self.layer(row))(x)
        return mapped


BLOCKS = (
    Residual,
    Twice,
    Gated,
    Decorated,
    Static,
    Tied,
    Normed,
    Counting,
    Remembering,
    Experts,
    Checkpointed,
    Mapped,
)
