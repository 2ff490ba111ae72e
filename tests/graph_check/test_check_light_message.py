"""Files whose large weights are not read with the rest: the same findings, from less memory."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from qdq_graphs import onnx

from quantizer.check import check_file, checked_file
from quantizer.errors import ExportError
from quantizer.export.qdq import onnx_file as module
from quantizer.export.qdq.onnx_file import light_message
from quantizer.export.qdq.structure import structural_fault
from quantizer.plan.targets import profile

_SIZE = 320


def _proto(**options: Any) -> Any:
    """A linear with its weight as codes of 100 KiB behind a DequantizeLinear, and a float bias."""
    rng = np.random.default_rng(0)
    helper, numpy_helper, tensor = onnx.helper, onnx.numpy_helper, onnx.TensorProto
    codes = rng.integers(-127, 128, (_SIZE, _SIZE)).astype(np.int8)
    constants = [
        numpy_helper.from_array(codes, "codes"),
        numpy_helper.from_array(np.full(_SIZE, 0.01, np.float32), "scale"),
        numpy_helper.from_array(np.float32(0.02), "in_scale"),
        numpy_helper.from_array(np.int8(0), "zero"),
        numpy_helper.from_array(rng.normal(size=(_SIZE, _SIZE)).astype(np.float32), "table"),
    ]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "in_scale", "zero"], ["xq"], "q"),
        helper.make_node("DequantizeLinear", ["xq", "in_scale", "zero"], ["xd"], "dq"),
        helper.make_node("DequantizeLinear", ["codes", "scale"], ["w"], "dw", axis=1),
        helper.make_node("MatMul", ["xd", "w"], ["y"], "product"),
        helper.make_node("MatMul", ["y", "table"], ["z"], "float_product"),
    ]
    inputs = [helper.make_tensor_value_info("x", tensor.FLOAT, ["batch", _SIZE])]
    inputs += [helper.make_tensor_value_info(name, kind, [_SIZE, _SIZE]) for name, kind in options.get("inputs", ())]
    outputs = [helper.make_tensor_value_info("z", tensor.FLOAT, ["batch", _SIZE])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def _said(path: Path) -> Any:
    """What a check says of a file: its findings or its error."""
    try:
        return check_file(path, "openvino")
    except ExportError as error:
        return str(error)


def _said_of_the_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(checked_file, "light_message", lambda path: None)
        return _said(path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "m.onnx"
    onnx.save(_proto(), path)
    return path


def test_large_data_is_not_read_and_is_found(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = light_message(file)
    assert found is not None
    message, held = found
    assert set(held) == {"codes", "table"}
    assert len(message) < 4096
    data, whole = file.read_bytes(), onnx.load(file)
    for tensor in whole.graph.initializer:
        if tensor.name in held:
            offset, length = held[tensor.name]
            assert data[offset : offset + length] == tensor.raw_data
            tensor.ClearField("raw_data")
    light = onnx.load_model_from_string(message)
    assert light == whole, "all else is the same"
    assert structural_fault(onnx, light, {name: place.length for name, place in held.items()}) is None
    subject = checked_file.read_subject(file, profile("openvino"))
    codes = subject.model.graph.initializers["codes"].const_value.numpy()
    assert np.array_equal(codes, onnx.numpy_helper.to_array(_proto().graph.initializer[0]))
    assert not subject.refused_data
    assert _said(file) == _said_of_the_whole(file, monkeypatch)


@pytest.mark.parametrize("name", ["codes", "table"])
def test_data_of_another_length(file: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    proto = onnx.load(file)
    (tensor,) = (tensor for tensor in proto.graph.initializer if tensor.name == name)
    tensor.raw_data = tensor.raw_data[:-4]
    file.write_bytes(proto.SerializeToString())
    assert "bytes, but its shape [320, 320]" in str(_said(file))
    assert _said(file) == _said_of_the_whole(file, monkeypatch)


def test_initializers_that_are_inputs_keep_their_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(_proto(inputs=[("codes", onnx.TensorProto.INT8), ("table", onnx.TensorProto.FLOAT)]), path)
    assert _said(path) == _said_of_the_whole(path, monkeypatch)


def test_other_layouts_are_read_as_a_whole(file: Path) -> None:
    data, proto = file.read_bytes(), onnx.load(file)
    # protobuf makes one message of two that stand one after another.
    twice = onnx.ModelProto()
    twice.graph.name = "more"
    file.write_bytes(data + twice.SerializeToString())
    assert light_message(file) is None
    proto.graph.initializer.append(proto.graph.initializer[0])
    file.write_bytes(proto.SerializeToString())
    found = light_message(file)
    assert [len(tensor.raw_data) > 0 for tensor in onnx.load_model_from_string(found[0]).graph.initializer] == [
        *[False, True, True, True, False, True]
    ], "the second of one name keeps its data"
    file.write_bytes(data[: module._LARGE - 1])
    assert light_message(file) is None


@pytest.mark.parametrize("seed", range(40))
def test_damage_is_told_as_of_the_whole_file(file: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    choice, data = random.Random(seed), bytearray(file.read_bytes())
    found = light_message(file)
    inside = {place for offset, length in found[1].values() for place in range(offset, offset + length)}
    outside = [place for place in range(len(data)) if place not in inside]
    if seed % 4 == 0:
        del data[choice.choice(outside) :]
    for _ in range(choice.choice([1, 1, 3])):
        place = choice.choice(outside)
        if place < len(data):
            data[place] = choice.randrange(256)
    file.write_bytes(data)
    assert _said(file) == _said_of_the_whole(file, monkeypatch)
