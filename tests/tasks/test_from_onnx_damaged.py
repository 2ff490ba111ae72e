"""Damaged ONNX files: whoever reads one gives an error of ours that says what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="install enginequant[onnx]")
pytest.importorskip("onnx_ir", reason="install enginequant[onnx]")

from quantizer import from_onnx
from quantizer.check import check_file
from quantizer.engines import build_engine, inspect_file, load_engine
from quantizer.errors import QuantizerError

node = onnx.helper.make_node


def model() -> Any:
    """A product, a sum that is cut in two, and an LSTM without a bias."""
    random = np.random.default_rng(0)
    shapes = {"w": (4, 6), "lw": (1, 12, 6), "lr": (1, 12, 3)}
    tensors = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    nodes = [
        node("MatMul", ["x", "w"], ["m"], name="product"),
        node("Split", ["m"], ["a", "b"], name="split", axis=-1, num_outputs=2),
        node("Add", ["a", "b"], ["sum"], name="sum"),
        node("LSTM", ["m", "lw", "lr"], ["y"], name="lstm", hidden_size=3),
    ]
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        nodes,
        "graph",
        [value("x", onnx.TensorProto.FLOAT, ["steps", "batch", 4])],
        [value("sum", onnx.TensorProto.FLOAT, None), value("y", onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )
    made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    return onnx.shape_inference.infer_shapes(made)


def _no_node(proto: Any) -> None:
    del proto.graph.node[0]


def _no_weight(proto: Any) -> None:
    del proto.graph.initializer[0]


def _nowhere(proto: Any) -> None:
    proto.graph.output[0].name = "nowhere"


def _turned(proto: Any) -> None:
    proto.graph.initializer[0].dims[:] = [6, 4]


def _bytes(proto: Any) -> None:
    proto.graph.node[2].attribute.extend([onnx.helper.make_attribute("note", b"\xff\xfe")])


def _parts(proto: Any) -> None:
    proto.graph.node[1].attribute[1].i = 1


def _no_attribute(proto: Any) -> None:
    del proto.graph.node[3].attribute[:]


def _axis(proto: Any) -> None:
    proto.graph.node[1].attribute[0].i = 9


def _no_type(proto: Any) -> None:
    proto.graph.input[0].type.Clear()


DAMAGE = [_no_node, _no_weight, _nowhere, _turned, _bytes, _parts, _no_attribute, _axis, _no_type]
READERS: dict[str, Callable[[Path], object]] = {
    "from_onnx": from_onnx,
    "check": lambda path: check_file(path, "openvino"),
    "show": inspect_file,
    **{name: lambda path, name=name: load_engine(name, path) for name in ("openvino", "onnxruntime", "torch")},
    "build": lambda path: build_engine("torch", path, path.with_suffix(".engine")),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("damage", DAMAGE, ids=[damage.__name__ for damage in DAMAGE])
def test_nothing_but_an_error_of_ours_comes_of_it(damage: Callable[[Any], None], reader: str, tmp_path: Path) -> None:
    if reader in ("openvino", "onnxruntime"):
        pytest.importorskip(reader, reason=f"install enginequant[{reader}]")
    if reader == "onnxruntime" and damage is _parts:
        pytest.skip("ONNX Runtime ends the process there")
    proto = model()
    damage(proto)
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    try:
        READERS[reader](path)
    except QuantizerError as error:
        assert str(path) in str(error) or path.name in str(error)  # noqa: PT017 some readers can do with it


def test_what_is_wrong_is_told(tmp_path: Path) -> None:
    proto, path = model(), tmp_path / "model.onnx"
    _no_node(proto)
    path.write_bytes(proto.SerializeToString())
    for read in (from_onnx, lambda path: load_engine("torch", path)):
        with pytest.raises(QuantizerError, match=r"model\.onnx is damaged or was written wrongly: .*input 'm' of"):
            read(path)


def test_an_lstm_may_have_no_bias(tmp_path: Path) -> None:
    import torch

    ort = pytest.importorskip("onnxruntime", reason="install enginequant[onnxruntime]")
    path = tmp_path / "model.onnx"
    onnx.save(model(), path)
    x = torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(0))
    expected = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(["y"], {"x": x.numpy()})[0]
    np.testing.assert_allclose(from_onnx(path)(x)["y"].detach().numpy(), expected, atol=1e-5)
