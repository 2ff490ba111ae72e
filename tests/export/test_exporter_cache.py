"""What the exporter finds out once: its files are the same with it."""

from __future__ import annotations

import inspect
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Mlp
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.export import quick_exporter
from quantizer.export.exporter import export_onnx
from quantizer.export.quick_exporter import exporter_cache

onnx = pytest.importorskip("onnx", reason="exporting needs enginequant[onnx]")
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


class _SeveralTypes(nn.Module):
    """Types that are promoted: of scalars, of tensors, of sums, and of what is promoted before."""

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        seen = x > 0
        shares = counts / 3 + counts * 0.5
        total = seen.sum(-1) + counts + seen[:, 0]
        half = (x.half() + counts[:, None]) * 2
        y = torch.where(seen, x, 0) + counts[:, None] * half + shares[:, None]
        return y.sqrt() + total[:, None] + torch.sqrt(counts)[:, None] + (counts > 2)[:, None] * x


def test_types_are_promoted_as_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, example = _SeveralTypes().eval(), (X, torch.arange(1, 5))

    def exported(name: str) -> bytes:
        export_onnx(model, tmp_path / name, example, opset=20, dtype=torch.float32)
        return (tmp_path / name).read_bytes()

    with monkeypatch.context() as alone:
        alone.setattr(quick_exporter, "exporter_cache", nullcontext)
        without = exported("without.onnx")
    with_it = exported("with.onnx")
    assert with_it == without
    nodes = Counter(node.op_type for node in onnx.load_from_string(with_it).graph.node)
    assert nodes["Cast"] > 5


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
