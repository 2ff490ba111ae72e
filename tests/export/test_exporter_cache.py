"""What the exporter finds out once: its files are the same with it."""

from __future__ import annotations

import inspect
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Mlp

from quantizer import Quantizer
from quantizer.export.exporter_cache import exporter_cache

pytest.importorskip("onnx", reason="exporting needs enginequant[onnx]")
values = pytest.importorskip("onnxscript.values", reason="exporting needs enginequant[onnx]")

X = torch.linspace(-1, 1, 128).reshape(4, 32)


def test_the_second_export_finds_little_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxscript._internal import ast_utils
    from torch._export import utils
    from torch.onnx._internal.exporter import _schemas

    read: Counter[str] = Counter()
    for module, name in (
        (ast_utils, "get_src_and_ast"),
        (_schemas, "op_signature_from_function"),
        (utils, "_materialize_cpp_cia_ops"),
    ):
        does = getattr(module, name)

        def counted(*args: Any, name: str = name, does: Any = does, **keywords: Any) -> Any:
            read[name] += 1
            return does(*args, **keywords)

        monkeypatch.setattr(module, name, counted)
    quantizer = Quantizer(backend="openvino")
    model = Mlp().eval()
    quantizer.calibrate(model, [X])
    frozen = quantizer.quantize(model)

    def exported(name: str) -> bytes:
        quantizer.export(frozen, tmp_path / name, X)
        return (tmp_path / name).read_bytes()

    first = exported("first.onnx")
    read.clear()
    assert exported("second.onnx") == first
    assert read.pop("_materialize_cpp_cia_ops") == 1
    # Our own translations are made anew for each opset.
    assert read.pop("op_signature_from_function") < 50
    assert not read


def test_the_exporter_is_as_before_it() -> None:
    def source() -> Any:
        return inspect.getattr_static(values.TracedOnnxFunction, "function_ir")

    def in_the_context() -> None:
        with exporter_cache():
            assert source() is not before
            raise ValueError("of the model")

    before = source()
    with pytest.raises(ValueError, match="of the model"):
        in_the_context()
    assert source() is before


def test_a_release_that_reads_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(values.TracedOnnxFunction, "function_ir")
    with exporter_cache():
        assert not hasattr(values.TracedOnnxFunction, "function_ir")
