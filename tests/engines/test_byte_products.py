"""What a build says on a CPU that adds products of bytes in 16 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import BYTE_PRODUCTS_ARE_EXACT

from quantizer.engines import build_engine
from quantizer.engines import for_this_cpu as int8_saturation
from quantizer.utils import cpu

onnx = pytest.importorskip("onnx", reason="install enginequant[onnx]")


@pytest.fixture(params=["without VNNI", "with VNNI"])
def vnni(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> bool:
    there = bool(request.param == "with VNNI")
    info = tmp_path / "cpuinfo"
    info.write_text("flags\t: fpu avx avx2" + there * " avx_vnni")
    monkeypatch.setattr(cpu, "_CPU_INFO", info)
    return there


@pytest.mark.parametrize("name", ["openvino", "onnxruntime"])
def test_a_quantized_file_is_warned_of(name: str, vnni: bool, qdq: Any, tmp_path: Path) -> None:
    pytest.importorskip(name, reason=f"install enginequant[{name}]")
    warnings = build_engine(name, qdq.path, tmp_path / "model.engine").warnings
    assert [warning.rpartition(" ")[2] for warning in warnings] == ([] if vnni else [f"{name}-avx2"])
    assert build_engine(f"{name}-avx2", qdq.path, tmp_path / "other.engine").warnings == ()


def test_a_float_file_is_not(tmp_path: Path, vnni: bool) -> None:
    text = '<ir_version: 10, opset_import: ["" : 20]> g (float[4] x) => (float[4] y) { y = Abs (x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    assert int8_saturation.saturation_warnings("openvino", tmp_path / "model.onnx") == ()
    assert int8_saturation.saturates() is not vnni


def test_this_cpu() -> None:
    assert int8_saturation.saturates() is not BYTE_PRODUCTS_ARE_EXACT


def test_a_system_that_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu, "_CPU_INFO", tmp_path / "none")
    assert not int8_saturation.saturates()
