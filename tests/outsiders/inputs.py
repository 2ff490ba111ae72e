"""Inputs as people have them: bytes, channels last, changed in place, named, left out, unused, tables of integers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from outsiders.case import Case, noise, smooth


def _body() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, 2, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 16),
    )


class _Camera(nn.Module):
    """Pictures as a camera gives them: bytes, channels last."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.net = way, _body()
        self.register_buffer("mean", torch.tensor([123.0, 116, 103]).view(1, 3, 1, 1))

    def forward(self, img: Tensor) -> Tensor:
        x = img.permute(0, 3, 1, 2).float()
        if self.way == "in_place":
            return self.net(x.sub_(self.mean).div_(58.0))
        if self.way == "assigned":
            x -= self.mean
            x /= 58.0
            return self.net(x)
        return self.net((x - self.mean) / 58.0)


class _Bytes(nn.Module):
    """Bytes, channels first, that become floats in one of the usual ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.net = way, _body()

    def forward(self, img: Tensor) -> Tensor:
        if self.way == "float":
            return self.net(img.float() / 255 - 0.5)
        if self.way == "to":
            return self.net(img.to(torch.float32).mul(1 / 127.5).sub(1))
        if self.way == "type_of_weight":
            return self.net(img.to(self.net[0].weight.dtype) / 127.5 - 1)
        return self.net(img / 255 - 0.5)


class _Normalizes(nn.Module):
    """Writes into its own argument."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.net = way, _body()

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "operators":
            x -= 120.0
            x /= 60.0
        elif self.way == "methods":
            x.sub_(120.0).mul_(1 / 60.0)
        elif self.way == "view":
            x[:, 0].sub_(120.0)
            x = x / 60.0
        else:
            x.clamp_(20.0, 220.0)
            x = (x - 120.0) / 60.0
        return self.net(x)


class _Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(16, 32, 3, padding=1), nn.Linear(32, 16)

    def forward(self, feats: Tensor) -> Tensor:
        return self.head(torch.relu(self.conv(feats.transpose(1, 2))).transpose(1, 2))


class _Fields(nn.Module):
    """A table of integers [rows, 3, 5]: three fields of five values."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(500, 32) for _ in range(3))
        self.a, self.b = nn.Linear(96, 32), nn.Linear(32, 16)

    def forward(self, ids: Tensor) -> Tensor:
        found = [table(ids[:, place]).sum(1) for place, table in enumerate(self.tables)]
        return self.b(torch.relu(self.a(torch.cat(found, 1))))


class _Named(nn.Module):
    """A mapping of inputs, one of them optional, and an argument with a default."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(32, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, aux: Tensor | None = None, scale: float = 1.0) -> Tensor:
        y = self.a(x) * scale
        if aux is not None:
            y = y + self.b(aux)
        return self.out(torch.relu(y))


class _Unused(nn.Module):
    """An argument that the forward never reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, unused: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


class TokensByNumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.a, self.b = nn.Embedding(200, 32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return x + self.b(torch.relu(self.a(x)))


class _Complex(nn.Module):
    """Ratings with a spread of six orders of magnitude, taken by their logarithm."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(torch.log1p(x))))


def _bytes(rows: int) -> Tensor:
    return (smooth(noise(rows, 3, 32, 32)).permute(0, 2, 3, 1) * 50 + 120).clamp(0, 255).to(torch.uint8).contiguous()


def _bytes_first(rows: int) -> Tensor:
    return (smooth(noise(rows, 3, 32, 32)) * 50 + 120).clamp(0, 255).to(torch.uint8)


def _light(rows: int) -> Tensor:
    return (smooth(noise(rows, 3, 32, 32)) * 50 + 120).clamp(0, 255)


def _channels_last(rows: int) -> Tensor:
    return smooth(noise(rows, 3, 32, 32)).to(memory_format=torch.channels_last)


def _named(rows: int) -> Mapping[str, Tensor]:
    return {"aux": noise(rows, 16), "x": noise(rows, 32)}


CASES = {
    "bytes_channels_last": Case(net=lambda: _Camera("new"), batch=_bytes, rows=(1, 2, 3, 8)),
    "bytes_in_place": Case(net=lambda: _Camera("in_place"), batch=_bytes, rows=(1, 2, 3, 8)),
    "bytes_assigned": Case(net=lambda: _Camera("assigned"), batch=_bytes, rows=(1, 2, 3, 8)),
    "bytes_float": Case(net=lambda: _Bytes("float"), batch=_bytes_first),
    "bytes_to": Case(net=lambda: _Bytes("to"), batch=_bytes_first),
    "bytes_type_of_weight": Case(net=lambda: _Bytes("type_of_weight"), batch=_bytes_first),
    "bytes_divided": Case(net=lambda: _Bytes("divided"), batch=_bytes_first),
    "input_changed_by_operators": Case(net=lambda: _Normalizes("operators"), batch=_light),
    "input_changed_by_methods": Case(net=lambda: _Normalizes("methods"), batch=_light),
    "input_changed_through_view": Case(net=lambda: _Normalizes("view"), batch=_light),
    "input_clamped": Case(net=lambda: _Normalizes("clamp"), batch=_light),
    "memory_channels_last": Case(net=_body, batch=_channels_last),
    "speech": Case(net=_Speech, batch=lambda rows: noise(rows, 20, 16)),
    "fields": Case(net=_Fields, batch=lambda rows: torch.randint(0, 500, (rows, 3, 5))),
    "named": Case(net=_Named, batch=_named),
    "optional_left_out": Case(net=_Named, batch=lambda rows: noise(rows, 32)),
    "unused": Case(net=_Unused, batch=lambda rows: (noise(rows, 32), noise(rows, 4))),
    "token_ids_int32": Case(net=TokensByNumber, batch=lambda rows: torch.randint(0, 200, (rows, 9), dtype=torch.int32)),
    "wide_spread": Case(net=_Complex, batch=lambda rows: torch.rand(rows, 32).mul(14).exp()),
}
