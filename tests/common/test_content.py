"""The digest of an object's content: equal in every process, and another one for whatever changes a result."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

from quantizer.utils.content import content_digest

FACTOR = 2.0
TABLE = {"a": [1, 2]}


def scaled(x: Tensor) -> Tensor:
    return x * FACTOR * TABLE["a"][0]


class Net(nn.Module):
    """A module whose result depends on a weight, a buffer, an attribute, a function and the constants of that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.eps, self.names, self.mask = 1e-5, {"b", "a"}, torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        if str(x.dtype) in {"torch.float32", "torch.float64"}:
            x = x - self.mean
        return scaled(self.layer(x)) * self.mask + self.eps


def _net() -> Net:
    torch.manual_seed(0)
    return Net()


def _weight(net: Net, _: pytest.MonkeyPatch) -> None:
    net.layer.weight.data[0, 0] += 1e-6


def _buffer(net: Net, _: pytest.MonkeyPatch) -> None:
    net.mean[0] = 1.0


def _attribute(net: Net, _: pytest.MonkeyPatch) -> None:
    net.eps = 1e-6


def _set(net: Net, _: pytest.MonkeyPatch) -> None:
    net.names = {"a", "c"}


def _tensor(net: Net, _: pytest.MonkeyPatch) -> None:
    net.mask[1] = 0.0


def _hook(net: Net, _: pytest.MonkeyPatch) -> None:
    net.register_forward_hook(lambda module, args, result: 2 * result)


def _forward(net: Net, _: pytest.MonkeyPatch) -> None:
    net.forward = lambda x: x  # type: ignore[method-assign]


def _child(net: Net, _: pytest.MonkeyPatch) -> None:
    net.layer = nn.Linear(4, 4, bias=False)


def _function(net: Net, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(f"{__name__}.scaled", lambda x: x / FACTOR)


def _constant(net: Net, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(f"{__name__}.FACTOR", 3.0)


def _nested_constant(net: Net, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(TABLE, "a", [3, 2])


CHANGES = (
    _weight, _buffer, _attribute, _set, _tensor, _hook, _forward, _child, _function, _constant, _nested_constant
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_counts(change: Callable[[Net, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    net = _net()
    before = content_digest(net)
    assert content_digest(_net()) == before
    change(net, monkeypatch)
    assert content_digest(net) != before


def test_the_mode_does_not_count() -> None:
    assert content_digest(_net().eval()) == content_digest(_net().train())


@dataclass
class Settings:
    """A plain object of a user."""

    width: int


class Opaque:
    """An object of a user with attributes, and one that leads back to it."""

    def __init__(self, value: int) -> None:
        self.value, self.me = value, self


def _counting(start: int) -> Callable[[], int]:
    def count() -> int:
        return start

    return count


PAIRS: list[tuple[Any, Any]] = [
    (1, 1.0),
    (True, 1),
    ([1, 2], (1, 2)),
    ([[1], 2], [1, [2]]),
    ({"a": 1}, {"a": 2}),
    (np.arange(3), np.arange(1, 4)),
    (np.array(["a", None]), np.array(["b", None])),
    (torch.zeros(2), torch.zeros(2, dtype=torch.float16)),
    (torch.zeros(2, 3), torch.zeros(3, 2)),
    (torch.zeros(0), torch.zeros(1)),
    (torch.empty(2, device="meta"), torch.empty(3, device="meta")),
    (Settings(1), Settings(2)),
    (Opaque(1), Opaque(2)),
    (_counting(1), _counting(2)),
    (partial(scaled, x=1), partial(scaled, x=2)),
    (torch.relu, torch.tanh),
    (lru_cache(_counting(1)), lru_cache(_counting(2))),
    (Settings(1).__init__, Settings(2).__init__),  # type: ignore[misc]
    (fx.symbolic_trace(nn.Sequential(nn.ReLU())), fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.ReLU()))),
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_other_contents_differ(one: Any, other: Any) -> None:
    assert content_digest(one) == content_digest(one) != content_digest(other)


def test_a_long_chain_is_no_recursion() -> None:
    chain: list[Any] = []
    for _ in range(10_000):
        chain = [chain]
    assert content_digest(chain)


def test_another_process_finds_the_same(tmp_path: Path) -> None:
    """Whatever the order of sets and the addresses there."""
    code = "from test_content import _net, PAIRS, content_digest as c; print(c(_net(), [one for one, _ in PAIRS[:-1]]))"
    # That of the present process is random.
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    folder = Path(__file__).parent
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(content_digest(_net(), [one for one, _ in PAIRS[:-1]]))
