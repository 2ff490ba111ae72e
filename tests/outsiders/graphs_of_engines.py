"""Small graphs that an engine's own rewriting once computed wrongly: right files, wrong numbers at some sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from outsiders.case import Case, noise


class _Convolutions(nn.Module):
    """Two convolutions of one input, joined in some way."""

    def __init__(self, join: Callable[[Any, Tensor, Tensor], Tensor], bias: bool = False) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(16, 16, 3, padding=1, bias=bias) for _ in range(2))
        self.c, self.join = nn.Conv2d(32, 16, 1, bias=bias), join

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self.c, self.a(x), self.b(x))


def _gated(c: Any, a: Tensor, b: Tensor) -> Tensor:
    return c(torch.cat([a, b], 1)) * torch.sigmoid(a)


def _added(c: Any, a: Tensor, b: Tensor) -> Tensor:
    return c(torch.cat([a, b], 1)) + a


def _returned(c: Any, a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([c(torch.cat([a, b], 1)), b], 1)


def _twice(c: Any, a: Tensor, b: Tensor) -> Tensor:
    return c(torch.cat([a, a], 1)) * torch.tanh(b)


def _halved(c: Any, a: Tensor, b: Tensor) -> Tensor:
    return (a * 0.5 + b) * 0.5 + c(torch.cat([a, b], 1))


class _Means(nn.Module):
    """Statistics before a product."""

    def __init__(self, axes: tuple[int, ...]) -> None:
        super().__init__()
        self.axes, self.conv, self.l = axes, nn.Conv2d(16, 32, 3, padding=1), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(torch.relu(self.conv(x)).mean(self.axes).reshape(x.shape[0], -1, 32).mean(1))


class _Volume(nn.Module):
    """A convolution of three axes over [rows, channels, T, 1, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.l = nn.Conv3d(32, 32, (3, 1, 1), padding=(1, 0, 0), bias=False), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(self.c(x.mT[..., None, None])[..., 0, 0].mT)


class _Added(nn.Module):
    """A product of two activations with a factor and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.b, self.l = nn.Parameter(torch.randn(32)), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(torch.baddbmm(self.b, x, x.mT @ x, alpha=0.01))


def _wide_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))


def _maps(rows: int) -> Tensor:
    return noise(rows, 16, 8, 8)


_JOINS = {"gated": _gated, "added": _added, "returned": _returned, "twice": _twice, "halved": _halved}

CASES = (
    {f"joined_{name}": Case(net=lambda f=f: _Convolutions(f), batch=_maps) for name, f in _JOINS.items()}
    | {f"joined_{name}_biased": Case(net=lambda f=f: _Convolutions(f, True), batch=_maps) for name, f in _JOINS.items()}
    | {
        "mean_of_rows": Case(net=lambda: _Means((2, 3)), batch=_maps),
        "volume_of_one_pixel": Case(
            net=_Volume, batch=lambda rows: noise(rows, 8, 32), by_backend={"torch": {"integer": 0.1}}
        ),
        # Only OpenVINO gains from products of two activations in integers.
        "baddbmm_alpha": Case(
            net=_Added,
            batch=lambda rows: noise(rows, 8, 32),
            integer=0.9,
            by_backend={"onnxruntime": {"integer": 0.15}, "torch": {"integer": 0.15}},
        ),
        "fused_mlp": Case(net=_wide_mlp, batch=lambda rows: noise(rows, 256)),
    }
)
