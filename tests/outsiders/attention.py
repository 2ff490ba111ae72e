"""Attention as people spell it: masks of every kind, softmax by hand, several queries to a key, other similarities."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outsiders.case import Case, noise


class _Torch(nn.Module):
    """torch's module, with a mask."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a = kind, nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "causal":
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            return self.a(x, x, x, attn_mask=mask)[0]
        if self.kind == "float":
            mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
            return self.a(x, x, x, attn_mask=mask, need_weights=False)[0]
        if self.kind == "padding":
            return self.a(x, x, x, key_padding_mask=torch.arange(x.shape[1]).expand(x.shape[0], -1) > 5)[0]
        return self.a(x, x, x, need_weights=self.kind == "weights")[0]


class _ByHand(nn.Module):
    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.out, self.attend = nn.Linear(32, 96), nn.Linear(32, 32), attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(x.shape[0], x.shape[1], 3, 4, 8).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


def _plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / 8**0.5, -1) @ v


def _plus_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.3
    powers = torch.exp(scores - scores.amax(-1, keepdim=True))
    return powers / (1 + powers.sum(-1, keepdim=True)) @ v


def _spelled_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    powers = torch.exp(q @ k.mT * 0.3)
    return powers / powers.sum(-1, keepdim=True) @ v


def _fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def _fused_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _clipped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(5 * torch.tanh(q @ k.mT / 5), -1) @ v


def _linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return q @ (k.mT @ v) / (q @ k.sum(-2).unsqueeze(-1))


def _einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / 8**0.5
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)


def _shared_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Several queries to one key and value."""
    return torch.softmax(q @ k[:, :1].mT / 8**0.5, -1) @ v[:, :1]


def _sigmoid(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.sigmoid(q @ k.mT / 8**0.5 - 2) @ v


class _Fourier(nn.Module):
    """FNet: a transform in place of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.n = nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(self.n(x + torch.fft.fft2(x).real))


class _Encoder(nn.Module):
    """torch's own encoder layer."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=norm_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def _tokens(rows: int) -> Tensor:
    return noise(rows, 8, 32)


_BY_HAND = {
    "plain": _plain,
    "plus_one": _plus_one,
    "spelled_out": _spelled_out,
    "fused": _fused,
    "fused_causal": _fused_causal,
    "clipped": _clipped,
    "linear": _linear,
    "einsum": _einsum,
    "shared_key": _shared_key,
    "sigmoid": _sigmoid,
}

CASES = (
    {
        # OpenVINO rounds query, key and value apart, with ranges of their own. It names the attention with a float mask
        # after the Where of that, so the inspection does not count its products.
        f"torch_{kind}": Case(
            net=lambda kind=kind: _Torch(kind),
            batch=_tokens,
            integer=0.4,
            by_backend={"openvino": {"speed": "scattered" if kind == "float" else "converted"}},
        )
        for kind in ("causal", "float", "padding", "weights", "bare")
    }
    | {name: Case(net=lambda f=f: _ByHand(f), batch=_tokens, integer=0.4) for name, f in _BY_HAND.items()}
    | {
        "fourier": Case(net=_Fourier, batch=_tokens, backends=("onnxruntime",)),
        "encoder": Case(net=lambda: _Encoder(False), batch=_tokens, integer=0.4),
        "encoder_norm_first": Case(net=lambda: _Encoder(True), batch=_tokens, integer=0.4),
    }
)
