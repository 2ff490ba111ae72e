"""Lowered models whose linear layers are Triton's, against the frozen proxy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import batch, tiny
from torch import nn
from triton_kernels import interpreted

from quantizer import Quantizer
from quantizer.errors import MissingDependencyError
from quantizer.proxy.lower import Lowering, lower
from quantizer.tasks.metrics import sqnr_db
from quantizer.utils import lazy

del interpreted
FP8 = {"dtype": "fp8"}
NAME = "quantizer::triton_linear"


def _rows(seed: int) -> torch.Tensor:
    return torch.randn(12, 36, generator=torch.Generator().manual_seed(seed))


def _db(found: torch.Tensor, expected: torch.Tensor) -> float:
    return sqnr_db(expected.detach().numpy(), found.detach().float().numpy())


def _lowered(q: Quantizer, model: nn.Module) -> nn.Module:
    return lower(q.quantize(model), Lowering(kernels="cuda", triton=True))


@pytest.mark.parametrize(
    "config", [{"backend": "torch"}, {"backend": "tensorrt-rtx"}, {"backend": "tensorrt", **FP8}], ids=str
)
def test_linears_of_integers_with_and_without_a_zero_point_and_of_fp8(config: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(36, 20), nn.GELU(), nn.Linear(20, 12, bias=False)).eval()
    q = Quantizer(**config)
    q.calibrate(model, [_rows(seed) for seed in range(4)])
    lowered = _lowered(q, model)
    assert {row.kernel for row in q.kernels(lowered)} == {NAME}
    with torch.no_grad():
        assert _db(lowered(_rows(9)), q.quantize(model)(_rows(9))) > 40
        half = lowered.bfloat16()(_rows(9).bfloat16())
    assert half.dtype is torch.bfloat16
    assert _db(half, q.quantize(model)(_rows(9))) > 30


def test_ranges_at_run_time_stay_in_torch() -> None:
    model = nn.Sequential(nn.Linear(36, 20)).eval()
    q = Quantizer(backend="onnxruntime", activations={"ranges": "dynamic"})
    q.calibrate(model, [_rows(seed) for seed in range(4)])
    assert {row.kernel for row in q.kernels(_lowered(q, model))} == {"aten::_int_mm"}


def test_a_transformer() -> None:
    model = tiny("bert").eval()
    q = Quantizer(backend="torch", preset="plain")
    q.calibrate(model, [batch("bert", seed=seed) for seed in range(4)])
    with torch.no_grad():
        found = _lowered(q, model)(**batch("bert", seed=9)).last_hidden_state
        expected = q.quantize(model)(**batch("bert", seed=9)).last_hidden_state
    assert _db(found, expected) > 25


def test_without_triton_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, *_: Any) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(lazy.importlib, "import_module", missing)
    model = nn.Sequential(nn.Linear(36, 20)).eval()
    q = Quantizer(backend="torch")
    q.calibrate(model, [_rows(0), _rows(1)])
    with pytest.raises(MissingDependencyError, match="enginequant\\[triton\\]"):
        q.lower(model, triton=True)
