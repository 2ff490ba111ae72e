"""Sizes that a model fixes or reads: the length of the batch, loops over samples, halves, graphs of nodes and edges."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outsiders.case import Case, noise, smooth
from outsiders.inputs import TokensByNumber


class _Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.l, self.o = nn.Parameter(torch.randn(1, 1, 32)), nn.Linear(32, 32), nn.Linear(32, 16)


class _Length(_Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.o(torch.relu(self.l(torch.cat([self.token.expand(len(x), -1, -1), x], 1)))[:, 0])


class _Integer(_Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.o(torch.relu(self.l(x.reshape(int(x.shape[0]) * 5, 32)))).reshape(int(x.shape[0]), 5, 16)


class _Samples(_Base):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.o(torch.relu(self.l(row))).mean(0) for row in x])


class _Halves(_Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.o(torch.relu(self.l(x[: len(x) // 2]))) - self.o(x[len(x) // 2 :])


class _Viewed(_Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.o(torch.relu(self.l(x.view(-1, 32)))).view(x.size(0), 5, 16)


class _ViewedAsEight(_Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.o(torch.relu(self.l(x.view(8, 5, 32))))


class _Graph(nn.Module):
    """A graph network: nodes [53, 16] and edges [2, 231], neither with a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]]))))


class _Bag(nn.Module):
    """Sums of embeddings, which torch writes as a loop."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bag, self.a, self.b = nn.EmbeddingBag(500, 32, mode=mode), nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(self.bag(ids))))


class _Exit(_Base):
    """A branch that depends on values: no file can hold it."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.l(x))
        if float(y.mean()) > 1e6:
            return y[..., :16]
        return self.o(y)


class _Encoder(nn.Module):
    """Any number of tokens, with positions of the length that comes."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 64, 32) / 4)
        self.qkv, self.out, self.o = nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions[:, : x.shape[1]]
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.o(x + self.out(torch.softmax(q @ k.mT / 32**0.5, -1) @ v))


class _Pooled(nn.Module):
    """The mean over the tokens, by their number."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.o = nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(torch.relu(self.l(x)).sum(1) / x.shape[1])


class _Signal(nn.Module):
    """Convolutions over time, strided."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.o = nn.Conv1d(16, 32, 3, 2, 1), nn.Conv1d(32, 32, 3, 1, 1), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.b(torch.relu(self.a(x.transpose(1, 2)))))
        return self.o(y.transpose(1, 2))


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.o = nn.GRU(32, 32, batch_first=True), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.layer(x)[0])


class _Picture(nn.Module):
    """A convolutional network for pictures of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.o = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 32, 3, 1, 1), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(torch.relu(self.b(torch.relu(self.a(x)))).mean((2, 3)))


def _tokens(rows: int, length: int = 5) -> Tensor:
    return noise(rows, length, 32)


def _graph(rows: int) -> tuple[Tensor, Tensor]:
    return noise(53, 16), torch.randint(0, 53, (2, 231))


_FLOAT_ATTENTION = {"onnxruntime": {"integer": 0.8}, "torch": {"integer": 0.8}}
"""Only OpenVINO gains from products of two activations in integers."""

_SOME = (1, 3, 8)
_LENGTHS = (4, 9, 16)

_ONLY_EIGHT = (8,)
"""The model fixes the batch, so the file has the batch of the user."""

CASES = {
    "length_of_batch": Case(net=_Length, batch=_tokens, rows=_ONLY_EIGHT),
    "integer_of_shape": Case(net=_Integer, batch=_tokens, rows=_ONLY_EIGHT),
    "loop_over_samples": Case(net=_Samples, batch=_tokens, rows=_ONLY_EIGHT),
    "halves": Case(net=_Halves, batch=_tokens, rows=_ONLY_EIGHT),
    "viewed": Case(net=_Viewed, batch=_tokens),
    "viewed_as_eight": Case(net=_ViewedAsEight, batch=_tokens, rows=_ONLY_EIGHT),
    "graph": Case(
        net=_Graph,
        batch=_graph,
        rows=(1,),
        example_rows=1,
    ),
    "bag_sum": Case(net=lambda: _Bag("sum"), batch=lambda rows: torch.randint(0, 500, (rows, 5))),
    "bag_mean": Case(net=lambda: _Bag("mean"), batch=lambda rows: torch.randint(0, 500, (rows, 5))),
    "bag_max": Case(net=lambda: _Bag("max"), batch=lambda rows: torch.randint(0, 500, (rows, 5))),
    "exit_by_value": Case(net=_Exit, batch=_tokens, error="depends on"),
    "one_sample": Case(net=_Viewed, batch=_tokens, example_rows=1),
    "twelve_batches_of_three": Case(net=_Viewed, batch=_tokens, example_rows=3, batches=12),
    "lengths_of_attention": Case(
        net=_Encoder, batch=_tokens, rows=_SOME, lengths=_LENGTHS, by_backend=_FLOAT_ATTENTION
    ),
    # The number of tokens, by which the sum is divided, is cast to a float.
    "lengths_pooled": Case(net=_Pooled, batch=_tokens, rows=_SOME, lengths=_LENGTHS, speed="converted"),
    "lengths_of_a_signal": Case(
        net=_Signal, batch=lambda rows, length: noise(rows, length, 16), rows=_SOME, lengths=(20, 33, 48)
    ),
    "lengths_of_ids": Case(
        net=TokensByNumber,
        batch=lambda rows, length: torch.randint(0, 200, (rows, length)),
        rows=_SOME,
        lengths=_LENGTHS,
    ),
    "lengths_recurrent": Case(net=_Recurrent, batch=_tokens, rows=_SOME, lengths=_LENGTHS, integer=0.3),
    "sizes_of_pictures": Case(
        net=_Picture, batch=lambda rows, size: smooth(noise(rows, 3, size, size)), rows=_SOME, lengths=(24, 32, 41)
    ),
    "mixed_batches": Case(net=_Viewed, batch=_tokens, example_rows=(8, 8, 5)),
    "mixed_batches_and_lengths": Case(
        net=_Encoder,
        batch=_tokens,
        rows=_SOME,
        lengths=_LENGTHS,
        example_rows=(8, 3, 1, 2),
        by_backend=_FLOAT_ATTENTION,
    ),
}
