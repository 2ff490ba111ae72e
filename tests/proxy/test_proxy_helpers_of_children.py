"""Helpers with a module argument: they are called with the module whose code it is, or with another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same, imported

from quantizer import Quantizer

_FILE = """
import torch
from torch import nn


def run(module, x):
    return torch.matmul(x, module.weight)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.child = nn.Linear(8, 8)


class OfChild(Outer):
    def forward(self, x):
        return run(self.child, x) @ x.T


class OfBoth(Outer):
    def forward(self, x):
        return run(self, x) + run(module=self.child, x=x)


class OfNothing(nn.Module):
    def __init__(self):
        super().__init__()
        self.kept = [nn.Linear(8, 8)]
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(run(self.kept[0], x))
"""
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("kind", "expected", "never"),
    [
        ("OfChild", {"forward.matmul_0"}, "run.matmul_0"),
        ("OfBoth", {"run.matmul_0", "forward.add_0"}, None),
        ("OfNothing", {"linear.forward.linear_0"}, "run.matmul_0"),
    ],
)
def test_a_helper_that_is_called_with_another_module_computes_what_was_written(
    tmp_path: Path, kind: str, expected: set[str], never: str | None
) -> None:
    torch.manual_seed(0)
    model: Any = getattr(imported(tmp_path, f"sample_{kind}", _FILE), kind)().eval()
    q = Quantizer(preset="plain", backend="openvino")
    with torch.no_grad():
        assert_same(q.proxy(model)(X), model(X))
        torch._dynamo.reset()
        assert_same(torch.compile(q.proxy(model), backend="eager", fullgraph=True)(X), model(X))
        q.calibrate(model, [X])
        frozen = q.quantize(model)
        assert (frozen(X) - model(X)).norm() < 0.1 * model(X).norm()
    rows = {row.name: row for row in q.coverage}
    assert {name for name, row in rows.items() if row.quantized} == expected
    # What runs beside the sites is told: the site that was never reached, and the product that no site has.
    assert never is None or "never" in rows[never].reason
    assert "called in a function that" in str(q.coverage)
