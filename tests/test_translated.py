"""What the tests of runs keep of torch's translations: it is that of the model as it is, or none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

for _package in ("onnx", "onnxscript", "onnx_ir"):
    pytest.importorskip(_package, reason="an export needs enginequant[onnx]")

import onnx_ir
from translated import translate_once

import quantizer.export.exporter as exporter
from quantizer.export.exporter import export_onnx


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.settings = SimpleNamespace(power=2)
        self.register_buffer("offset", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) ** self.settings.power + self.offset


class _Hidden:
    def __deepcopy__(self, memo: dict[int, Any]) -> _Hidden:
        return self

    def __reduce_ex__(self, protocol: Any) -> str:
        raise TypeError("no copy of it can be made")


@pytest.fixture
def translations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that were translated."""
    made: list[str] = []
    translate = exporter._export

    def counted(model: nn.Module, *more: Any) -> Any:
        made.append(type(model).__name__)
        return translate(model, *more)

    monkeypatch.setattr(exporter, "_export", counted)
    return made


def _net() -> _Net:
    torch.manual_seed(0)
    return _Net()


def _exported(model: nn.Module, path: Path, opset: int = 20, batch: int = 2) -> bytes:
    return export_onnx(model, path, (torch.ones(batch, 4),), opset=opset, dtype=torch.float32).read_bytes()


def _weight(model: _Net) -> None:
    model.linear.weight.data[3, 3] += 1e-6


def _buffer(model: _Net) -> None:
    model.offset[0] = 2


def _inner_setting(model: _Net) -> None:
    model.settings.power = 3


def _code(model: _Net) -> None:
    forward = model.linear.forward
    model.linear.forward = lambda x: forward(x) * 2  # type: ignore[method-assign]


def _state_of_code(model: _Net) -> None:
    factor, forward = len(model.settings.__dict__) + 4, model.linear.forward
    model.linear.forward = lambda x: forward(x) * factor  # type: ignore[method-assign]


def _hidden_argument(model: _Net) -> None:
    model.linear.forward = partial(_times, model.linear.forward, 4)  # type: ignore[method-assign]


def _times(forward: Callable[[torch.Tensor], torch.Tensor], factor: int, x: torch.Tensor) -> torch.Tensor:
    return forward(x) * factor


def test_a_model_is_translated_once(tmp_path: Path, translations: list[str]) -> None:
    plain = _exported(_net(), tmp_path / "plain.onnx")
    with translate_once(tmp_path):
        files = [_exported(_net(), tmp_path / f"{name}.onnx") for name in ("first", "second")]
    assert files == [plain, plain]
    assert translations == ["_Net", "_Net"]
    _exported(_net(), tmp_path / "after.onnx")
    assert len(translations) == 3


@pytest.mark.parametrize("change", [_weight, _buffer, _inner_setting, _code, _state_of_code, _hidden_argument])
def test_one_that_differs_is_translated_anew(
    change: Callable[[_Net], None], tmp_path: Path, translations: list[str]
) -> None:
    changed = _net()
    change(changed)
    expected = _exported(changed, tmp_path / "expected.onnx")
    with translate_once(tmp_path):
        first = _exported(_net(), tmp_path / "first.onnx")
        second = _exported(changed, tmp_path / "second.onnx")
    assert len(translations) == 3
    assert first != second == expected


def test_another_opset_and_other_inputs_are_translated_anew(tmp_path: Path, translations: list[str]) -> None:
    with translate_once(tmp_path):
        for opset, batch in [(20, 2), (21, 2), (20, 3), (20, 2)]:
            _exported(_net(), tmp_path / "model.onnx", opset, batch)
    assert len(translations) == 3


def test_one_that_cannot_be_read_is_translated_each_time(tmp_path: Path, translations: list[str]) -> None:
    with translate_once(tmp_path):
        for _ in range(2):
            model = _net()
            model.hidden = _Hidden()  # type: ignore[assignment]
            _exported(model, tmp_path / "model.onnx")
    assert len(translations) == 2
    assert onnx_ir.load(tmp_path / "model.onnx").graph.inputs
