"""The stages that a command announces are those that it prints: its numbers count up one by one."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

for _package in ("onnx", "onnxscript", "openvino", "onnxruntime"):
    pytest.importorskip(_package, reason="the engines need enginequant[onnx,openvino,onnxruntime]")

import torch
from rich.console import Console
from tiny_run import tiny_run
from torch import Tensor, nn

import quantizer
from quantizer.algorithms.sensitivity.latency_costs import LatencyCosts
from quantizer.config import RunConfig
from quantizer.pipeline.run import run

pytestmark = pytest.mark.usefixtures("exact_byte_products")

AUTO = {"backend": "auto", "candidates": ("openvino", "onnxruntime")}
ONE = {"backend": "openvino"}
# A budget that the first engine meets, because all groups are in float; a goal that every engine reaches.
FALLBACKS: dict[str, Any] = {
    "none": None,
    "names": {"names": ["0"]},
    "num": {"num": 1},
    "max_drop": {"max_drop": 1e-4},
    "min_speedup": {"min_speedup": 0.001},
}


@pytest.fixture(autouse=True)
def _noise_makes_no_group_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    # Such a group would be kept in float, and the engine be built again, which nobody can foresee.
    monkeypatch.setattr(LatencyCosts, "slower", lambda self: {})


@cache
def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).eval()


@cache
def _batches() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(16, 32, generator=generator) for _ in range(2))


def _score(model: nn.Module) -> float:
    """The negative error of the outputs relative to the float model's."""
    with torch.no_grad():
        return -max(float((model(batch) - (y := _net()(batch))).norm() / y.norm()) for batch in _batches())


def _assert_one_by_one(printed: str) -> None:
    heads = re.findall(r"^\[(\d+)/(\d+)\] ", printed, flags=re.MULTILINE)
    assert heads, printed
    assert [int(number) for number, _ in heads] == [*range(1, int(heads[-1][1]) + 1)], printed


def _cases() -> list[Any]:
    cases = []
    for fallback in FALLBACKS:
        for scored in (False, True):
            for backend in ("one", "auto"):
                if scored or fallback != "max_drop":
                    quick = (fallback, scored, backend) in QUICK
                    cases.append(pytest.param(fallback, scored, backend, marks=[] if quick else [pytest.mark.nightly]))
    return cases


# Three to fifteen seconds each.
QUICK = {("none", True, "one"), ("none", False, "auto"), ("max_drop", True, "one"), ("num", False, "one")}


@pytest.mark.parametrize(("fallback", "scored", "backend"), _cases())
def test_quantize_model(fallback: str, scored: bool, backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    quantizer.quantize_model(
        _net(),
        list(_batches()),
        score=_score if scored else None,
        fallback=FALLBACKS[fallback],
        progress=True,
        preset="plain",
        **(AUTO if backend == "auto" else ONE),
    )
    _assert_one_by_one(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("fallback", "scored"), [pytest.param("none", True, marks=pytest.mark.nightly), ("num", False)]
)
def test_run(fallback: str, scored: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = tiny_run(tmp_path)
    if not scored:
        del values["data"]["evaluation"]
    if FALLBACKS[fallback] is not None:
        values |= {"amp": {}, "fallback": FALLBACKS[fallback]}
    run(RunConfig.model_validate(values), tmp_path / "out", force=False, console=Console())
    _assert_one_by_one(capsys.readouterr().out)
