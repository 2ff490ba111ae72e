"""Weights that a forward spreads over the batch before it multiplies: learned queries, class tokens, shared factors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from outsiders.case import Case, noise

_SPREAD: dict[str, Callable[[Tensor, int], Tensor]] = {
    "expand": lambda w, rows: w.expand(rows, -1, -1),
    "unsqueeze": lambda w, rows: w.unsqueeze(0).expand(rows, 5, 32),
    "broadcast_to": lambda w, rows: w.broadcast_to(rows, 5, 32),
    "repeat": lambda w, rows: w[None].repeat(rows, 1, 1),
    "tile": lambda w, rows: w.tile(rows, 1, 1),
    "repeat_interleave": lambda w, rows: w[None].repeat_interleave(rows, dim=0),
    "scaled": lambda w, rows: w.expand(rows, -1, -1) * 0.3,
}


class _Spread(nn.Module):
    """Learned queries [5, 32] that look at [rows, 10, 32]."""

    def __init__(self, scores: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.queries, self.key, self.out = nn.Parameter(torch.randn(5, 32)), nn.Linear(32, 32), nn.Linear(32, 32)
        self.scores = scores

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.bmm((self.scores(self.queries, self.key(x)) / 6).softmax(-1), x))


def _expand(q: Tensor, k: Tensor) -> Tensor:
    return torch.bmm(q.expand(k.shape[0], -1, -1), k.transpose(1, 2))


def _expand_matmul(q: Tensor, k: Tensor) -> Tensor:
    return q.unsqueeze(0).expand(k.size(0), 5, 32) @ k.mT


def _repeat(q: Tensor, k: Tensor) -> Tensor:
    return torch.matmul(q[None].repeat(k.shape[0], 1, 1), k.transpose(-1, -2))


def _repeat_interleave(q: Tensor, k: Tensor) -> Tensor:
    return torch.matmul(q[None].repeat_interleave(k.shape[0], dim=0), k.transpose(-1, -2))


def _einsum(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bqd,bkd->bqk", q.expand(k.shape[0], -1, -1), k)


def _einsum_shared(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("qd,bkd->bqk", q, k)


def _baddbmm(q: Tensor, k: Tensor) -> Tensor:
    return torch.baddbmm(torch.zeros(1), q.expand(k.shape[0], -1, -1), k.transpose(1, 2), alpha=0.5)


def _stack(q: Tensor, k: Tensor) -> Tensor:
    return q.broadcast_to(k.shape[0], 5, 32) @ k.transpose(1, 2)


def _scaled(q: Tensor, k: Tensor) -> Tensor:
    return torch.bmm((q * 0.3).expand(k.shape[0], -1, -1), k.transpose(1, 2))


class _Inside(nn.Module):
    """Learned queries [5, 32] whose product stands in the forward itself, where it is a site with a weight."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.queries, self.key, self.out = nn.Parameter(torch.randn(5, 32)), nn.Linear(32, 32), nn.Linear(32, 32)
        self.spread = _SPREAD[way]

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.bmm(self.spread(self.queries, x.shape[0]), self.key(x).transpose(1, 2))
        return self.out(torch.bmm((scores / 6).softmax(-1), x))


class _InsideHeads(nn.Module):
    """Queries split into heads, spread over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.key, self.out = nn.Parameter(torch.randn(5, 32)), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.queries.view(1, 5, 4, 8).expand(x.shape[0], -1, -1, -1).transpose(1, 2)
        key = self.key(x).unflatten(-1, (4, 8)).permute(0, 2, 3, 1)
        return self.out(
            ((heads @ key / 3).softmax(-1) @ x.unflatten(-1, (4, 8)).transpose(1, 2)).transpose(1, 2).flatten(2)
        )


class _InsideEinsum(nn.Module):
    """An einsum whose batch is not its first axis."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.key, self.out = nn.Parameter(torch.randn(5, 32)), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.einsum("qbd,bkd->bqk", self.queries[:, None].expand(-1, x.shape[0], -1), self.key(x))
        return self.out(torch.bmm((scores / 6).softmax(-1), x))


class _InsideMixture(nn.Module):
    """One matrix for all samples, spread for ``baddbmm`` with a bias that is spread too."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b, self.out = (
            nn.Parameter(torch.randn(32, 32) / 6),
            nn.Parameter(torch.randn(32)),
            nn.Linear(32, 32),
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        y = torch.baddbmm(self.b.expand(rows, x.shape[1], -1), x, self.w.expand(rows, -1, -1))
        return self.out(torch.relu(y))


class _Decoder(nn.Module):
    """DETR: queries go through a projection of their own, and attend by torch's fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Embedding(6, 32)
        self.attention, self.out = nn.MultiheadAttention(32, 4, batch_first=True), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.queries.weight.unsqueeze(0).repeat(x.shape[0], 1, 1)
        return self.out(queries + self.attention(queries, x, x, need_weights=False)[0])


class _ClassToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.l, self.o = nn.Parameter(torch.randn(1, 1, 32)), nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        return self.o(torch.relu(self.l(x)).mean(1))


class _BatchedWeight(nn.Module):
    """One matrix for all samples, spread for ``bmm``."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.o = nn.Parameter(torch.randn(32, 32) / 6), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(torch.relu(torch.bmm(x, self.w.expand(x.shape[0], 32, 32))))


def _tokens(rows: int) -> Tensor:
    return noise(rows, 10, 32)


_SCORES = {
    "expand_bmm": _expand,
    "expand_matmul": _expand_matmul,
    "repeat": _repeat,
    "repeat_interleave": _repeat_interleave,
    "einsum": _einsum,
    "einsum_shared": _einsum_shared,
    "baddbmm": _baddbmm,
    "broadcast_to": _stack,
    "scaled_expand": _scaled,
}

_INSIDE = {
    "heads": _InsideHeads,
    "einsum": _InsideEinsum,
    "baddbmm": _InsideMixture,
} | {way: lambda way=way: _Inside(way) for way in _SPREAD}

CASES = (
    {name: Case(net=lambda f=f: _Spread(f), batch=_tokens, integer=0.4) for name, f in _SCORES.items()}
    | {
        "decoder_queries": Case(net=_Decoder, batch=_tokens, integer=0.4),
        "class_token": Case(net=_ClassToken, batch=_tokens),
        "class_token_and_lengths": Case(
            net=_ClassToken, batch=lambda rows, length: noise(rows, length, 32), rows=(1, 3, 8), lengths=(4, 10, 16)
        ),
        "batched_weight": Case(net=_BatchedWeight, batch=_tokens, integer=0.4),
    }
    | {f"inside_{name}": Case(net=net, batch=_tokens, integer=0.4) for name, net in _INSIDE.items()}
)
