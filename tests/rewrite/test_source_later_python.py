"""Models in the syntax of later versions of Python than the oldest supported one."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
import torch
from helpers import imported

from quantizer import Quantizer, QuantizerConfig

# Type parameters have a scope of their own around a function or class; comprehensions have none.
_3_12 = """
class Net[T](Base):
    def forward(self, x: T) -> T:
        type Same = T
        def inner[U](y: U) -> U:
            return torch.matmul(y, self.weight)
        name = f"{"a" + f'{"b"}'}"
        x = sum([x @ weight for weight in (self.weight, self.weight)]) + inner(x)
        return self.helper(x)

    def helper[U: torch.Tensor](self, x: U) -> U:
        return F.linear(x, self.weight)
"""
_3_14 = """
class Net(Base):
    def forward(self, x):
        try:
            x = torch.matmul(x, self.weight)
        except TypeError, ValueError:
            x = x @ self.weight
        (text,) = t"{x @ x.T}".interpolations
        assert text.expression == "x @ x.T"
        return F.linear(x, self.weight)
"""
# Annotations are evaluated when they are read: names may be missing, or defined later.
_LAZY = """
class Net(Base):
    size: Nothing

    def forward(self, x: Nothing, scale: Nothing | None = None) -> Later:
        def inner(y: Nothing) -> Nothing:
            return torch.matmul(y, self.weight)
        return inner(self.helper(x))

    def helper(self, x: torch.Missing) -> Later:
        return F.linear(x, self.weight)

class Later: pass
"""
_BASE = """
import torch
from torch import nn
from torch.nn import functional as F

class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
"""


def _since(minor: int, text: str, sites: int) -> object:
    reason = f"Python {sys.version_info.major}.{sys.version_info.minor} cannot read it"
    skip = pytest.mark.skipif(sys.version_info < (3, minor), reason=reason)
    return pytest.param(text, sites, marks=skip, id=f"3.{minor} {text.split()[1]}")


@pytest.mark.parametrize(("text", "sites"), [_since(12, _3_12, 3), _since(14, _3_14, 2), _since(14, _LAZY, 2)])
def test_a_model_in_later_syntax_is_quantized_and_exported(text: str, sites: int, tmp_path: Path) -> None:
    model = imported(tmp_path, "later_python", textwrap.dedent(_BASE + text)).Net().eval()
    x = torch.randn(4, 8)
    quantizer = Quantizer(QuantizerConfig(preset="plain", backend="openvino"))
    assert torch.equal(quantizer.proxy(model)(x), model(x))
    quantizer.calibrate(model, [x, torch.randn(4, 8)], progress=False)
    assert sum(line.quantized for line in quantizer.coverage) >= sites
    assert quantizer.export(quantizer.quantize(model), tmp_path / "model.onnx", x).exists()
