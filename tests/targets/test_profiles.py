"""The target profiles: what each backend is promised, and the errors of a look-up."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from quantizer.errors import ConfigError
from quantizer.targets import TargetProfile
from quantizer.targets import profile
from quantizer.targets import profiles


def test_names() -> None:
    assert profiles.names() == ["onnxruntime", "openvino", "tensorrt", "tensorrt-rtx"]


@pytest.mark.parametrize("name", ["onnxruntime", "openvino", "tensorrt", "tensorrt-rtx"])
def test_profile_carries_its_name_and_a_valid_opset(name: str) -> None:
    assert profile(name).name == name
    assert profile(name).opset == 20


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown backend 'tensort'; known: onnxruntime, openvino, tensorrt"):
        profile("tensort")


def test_profile_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError, match="float_dtype"):
        profile("tensorrt").float_dtype = "float32"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "dtype"), [("tensorrt", "float16"), ("tensorrt-rtx", "float16"), ("openvino", "float32")]
)
def test_rest_of_the_graph(name: str, dtype: str) -> None:
    assert profile(name).float_dtype == dtype


@pytest.mark.parametrize(
    ("name", "where"),
    [("tensorrt", "none"), ("tensorrt-rtx", "none"), ("openvino", "weighted"), ("onnxruntime", "all")],
)
def test_where_activations_are_unsigned(name: str, where: str) -> None:
    assert profile(name).unsigned_activations == where


def test_onnxruntime_wants_float_attention() -> None:
    assert profile("onnxruntime").site_kinds == {"linear", "conv", "embedding"}


@pytest.mark.parametrize(
    ("name", "k", "n", "reason"),
    [
        ("tensorrt", 16, 16, None),
        ("tensorrt", 8, 384, r"K = 8 is below 16: slower quantized than float on tensorrt"),
        ("tensorrt-rtx", 384, 2, r"N = 2 is below 16: slower quantized than float on tensorrt-rtx"),
        ("openvino", 8, 2, None),
    ],
)
def test_small_products(name: str, k: int, n: int, reason: str | None) -> None:
    assert profile(name).gemm_reason(k, n) == reason


def test_a_profile_of_ones_own() -> None:
    own = TargetProfile(name="own", float_dtype="bfloat16", site_kinds=frozenset({"linear"}), min_gemm_dim=32)
    assert own.gemm_reason(31, 64) is not None
    assert own.gemm_reason(32, 64) is None


def test_profiles_import_no_torch() -> None:
    # The package's own __init__ is not in question here: only what the profiles add.
    code = (
        "import sys, types, pathlib, importlib.util\n"
        "spec = importlib.util.find_spec('quantizer')\n"
        "package = types.ModuleType('quantizer')\n"
        "package.__path__ = list(spec.submodule_search_locations)\n"
        "sys.modules['quantizer'] = package\n"
        "import quantizer.targets\n"
        "print(sorted({'torch', 'numpy', 'onnx'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
