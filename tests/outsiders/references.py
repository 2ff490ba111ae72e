"""Weights that a model reaches by other ways than an attribute of a module, and modules in unusual places."""

from __future__ import annotations

import functools
import types

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outsiders.case import Case, noise


class _Holder:
    """A plain object that holds a weight."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class _Referred(nn.Module):
    """One linear in the usual way, and its weight once more by another way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.l, self.out = way, nn.Linear(32, 32), nn.Linear(32, 16)
        weight = self.l.weight
        self.held = {
            "list": [weight],
            "tuple": (weight,),
            "mapping": {"w": weight},
            "namespace": types.SimpleNamespace(w=weight),
            "partial": functools.partial(F.linear, weight=weight),
            "partial_place": functools.partial(torch.matmul, other=weight),
            "object": _Holder(weight),
            "closure": lambda x: x @ weight,
            "data": weight.data,
            "detached": weight.detach(),
            "bound": self.l.forward,
        }[way]

    def forward(self, x: Tensor) -> Tensor:
        held = self.held
        if self.way in ("list", "tuple"):
            y = x @ held[0]
        elif self.way == "mapping":
            y = F.linear(x, held["w"])
        elif self.way == "namespace":
            y = F.linear(x, held.w)
        elif self.way in ("data", "detached"):
            y = x @ held
        else:
            y = held(x)
        return self.out(torch.relu(y))


class _Tied(nn.Module):
    """Input and output embeddings are one table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.l, self.out = nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 64, bias=False)
        self.out.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.relu(self.l(self.table(ids))))


class _InDict(nn.Module):
    """Modules in a plain mapping beside the registered ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 16)})
        self.by_name = dict(self.layers.items())

    def forward(self, x: Tensor) -> Tensor:
        return self.by_name["b"](torch.relu(self.by_name["a"](x)))


class _WeightNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


class _Scripted(nn.Module):
    """A part that TorchScript compiled is not quantized; the rest is quantized."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 16)
        self.sub = {
            "script": lambda: torch.jit.script(nn.Sequential(nn.Linear(32, 32), nn.ReLU())),
            "script_of_relu": lambda: torch.jit.script(nn.ReLU()),
            "script_of_convolution": lambda: torch.jit.script(nn.Sequential(nn.Conv1d(7, 7, 1), nn.BatchNorm1d(7))),
            "trace": lambda: torch.jit.trace(nn.Linear(32, 32), torch.randn(2, 32)),
            "trace_of_two": lambda: torch.jit.trace(
                nn.Sequential(nn.Linear(32, 32), nn.GELU()).eval(), torch.randn(2, 32)
            ),
        }[way]()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.sub(self.a(x)))


class _Features(nn.Module):
    """What TorchScript compiles: a loop, a normalization and a buffer beside parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.times = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8), 2
        self.register_buffer("gain", torch.rand(8, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.relu(self.norm(self.conv(x)))
        return x * self.gain


class _ScriptedConvolutions(nn.Module):
    """Convolutions around a part that TorchScript compiled, in three ways, which is called twice."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.a, self.b, part = nn.Conv1d(8, 32, 3, padding=1), nn.Conv1d(8, 32, 3, padding=1), _Features().eval()
        self.c = nn.Conv1d(32, 8, 1)
        self.sub = {
            "script": lambda: torch.jit.script(part),
            "trace": lambda: torch.jit.trace(part, torch.randn(2, 8, 16)),
            "frozen": lambda: torch.jit.freeze(torch.jit.script(part)),
        }[way]()
        # What is compiled keeps its method as an attribute once it was read.
        self.sub.forward  # noqa: B018

    def forward(self, x: Tensor) -> Tensor:
        y = self.sub(self.c(torch.relu(self.a(x))))
        return self.b(self.sub(y))


def _vectors(rows: int) -> Tensor:
    return noise(rows, 7, 32)


_WAYS = (
    "list",
    "tuple",
    "mapping",
    "namespace",
    "partial",
    "partial_place",
    "object",
    "closure",
    "data",
    "detached",
    "bound",
)

CASES = {f"weight_by_{way}": Case(net=lambda way=way: _Referred(way), batch=_vectors, integer=0.3) for way in _WAYS} | {
    "tied_table": Case(net=_Tied, batch=lambda rows: torch.randint(0, 64, (rows, 9))),
    "plain_mapping_of_modules": Case(net=_InDict, batch=_vectors),
    "weight_norm": Case(net=_WeightNorm, batch=_vectors),
    "scripted_part": Case(net=lambda: _Scripted("script"), batch=_vectors, integer=0.5),
    "scripted_relu": Case(net=lambda: _Scripted("script_of_relu"), batch=_vectors),
    "scripted_convolution": Case(net=lambda: _Scripted("script_of_convolution"), batch=_vectors, integer=0.5),
    "traced_part": Case(net=lambda: _Scripted("trace"), batch=_vectors, integer=0.5),
    **{
        f"convolutions_of_{way}": Case(
            net=lambda way=way: _ScriptedConvolutions(way), batch=lambda rows: noise(rows, 8, 32), integer=0.5
        )
        for way in ("script", "trace", "frozen")
    },
    "traced_parts": Case(net=lambda: _Scripted("trace_of_two"), batch=_vectors, integer=0.5),
}
