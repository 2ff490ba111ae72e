"""The nets whose every result is recorded: small, unlike each other, each with settings of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch
from helpers import ConvNet
from helpers import batch
from helpers import tiny
from torch import Tensor
from torch import nn
from torch.nn import functional as F

__all__ = ["NETS", "GoldenNet", "Packed"]

WIDTH = 16


@dataclass(frozen=True)
class GoldenNet:
    """A model, its batches, and how it is quantized.

    Attributes:
        model: makes the model, in eval mode, the same at every call.
        data: makes one batch, from a seed.
        config: settings of the quantizer, without the backend.
    """

    model: Callable[[], nn.Module]
    data: Callable[[int], Any]
    config: Mapping[str, Any] = field(default_factory=dict)


def _random(*shape: int, scale: float = 1.0) -> Callable[[int], Tensor]:
    def make(seed: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale

    return make


def _llama() -> nn.Module:
    from transformers import LlamaConfig
    from transformers import LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 99}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 40, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


class Depthwise(nn.Module):
    """An inverted residual: [rows, 8, 8, 8] to [rows, 8, 8, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(8, 24, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU6())
        self.depthwise = nn.Sequential(
            nn.Conv2d(24, 24, 3, padding=1, groups=24, bias=False), nn.BatchNorm2d(24), nn.ReLU6()
        )
        self.project = nn.Sequential(nn.Conv2d(24, 8, 1, bias=False), nn.BatchNorm2d(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.project(self.depthwise(self.expand(x)))


class Experts(nn.Module):
    """A routed mixture: each token goes to one of three experts. [tokens, WIDTH] to [tokens, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.up = nn.Parameter(torch.randn(3, 2 * WIDTH, WIDTH) * 0.2)
        self.down = nn.Parameter(torch.randn(3, WIDTH, 2 * WIDTH) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for expert in range(3):
            rows = (chosen == expert).nonzero()[:, 0]
            hidden = F.gelu(F.linear(x[rows], self.up[expert]))
            out = out.index_add(0, rows, F.linear(hidden, self.down[expert]))
        return x + out


class Adds(nn.Module):
    """Sums of every kind: of two products, with a broadcast vector, of a product and its input, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.position = nn.Parameter(torch.randn(WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        both = self.left(x) + self.right(x)
        placed = both + self.position
        x = self.norm(x + F.relu(placed))
        return x.add_(self.out(x))


class Shared(nn.Module):
    """A linear that is called twice, and a head that is tied to the embedding. [rows, tokens] to [.., 40]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(torch.tanh(self.mix(torch.tanh(self.mix(x)))))


class Einsums(nn.Module):
    """Attention written in equations, with weights of three axes. [rows, tokens, WIDTH] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Parameter(torch.randn(2, 8, WIDTH) * 0.3) for _ in range(3))
        self.out = nn.Parameter(torch.randn(WIDTH, 2, 8) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,hkd->bhtk", x, w) for w in (self.query, self.key, self.value))
        weights = (torch.einsum("bhtk,bhsk->bhts", q, k) / math.sqrt(8)).softmax(-1)
        return torch.einsum("bhtk,dhk->btd", weights @ v, self.out)


class Packed(nn.Module):
    """torch's own encoder, whose query, key and value are one weight. [rows, tokens, WIDTH] to the same."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)


class Recurrent(nn.Module):
    """What is not quantized beside what does not: a GRU, a product by hand, a linear. [rows, tokens, WIDTH] to [rows,
    4]."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.gate = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.gru(x)
        return self.head((hidden @ self.gate).sigmoid()[:, -1])


class Wide(nn.Module):
    """Values that float16 does not hold, in the middle and in a mask. [rows, tokens, WIDTH] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        large = self.up(x) * 1e5
        scores = x @ x.mT + torch.full((x.shape[1], x.shape[1]), -3e38).triu(1)
        return self.norm(scores.softmax(-1) @ self.down(large / 1e5) + large)


def _ids(seed: int) -> Tensor:
    return torch.randint(0, 40, (3, 6), generator=torch.Generator().manual_seed(seed))


def _tokens(seed: int) -> dict[str, Tensor]:
    return batch("bert", seed=seed)


NETS: dict[str, GoldenNet] = {
    "encoder": GoldenNet(lambda: tiny("bert"), lambda seed: batch("bert", padded=True, seed=seed)),
    "decoder": GoldenNet(
        _llama, _tokens, {"formats": [{"weights": "int4", "activations": "float", "kinds": ["linear"]}]}
    ),
    "vision": GoldenNet(
        lambda: tiny("vit"), lambda seed: batch("vit", seed=seed), {"activations": {"smoothquant_alpha": "auto"}}
    ),
    "convnet": GoldenNet(ConvNet, _random(4, 3, 16, 16), {"sites": {"residual_add": True}}),
    "depthwise": GoldenNet(Depthwise, _random(4, 8, 8, 8), {"activations": {"calibrator": "mse"}}),
    "experts": GoldenNet(Experts, _random(24, WIDTH)),
    "adds": GoldenNet(
        Adds, _random(4, 6, WIDTH), {"sites": {"residual_add": True}, "activations": {"calibrator": "max"}}
    ),
    "shared": GoldenNet(Shared, _ids, {"sites": {"embedding": True}}),
    "einsums": GoldenNet(Einsums, _random(2, 5, WIDTH), {"activations": {"calibrator": "entropy"}}),
    "packed": GoldenNet(Packed, _random(2, 5, WIDTH), {"activations": {"calibrator": "auto"}}),
    "recurrent": GoldenNet(
        Recurrent, _random(2, 5, WIDTH), {"formats": [{"activations": "uint8", "kinds": ["linear"]}]}
    ),
    "wide": GoldenNet(Wide, _random(2, 5, WIDTH), {"dtype": "fp8"}),
}
