"""Models that look at their own containers and classes; not among the tests, whose ``assert`` pytest rewrites."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)) * 3


def layers() -> list[nn.Module]:
    """Two linears and what stands between."""
    torch.manual_seed(0)
    return [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid()]


class Sliced(nn.Sequential):
    """Its last layer is called apart."""

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for layer in self[:-1]:
            h = layer(h)
        return self[-1](h) + x


class SlicedList(nn.ModuleList):
    """A list with a product of its own."""

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for layer in self[:-1]:
            h = layer(h)
        return self[-1](h) + x


class Tail(nn.Sequential):
    """What a slice computes is what torch's forward makes of it."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.Sequential.forward(self[1:], self[0](x)) + x


class Whole(nn.Sequential):
    """Every way to look at a sequence."""

    def forward(self, x: Tensor) -> Tensor:
        h = x + float(len(self))
        for layer, again in zip(self, reversed(list(reversed(self))), strict=True):
            assert layer is again
            h = layer(h)
        assert self[-1] in self
        both = self + nn.Sequential(nn.ReLU())
        assert len(both) == len(self) + 1
        assert len(self * 2) == 2 * len(self)
        assert [index for index, _ in enumerate(self)] == list(range(len(self)))
        return h + x


class Mapping(nn.ModuleDict):
    """Every way to look at a mapping."""

    def forward(self, x: Tensor) -> Tensor:
        assert list(self) == list(self.keys()) == [name for name, _ in self.items()]
        assert len(self) == len(self.values())
        for name in self:
            x = self[name](x) + x
        return x


class Reversed(nn.ModuleList):
    """A list whose own order is not torch's."""

    def __iter__(self) -> Any:
        return iter([self[index] for index in reversed(range(len(self)))])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x) + x
        return x


class Stack(nn.Module):
    """A container that is none of torch's: Python calls its functions without naming them."""

    def __init__(self) -> None:
        super().__init__()
        for index, layer in enumerate(layers()):
            self.add_module(str(index), layer)

    def __iter__(self) -> Any:
        return iter(self._modules.values())

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, index: int) -> nn.Module:
        return list(self.children())[index]

    def forward(self, x: Tensor) -> Tensor:
        assert len(self) == 4
        for layer in self:
            x = layer(x) + x
        return self[-1](x) + x


class Edited(nn.Module):
    """Changes a list, whose class has sites, while it runs."""

    class Items(nn.ModuleList):
        """A list with a sum of its own."""

        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                x = layer(x) + x
            return x

    class Chain(nn.Sequential):
        """A chain with a sum of its own."""

        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                x = layer(x) + x
            return x

    def __init__(self, kind: str, how: str) -> None:
        super().__init__()
        self.items = self.Items(layers()) if kind == "list" else self.Chain(*layers())
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        items: Any = self.items
        if len(items) == 4:
            if self.how == "insert":
                items.insert(1, nn.ReLU())
            elif self.how == "append":
                items.append(nn.ReLU()).append(nn.Sigmoid())
                assert isinstance(items[-1], nn.Sigmoid)
                items[-1] = nn.Tanh()
            elif self.how == "extend":
                items.extend([nn.ReLU(), nn.Sigmoid()])
            elif self.how == "delete":
                del items[1:3]
            else:
                assert isinstance(items.pop(-1), nn.Sigmoid)
        return items(x) + items[-1](x)


def _kind(layer: nn.Module) -> str:
    return {nn.LayerNorm: "norm", nn.Linear: "linear"}.get(type(layer), "other")


class Asks(nn.Module):
    """Asks for exact classes, in every way."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)

    @staticmethod
    def scaled(x: Tensor) -> Tensor:
        """Twice."""
        return x @ x.T @ x / 100

    def forward(self, x: Tensor) -> Tensor:
        if type(self.norm) is nn.LayerNorm and type(self.norm) in (nn.LayerNorm, nn.BatchNorm1d):
            x = self.norm(x)
        if self.linear.__class__ is nn.Linear and self.linear.__class__ == nn.Linear:
            x = self.linear(x) * 2
        if self.__class__ is not Asks or type(self) != Asks:  # noqa: E721
            x = x * 0
        type(self).count += 1
        x = x + type(self).scaled(x) + self.__class__.scaled(x)
        assert type(x) is Tensor
        assert type(self).__subclasses__ is not None
        return x * (1 if _kind(self.linear) == "linear" and _kind(self.norm) == "norm" else 3)


class Parent(nn.Module):
    """Has a product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x


class OldSuper(Parent):
    """``super`` as it was written in Python 2; and it makes another of its kind."""

    def forward(self, x: Tensor, deep: bool = True) -> Tensor:
        if deep:
            torch.manual_seed(3)
            x = x + type(self)()(x, deep=False) + self.__class__()(x, deep=False)
        return super(self.__class__, self).forward(x) + x
