"""Recurrent layers, state that is carried, and values that float16 or eight bits hold badly."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outsiders.case import Case, noise


class _Recurrent(nn.Module):
    def __init__(self, layer: type[nn.Module], **options: bool) -> None:
        super().__init__()
        self.layer = layer(32, 32, batch_first=True, **options)
        self.out = nn.Linear(64 if options.get("bidirectional") else 32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x)[0])


class _State(nn.Module):
    """A moving mean in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.o = nn.Linear(32, 32), nn.Linear(32, 16)
        self.register_buffer("seen", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.l(x))
        return self.o(y + self.seen)


class _Filled(nn.Module):
    """Memory that is filled part by part."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        out, h = torch.empty(x.shape[0], 32), torch.relu(self.a(x))
        out[:, :16] = h[:, :16]
        out[:, 16:] = 0.5 * h[:, 16:]
        return self.b(out)


class _Outliers(nn.Module):
    """A channel that is a hundred times larger than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        factors = torch.ones(32)
        factors[3] = 100.0
        return self.b(torch.relu(self.a(x * factors)))


def _vectors(rows: int) -> Tensor:
    return noise(rows, 7, 32)


CASES = {
    "lstm": Case(net=lambda: _Recurrent(nn.LSTM), batch=_vectors, integer=0.3),
    "gru": Case(net=lambda: _Recurrent(nn.GRU), batch=_vectors, integer=0.3),
    "lstm_both_ways": Case(net=lambda: _Recurrent(nn.LSTM, bidirectional=True), batch=_vectors, integer=0.3),
    "state_in_buffer": Case(net=_State, batch=_vectors),
    "filled_memory": Case(net=_Filled, batch=lambda rows: noise(rows, 32)),
    "outlier_channel": Case(net=_Outliers, batch=_vectors),
}
