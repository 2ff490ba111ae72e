"""The target profiles: what each backend is promised, and the errors of a look-up."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from quantizer import QuantizerConfig
from quantizer.config.describe import Slot
from quantizer.engines import backends
from quantizer.errors import ConfigError
from quantizer.plan.targets import TargetProfile, profile, profiles


def test_names() -> None:
    cpu = ["onnxruntime", "onnxruntime-avx2", "openvino", "openvino-avx2"]
    assert profiles.names() == [*cpu, "tensorrt", "tensorrt-rtx", "torch", "torch-avx2", "torch-cuda"]


def test_the_configuration_knows_every_target_and_an_engine_runs_it() -> None:
    slot = Slot(QuantizerConfig).child("backend")
    assert slot is not None
    assert slot.names() == list(profiles)
    assert profiles.names() == backends.names()


@pytest.mark.parametrize("name", profiles.names())
def test_profile_carries_its_name_and_a_valid_opset(name: str) -> None:
    assert profile(name).name == name
    assert profile(name).opset == 20


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown backend 'tensort'; known: onnxruntime, onnxruntime-avx2, openvino"):
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
    [
        ("tensorrt", "none"),
        ("tensorrt-rtx", "none"),
        ("openvino", "weighted"),
        ("openvino-avx2", "weighted"),
        ("onnxruntime", "all"),
        ("onnxruntime-avx2", "all"),
    ],
)
def test_where_activations_are_unsigned(name: str, where: str) -> None:
    assert profile(name).unsigned_activations == where


def test_without_vnni_no_two_activations_are_multiplied() -> None:
    assert profile("openvino").site_kinds - profile("openvino-avx2").site_kinds == {"matmul"}


def test_onnxruntime_wants_float_attention() -> None:
    assert profile("onnxruntime").site_kinds == {"linear", "conv", "embedding"}


@pytest.mark.parametrize(
    ("name", "k", "n", "reason"),
    [
        ("tensorrt", 16, 16, None),
        ("tensorrt", 8, 384, r"K = 8 is below 16: slower quantized than in float on tensorrt"),
        ("tensorrt-rtx", 384, 2, r"N = 2 is below 16: slower quantized than in float on tensorrt-rtx"),
        ("openvino", 8, 2, None),
    ],
)
def test_small_products(name: str, k: int, n: int, reason: str | None) -> None:
    assert profile(name).gemm_reason(k, n) == reason


@pytest.mark.parametrize(
    ("name", "channels", "width", "wrong"),
    [
        ("openvino", 32, 8, True),
        ("openvino", 8, 16, True),
        ("openvino", 60, 16, True),
        ("openvino", 64, 8, False),
        ("openvino", 32, 3, False),
        ("openvino", 16, 4, False),
        ("openvino", 3, 16, False),
        ("openvino-avx2", 32, 8, False),
        ("onnxruntime", 32, 8, False),
    ],
)
def test_convolutions_that_a_library_computes_wrongly(name: str, channels: int, width: int, wrong: bool) -> None:
    kernel = f"kernel width {width} and {channels} input channels"
    reason = f"{name} gives wrong results for an INT8 convolution with {kernel} on CPUs with"
    assert profile(name).convolution_reason(channels, width) == (f"{reason} AMX" if wrong else None)


def test_matrix_vector_products() -> None:
    reason = "M = 1, a matrix-vector multiplication: slower quantized than in float on tensorrt"
    assert profile("tensorrt").gemm_reason(384, 384, 1) == reason
    assert profile("tensorrt").gemm_reason(384, 384, 0) is None
    assert profile("openvino").gemm_reason(384, 384, 1) is None


@pytest.mark.parametrize("name", ["tensorrt", "tensorrt-rtx"])
def test_the_product_alone_of_an_add(name: str) -> None:
    reason = profile(name).add_reason("lhs", "excluded by rule")
    assert reason == (
        f"its skip connection lhs is not quantized (excluded by rule): on {name} quantizing only the other operand "
        "gains nothing"
    )
    assert profile("openvino").add_reason("lhs", "excluded by rule") is None


@pytest.mark.parametrize(
    ("dtype", "head", "sequence", "reason"),
    [
        ("int8", 64, 512, None),
        ("int8", 0, 128, None),
        ("int8", 48, 128, "tensorrt has no fused attention in int8 for head size 48; supported sizes: 16, 32, 64"),
        ("int8", 32, 513, "tensorrt has no fused attention in int8 for 513 tokens; the longest sequence is 512"),
        ("fp8", 48, 4096, None),
        ("fp8", 40, 128, "tensorrt has no fused attention in fp8 for head size 40, which is not a multiple of 16"),
        ("uint8", 40, 4096, None),
    ],
)
def test_sizes_of_attention(dtype: str, head: int, sequence: int, reason: str | None) -> None:
    assert profile("tensorrt").attention_reason(dtype, head, sequence) == reason
    assert profile("openvino").attention_reason(dtype, head, sequence) is None


@pytest.mark.parametrize(
    ("name", "capability", "formats", "reason"),
    [
        ("tensorrt-rtx", "sm80", {"int8"}, None),
        ("tensorrt-rtx", "sm89", {"fp8"}, None),
        ("tensorrt-rtx", "sm80", {"fp8"}, "'sm80' has no FP8; use sm89 or later, or int8"),
        ("tensorrt-rtx", "sm99", set(), "tensorrt-rtx does not support 'sm99'; expected one of sm75, sm80, sm86, sm89"),
        ("tensorrt", "sm89", set(), "tensorrt builds for the GPU of this machine; remove 'sm89'"),
        ("openvino", "sm89", set(), "openvino runs on a CPU, which has no compute capability; remove 'sm89'"),
    ],
)
def test_compute_capabilities(name: str, capability: str, formats: set[str], reason: str | None) -> None:
    found = profile(name).capability_reason(capability, formats)
    assert found is reason is None or (found is not None and reason is not None and found.startswith(reason))


def test_the_capabilities_are_those_of_the_library() -> None:
    trt = pytest.importorskip("tensorrt_rtx_bindings", reason="needs enginequant[tensorrt-rtx]")
    members = trt.ComputeCapability.__members__
    known = {int(name.removeprefix("SM")) for name in members if name.startswith("SM")}
    assert profile("tensorrt-rtx").capabilities == known


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
        "import quantizer.plan.targets\n"
        "print(sorted({'torch', 'numpy', 'onnx'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
