"""The inference precision of an OpenVINO engine: told when it is built, and kept in the file."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import openvino_core

from quantizer.engines import BuildOptions, InputSizes, build_engine, inspect_engine, load_engine
from quantizer.errors import EngineError

onnx = pytest.importorskip("onnx", reason="install enginequant[onnx]")
pytest.importorskip("openvino", reason="install enginequant[openvino]")

BF16 = BuildOptions(inference_precision="bfloat16")


@pytest.fixture
def product(tmp_path: Path) -> Path:
    """A float product, [n, 64] to [n, 32], in an ONNX file."""
    weight = np.random.default_rng(1).normal(size=(64, 32)).astype(np.float32) / 8
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> g (float[n, 64] x) => (float[n, 32] y) { y = MatMul (x, w) }'
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    path = tmp_path / "product.onnx"
    onnx.save(model, path)
    return path


@pytest.fixture
def bf16(product: Path, tmp_path: Path) -> Path:
    """The product's engine with a BF16 rest; skips where the CPU has no BF16, not even emulated, as with AVX-512."""
    path = tmp_path / "bf16.engine"
    if reason := refused(product, path):
        pytest.skip(reason)
    return path


def refused(model: Path, engine: Path) -> str:
    """Why OpenVINO does not build for BF16 here; empty where it does."""
    try:
        build_engine("openvino", model, engine, BF16)
    except EngineError as error:
        if "where bf16 was asked for" not in str(error):
            raise
        return str(error)
    return ""


def test_bf16_is_what_runs_and_what_is_seen(bf16: Path, product: Path, tmp_path: Path) -> None:
    plain = build_engine("openvino", product, tmp_path / "f32.engine").path
    x = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    exact = load_engine("openvino", product)({"x": x})["y"]
    np.testing.assert_array_equal(load_engine("openvino", plain)({"x": x})["y"], exact)
    error = load_engine("openvino", bf16)({"x": x})["y"] - exact
    # BF16 has eight bits: each operand is off by 2^-9 of itself at most, and 64 such errors are summed.
    assert 2**-11 < np.sqrt(np.mean(error**2) / np.mean(exact**2)) < 2**-7
    for path, precision in ((bf16, "bf16"), (plain, "fp32"), (product, "fp32")):
        found = inspect_engine("openvino", path, sizes=InputSizes(6))
        assert [layer.precision for layer in found.layers if layer.role == "product"] == [precision]


@pytest.mark.usefixtures("bf16")
def test_the_build_warns_where_bf16_is_emulated(product: Path, tmp_path: Path) -> None:
    native = "BF16" in openvino_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    warnings = build_engine("openvino", product, tmp_path / "model.engine", BF16).warnings
    assert [warning.partition(":")[0] for warning in warnings] == (
        [] if native else ["this CPU has no BF16 instructions"]
    )
    assert build_engine("openvino", product, tmp_path / "model.engine").warnings == ()


@pytest.mark.usefixtures("bf16")
def test_the_quantized_part_stays_int8(qdq: Any, tmp_path: Path) -> None:
    path = build_engine("openvino", qdq.path, tmp_path / "model.engine", BF16).path
    x = qdq.input(1, 3)
    np.testing.assert_allclose(load_engine("openvino", path)({"x": x})["y"], qdq.expected(x), atol=0.1)
    found = inspect_engine("openvino", path, sizes=InputSizes(1, 3))
    assert [layer.precision for layer in found.layers if layer.role == "product"] == ["int8"]


@pytest.mark.parametrize("lost", [1, 20, 60])
def test_an_engine_that_does_not_say_its_precision(lost: int, qdq: Any, tmp_path: Path) -> None:
    path = build_engine("openvino", qdq.path, tmp_path / "model.engine").path
    path.write_bytes(path.read_bytes()[:-lost])
    message = "or is cut short: its footer is invalid .*; build it again"
    with pytest.raises(EngineError, match=message):
        load_engine("openvino", path)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the switch for instructions is that of x86")
def test_a_cpu_without_bf16_is_told(product: Path, tmp_path: Path) -> None:
    code = (
        "import sys, types, importlib.util\n"
        "package = types.ModuleType('quantizer')\n"
        "package.__path__ = list(importlib.util.find_spec('quantizer').submodule_search_locations)\n"
        "sys.modules['quantizer'] = package\n"
        "from quantizer.engines import BuildOptions, build_engine\n"
        "build_engine('openvino', *sys.argv[1:], BuildOptions(inference_precision='bfloat16'))\n"
    )
    words = [sys.executable, "-c", code, str(product), str(tmp_path / "model.engine")]
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    asked = "import openvino; print(openvino.Core().get_property('CPU', 'OPTIMIZATION_CAPABILITIES'))"
    told = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True, env=environment)
    if "BF16" in told.stdout:
        pytest.skip("OpenVINO finds the BF16 instructions of this CPU whatever ONEDNN_MAX_CPU_ISA says")
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert "product.onnx in f32 on this CPU instead of bf16: BF16 needs AVX-512 or AMX" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["product.onnx"]


@pytest.mark.parametrize("name", ["onnxruntime", "onnxruntime-avx2", "tensorrt", "tensorrt-rtx"])
def test_other_backends_take_the_types_of_the_file(name: str, product: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=f"{name} uses the types of the ONNX file; remove 'bfloat16'"):
        build_engine(name, product, tmp_path / "model.engine", BF16)


def test_an_unknown_precision(product: Path, tmp_path: Path) -> None:
    options = BuildOptions(inference_precision="fp8")
    with pytest.raises(EngineError, match="openvino does not support 'fp8'; expected bfloat16 or float32"):
        build_engine("openvino", product, tmp_path / "model.engine", options)
