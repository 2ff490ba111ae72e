"""Modules that are called several times in one pass, with values of other sizes at each call."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outsiders.case import Case, noise, smooth


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.n = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.n(self.c(x)))


class _Levels(nn.Module):
    """One block on three feature levels, whose values differ by a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.stem, self.block = factor, nn.Conv2d(3, 16, 1), _Block()

    def forward(self, p3: Tensor, p4: Tensor, p5: Tensor) -> tuple[Tensor, ...]:
        return (
            self.block(self.stem(p3)),
            self.block(self.factor * self.stem(p4)),
            self.block(self.stem(p5) / self.factor),
        )


class _LevelNorms(nn.Module):
    """EfficientDet: one convolution for three levels, and a normalization for each."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.c = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(3))
        for factor, norm in zip((1.0, 3.0, -2.0), self.norms, strict=True):
            nn.init.constant_(norm.weight, factor)

    def forward(self, p3: Tensor, p4: Tensor, p5: Tensor) -> tuple[Tensor, ...]:
        levels = (p3, p4, p5)
        return tuple(torch.relu(norm(self.c(self.stem(x)))) for norm, x in zip(self.norms, levels, strict=True))


class _Heads(nn.Module):
    """The heads of a detector: one tower for five levels."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1), nn.SiLU()
        )
        self.classes, self.boxes = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)
        self.scales = (1.0, 2.0, 4.0, 8.0, 16.0)

    def forward(self, x: Tensor) -> list[Tensor]:
        found = []
        for scale in self.scales:
            y = self.tower(x * scale)
            found += [self.classes(y), self.boxes(y)]
            x = nn.functional.avg_pool2d(x, 2)
        return found


class _Siamese(nn.Module):
    """One tower on two inputs of other sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.tower(a), self.tower(b)


class _Repeated(nn.Module):
    """ALBERT: the same layer twelve times, on values that stay alike."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(12):
            x = self.norm(x + self.down(torch.relu(self.up(x))))
        return x


class _SharedMatmul(nn.Module):
    """A module of products of activations, called on two pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.product = nn.Linear(32, 32), nn.Linear(32, 32), _Product()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k = self.q(x), self.k(x)
        return self.product(q, k), self.product(8 * q, k / 8)


class _Product(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b.mT


class _SharedAttention(nn.Module):
    """One encoder layer on two sequences, one of them with small values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))

    def attend(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).mT / 32**0.5
        return x + self.out(scores.softmax(-1) @ self.v(x))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.attend(a), self.attend(b / 10)


class _Alternating(nn.Module):
    """Two layers in turn, on values that shrink."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> list[Tensor]:
        found = []
        for _ in range(3):
            x = self.second(torch.relu(self.first(x / 5)))
            found.append(x)
        return found


class _Function(nn.Module):
    """One weight in a function that is called on several tensors, without a module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16, 3, 3) / 12)

    def forward(self, x: Tensor) -> list[Tensor]:
        def convolved(value: Tensor) -> Tensor:
            return nn.functional.conv2d(value, self.weight, padding=1)

        return [convolved(value) for value in (x, 30 * x, nn.functional.avg_pool2d(x, 2) / 30)]


def _levels(rows: int) -> tuple[Tensor, ...]:
    return tuple(smooth(noise(rows, 3, size, size)) for size in (32, 16, 8))


_ROUNDED_RESULTS = {"onnxruntime": {"sqnr": 32.0}}
"""The convolutions of ONNX Runtime have their results rounded too."""

CASES = {
    "levels_alike": Case(net=lambda: _Levels(1.0), batch=_levels, sqnr=34, by_backend=_ROUNDED_RESULTS),
    "levels_factor_5": Case(net=lambda: _Levels(5.0), batch=_levels, sqnr=34, by_backend=_ROUNDED_RESULTS),
    "levels_factor_20": Case(net=lambda: _Levels(20.0), batch=_levels, sqnr=34, by_backend=_ROUNDED_RESULTS),
    # The convolutions of ONNX Runtime have their results rounded too, four in a row.
    "heads": Case(
        net=_Heads, batch=lambda rows: smooth(noise(rows, 16, 32, 32)), by_backend={"onnxruntime": {"sqnr": 28}}
    ),
    "siamese": Case(net=_Siamese, batch=lambda rows: (noise(rows, 32), 30 * noise(rows, 32))),
    "repeated": Case(net=_Repeated, batch=lambda rows: noise(rows, 7, 32), sqnr=24),
    "shared_attention": Case(net=_SharedAttention, batch=lambda rows: (noise(rows, 7, 32), noise(rows, 7, 32))),
    "alternating": Case(net=_Alternating, batch=lambda rows: noise(rows, 32)),
    "function": Case(net=_Function, batch=lambda rows: smooth(noise(rows, 16, 16, 16)), sqnr=34),
    # Only OpenVINO gains from products of two activations in integers.
    "shared_matmul": Case(
        net=_SharedMatmul,
        batch=lambda rows: noise(rows, 7, 32),
        by_backend={"onnxruntime": {"integer": 0.8}, "torch": {"integer": 0.8}},
    ),
    "levels_norm_for_each": Case(net=_LevelNorms, batch=_levels),
}
