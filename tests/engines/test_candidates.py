"""The engines for this machine's CPU: which there are, in which order, and what each is built with."""

from __future__ import annotations

from importlib.machinery import ModuleSpec

import pytest
import torch

from quantizer.engines import for_this_cpu
from quantizer.engines.for_this_cpu import Variant, cpu_candidates, cpu_variants
from quantizer.errors import EngineError
from quantizer.utils import cpu

VNNI = {"avx2", "avx512f", "avx512_vnni"}


@pytest.fixture(autouse=True)
def _all_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(for_this_cpu, "find_spec", lambda name: ModuleSpec(name, None))


def _on(flags: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (for_this_cpu, cpu):
        monkeypatch.setattr(module, "cpu_flags", lambda: flags)


def test_the_variant_for_this_cpu_and_the_first_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    _on(VNNI, monkeypatch)
    assert cpu_candidates() == (("openvino", "onnxruntime", "torch"), ())
    # OpenVINO's INT8 is slower than its float there.
    _on({"avx2"}, monkeypatch)
    assert cpu_candidates() == (("onnxruntime-avx2", "openvino-avx2", "torch-avx2"), ())
    assert cpu_candidates(["torch", "openvino"])[0] == ("torch-avx2", "openvino-avx2")


def test_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(for_this_cpu, "find_spec", lambda name: None if name != "torch" else ModuleSpec(name, None))
    found, missing = cpu_candidates()
    assert [name.removesuffix("-avx2") for name in found] == ["torch"]
    assert "openvino: pip install 'enginequant[openvino]'" in missing
    monkeypatch.setattr(torch._C, "_has_mkldnn", False)
    with pytest.raises(EngineError, match=r"no engine for a CPU is installed.*torch: torch .* without oneDNN"):
        cpu_candidates()


def _names(variants: tuple[Variant, ...]) -> list[str]:
    return [variant.name for variant in variants]


def test_the_rest_in_bf16_where_the_cpu_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _on(VNNI, monkeypatch)
    both = ("openvino", "onnxruntime")
    plain = ["openvino float32", "openvino int8", "onnxruntime float32", "onnxruntime int8"]
    assert _names(cpu_variants(both, dtype="int8")) == plain
    for flag in ("avx512_bf16", "amx_bf16"):
        _on({*VNNI, flag}, monkeypatch)
        assert _names(cpu_variants(both, dtype="int8")) == [
            "openvino float32",
            "openvino bfloat16",
            "openvino int8",
            "openvino int8+bfloat16",
            "onnxruntime float32",
            "onnxruntime int8",
        ]
    # What was asked for stays, and so do the types of a model that is not quantized.
    asked = cpu_variants(both, dtype="int8", precision="float32")
    assert _names(asked) == plain
    assert [one.precision for one in asked] == ["float32", "float32", None, None]
    asked = cpu_variants(("openvino",), dtype="int8", precision="bfloat16")
    assert _names(asked) == ["openvino bfloat16", "openvino int8+bfloat16"]
    assert _names(cpu_variants(("openvino",), dtype=None)) == ["openvino float32"]


def test_ranges_at_run_time_where_there_are_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    _on(VNNI, monkeypatch)
    names = ("openvino", "openvino-avx2", "onnxruntime", "torch")
    found = [one for one in cpu_variants(names, dtype="int8", dynamic=True) if one.dynamic]
    assert _names(tuple(found)) == ["openvino int8 dynamic", "onnxruntime int8 dynamic"]
    assert [one.file_name for one in found] == ["openvino-int8-dynamic", "onnxruntime-int8-dynamic"]


def test_torch_is_compiled_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    _on(VNNI, monkeypatch)
    roads = {one.compiled for one in cpu_variants(("torch", "openvino"), dtype="int8", named=False)}
    assert roads == {False, None}
    for names, named in ((("torch", "openvino"), True), (("torch",), False)):
        assert {one.compiled for one in cpu_variants(names, dtype="int8", named=named)} == {None}
    assert {one.compiled for one in cpu_variants(("torch",), dtype="int8", compiled=True)} == {True}
