"""ONNX files, as ``quantizer check`` and ``quantizer show`` read them."""

from __future__ import annotations

import io
import random
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import torch
from rich.console import Console
from torch import nn

from quantizer import from_onnx
from quantizer.check import check_file
from quantizer.engines import InputSizes, inspect_file
from quantizer.report.terminal import print_inspection
from torture import mutations
from torture.kinds import Kind, kind
from torture.readers_engines import exported

_TARGETS = ("tensorrt", "openvino", "onnxruntime")
_NUMBERS = (-1, 0, 1, 2, 7, 99, 2**31 - 1)


def _graph(content: bytes, pick: random.Random) -> bytes:
    """A file that parses, and whose graph does not fit together."""
    proto = onnx.ModelProto.FromString(content)
    for _ in range(pick.choice((1, 1, 2, 5))):
        _damage(proto, pick)
    return proto.SerializeToString()


def _damage(proto: Any, pick: random.Random) -> None:
    graph = proto.graph
    node = pick.choice(graph.node)
    names = [name for entry in graph.node for name in (*entry.input, *entry.output)]
    match pick.randrange(14):
        case 0 if node.input:
            del node.input[pick.randrange(len(node.input))]
        case 1 if node.output:
            del node.output[pick.randrange(len(node.output))]
        case 2 if node.input:
            node.input[pick.randrange(len(node.input))] = pick.choice((*names, "", "nowhere"))
        case 3 if node.output:
            node.output[pick.randrange(len(node.output))] = pick.choice((*names, "", "nowhere"))
        case 4:
            kinds = ("Softmax", "MatMul", "Conv", "Constant", "Identity", "Cast", "Add", "Nothing", "", "If", "Gemm")
            node.op_type = pick.choice((*kinds, pick.choice(graph.node).op_type, "QuantizeLinear", "DequantizeLinear"))
        case 5 if node.attribute:
            entry = pick.choice(node.attribute)
            entry.type = pick.choice((0, 1, 2, 3, 4, 5, 6, 7, 8))
        case 6 if node.attribute:
            entry = pick.choice(node.attribute)
            entry.i = pick.choice(_NUMBERS)
        case 7 if graph.initializer:
            entry = pick.choice(graph.initializer)
            entry.data_type = pick.choice((0, 1, 2, 3, 7, 9, 10, 16, 17, 22, 30, 99))
        case 8 if graph.initializer:
            entry = pick.choice(graph.initializer)
            entry.dims[:] = [pick.choice(_NUMBERS) for _ in range(pick.randrange(4))]
        case 9 if graph.initializer:
            entry = pick.choice(graph.initializer)
            entry.raw_data = entry.raw_data[: pick.randrange(len(entry.raw_data) + 1)]
        case 10 if graph.initializer:
            del graph.initializer[pick.randrange(len(graph.initializer))]
        case 11:
            value = pick.choice((*graph.input, *graph.output, *graph.value_info))
            value.type.tensor_type.elem_type = pick.choice((0, 1, 9, 30, 99))
        case 12:
            value = pick.choice((*graph.input, *graph.output, *graph.value_info))
            for dimension in value.type.tensor_type.shape.dim:
                dimension.dim_value = pick.choice(_NUMBERS)
        case _:
            if pick.random() < 0.5 and proto.opset_import:
                proto.opset_import[0].version = pick.choice((0, 1, 9, 13, 99, -1))
            else:
                graph.node.append(pick.choice(graph.node))


def _check(folder: Path) -> None:
    for target in _TARGETS:
        for finding in check_file(folder / "model.onnx", target):
            str(finding).encode()


def _show(folder: Path) -> None:
    written = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    print_inspection(inspect_file(folder / "model.onnx", sizes=InputSizes(2, 4)), Console(file=written))
    written.flush()


def _make(folder: Path) -> None:
    exported("openvino", folder / "model.onnx")


def _make_float(folder: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 6)).eval()
    torch.onnx.export(
        net, (torch.randn(2, 2, 6, 6),), folder / "model.onnx", dynamo=True, external_data=False, verbose=False
    )


for _name, _read in (("check", _check), ("show", _show)):
    kind(Kind(name=_name, make=_make, files=("model.onnx",), how=(mutations.raw, _graph), read=partial(_read)))
kind(
    Kind(
        name="from-onnx",
        make=_make_float,
        files=("model.onnx",),
        how=(mutations.raw, _graph),
        read=lambda folder: from_onnx(folder / "model.onnx"),
    )
)
