"""Forwards that compute in several types: casts around products, autocast, tensors made in float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from outsiders.case import Case, noise


class _Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
        self.w = nn.Parameter(torch.randn(32, 32) / 6)


class _Cast(_Linears):
    """A product between casts."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.b((self.a(x).to(self.dtype) @ self.w.to(self.dtype)).to(x.dtype))


class _Autocast(_Linears):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = torch.nn.functional.gelu(self.a(x)) @ self.w
        return self.b(y.float())


class _Made(_Linears):
    """A tensor of float32 that the forward makes."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)) + self.make(x))


class _MaskMean(_Linears):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        weight = mask.float()[..., None]
        return self.b((torch.relu(self.a(x)) * weight).sum(1) / weight.sum(1))


class _OneHot(_Linears):
    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)) + torch.nn.functional.one_hot(kind, 32).float()[:, None])


class _Half(nn.Module):
    """A model whose parameters are of one type throughout."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class _MixedHalves(nn.Module):
    """One part in bfloat16 between parts in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 32), nn.Linear(32, 32).bfloat16(), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(torch.relu(self.a(x)).bfloat16()).float())


class _NoGrad(_Linears):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


class _InferenceMode(_Linears):
    @torch.inference_mode()
    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


class _CastOf(_Linears):
    """Products of several kinds between casts."""

    def __init__(self, dtype: torch.dtype, kind: str) -> None:
        super().__init__()
        self.dtype, self.kind = dtype, kind
        self.conv, self.table = nn.Conv1d(32, 32, 3, padding=1), nn.Embedding(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y, w, bias = self.a(x).to(self.dtype), self.w.to(self.dtype), self.b.bias.to(self.dtype)
        if self.kind == "linear":
            y = torch.nn.functional.linear(y, w, bias)
        elif self.kind == "conv":
            y = torch.nn.functional.conv1d(y.mT, self.conv.weight.to(self.dtype), padding=1).mT
        elif self.kind == "einsum":
            y = torch.einsum("btc,cd->btd", y, w)
        elif self.kind == "addmm":
            y = torch.addmm(bias, y.flatten(0, 1), w).unflatten(0, y.shape[:2])
        elif self.kind == "attention":
            y = (y @ y.mT * 0.1).softmax(-1) @ y
        else:
            y = y + self.table(x.abs().sum(-1).long() % 32).to(self.dtype)
        return self.b(y.to(x.dtype))


class _Scaled(_Linears):
    """``baddbmm`` of activations, with factors."""

    def __init__(self, beta: float, alpha: float) -> None:
        super().__init__()
        self.beta, self.alpha = beta, alpha

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.b(torch.baddbmm(x, x, x.mT @ x, beta=self.beta, alpha=self.alpha))


class _Positions(_Linears):
    """Angles in float32 from positions and frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.rand(32))

    def forward(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[1])[:, None].float() * self.frequencies
        return self.b(self.a(x) * angle.cos() + x * angle.sin())


class _Upcast(_Linears):
    """A normalization in float32 on purpose."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).float()
        return self.b((y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype))


def _vectors(rows: int) -> Tensor:
    return noise(rows, 7, 32)


_MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "arange": lambda x: torch.arange(x.shape[-1]).float() / 32,
    "zeros": lambda x: torch.zeros(x.shape[0], 1, 32),
    "linspace": lambda x: torch.linspace(0, 1, 32),
    "eye": lambda x: torch.eye(32)[: x.shape[1]],
    "mask": lambda x: (x > 0).float(),
    "full": lambda x: torch.full((1, 1, 32), 0.5),
}

_CASTS = "scattered"
"""The casts that a forward asks for are layers that convert."""

_MADE_FLOAT = "converted"
"""A cast makes the tensor."""

CASES = (
    {
        "cast_double": Case(net=lambda: _Cast(torch.float64), batch=_vectors, integer=0.6, speed=_CASTS),
        "cast_half": Case(net=lambda: _Cast(torch.float16), batch=_vectors, integer=0.6, speed=_CASTS),
        "cast_bfloat16": Case(net=lambda: _Cast(torch.bfloat16), batch=_vectors, integer=0.6, speed=_CASTS),
        "autocast": Case(net=_Autocast, batch=_vectors, integer=0.6, speed=_CASTS),
        "float16": Case(net=lambda: _Half(torch.float16), batch=lambda rows: noise(rows, 32).half()),
        "bfloat16": Case(net=lambda: _Half(torch.bfloat16), batch=lambda rows: noise(rows, 32).bfloat16()),
        "float64": Case(net=lambda: _Half(torch.float64), batch=lambda rows: noise(rows, 32).double()),
        "four_bits_odd": Case(
            net=lambda: nn.Sequential(nn.Linear(32, 17), nn.ReLU(), nn.Linear(17, 32)),
            batch=_vectors,
            sqnr=15.0,
            integer=0.0,
            speed="scattered",
            backends=("openvino", "onnxruntime"),
            config={"formats": [{"weights": "int4", "activations": "float"}]},
        ),
        "mixed_halves": Case(net=_MixedHalves, batch=_vectors, integer=0.6, speed=_CASTS),
        "mask_mean": Case(
            net=_MaskMean,
            batch=lambda rows: (noise(rows, 6, 32), torch.arange(6) < 5 - torch.arange(rows)[:, None] % 3),
            speed=_MADE_FLOAT,
        ),
        "one_hot": Case(
            net=_OneHot, batch=lambda rows: (noise(rows, 5, 32), torch.randint(0, 32, (rows,))), speed=_MADE_FLOAT
        ),
        "positions": Case(net=_Positions, batch=_vectors),
        "upcast": Case(net=_Upcast, batch=_vectors),
        "baddbmm": Case(net=lambda: _Scaled(1.0, 0.01), batch=_vectors, integer=0.4),
        "baddbmm_beta": Case(net=lambda: _Scaled(0.5, 0.02), batch=_vectors, integer=0.4),
        "no_grad": Case(net=_NoGrad, batch=_vectors),
        "inference_mode": Case(net=_InferenceMode, batch=_vectors),
    }
    | {f"made_{name}": Case(net=lambda f=f: _Made(f), batch=_vectors, speed=_MADE_FLOAT) for name, f in _MADE.items()}
    | {
        f"cast_{kind}_{str(dtype).removeprefix('torch.')}": Case(
            net=lambda dtype=dtype, kind=kind: _CastOf(dtype, kind),
            batch=_vectors,
            integer=0.4,
            speed=_CASTS,
        )
        for kind in ("linear", "conv", "einsum", "addmm", "attention", "embedding")
        for dtype in (torch.float64, torch.bfloat16, torch.float16)
    }
)
