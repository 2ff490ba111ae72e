"""Small ONNX files with Q/DQ, and what they compute, in numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

onnx = pytest.importorskip("onnx", reason="the engine tests write ONNX files: install enginequant[onnx]")

FloatArray = npt.NDArray[np.floating]


@dataclass(frozen=True)
class QdqModel:
    """One product with S8 Q/DQ on its input and a stored INT8 weight: x [batch, sequence, k] gives y [.., n]."""

    path: Path
    weight: npt.NDArray[np.int8]
    weight_scale: FloatArray
    scale: float

    def input(self, batch: int, sequence: int, dtype: type = np.float32) -> FloatArray:
        """Values that lie well inside a rounding cell, so that every engine rounds them the same way."""
        random = np.random.default_rng(1)
        shape = (batch, sequence, self.weight.shape[0])
        steps = random.integers(-140, 141, shape) + random.uniform(-0.3, 0.3, shape)
        return (steps * self.scale).astype(dtype)

    def expected(self, x: FloatArray) -> FloatArray:
        """The product of what quantization makes of x and the weight."""
        quantized = np.clip(np.round(x / self.scale), -128, 127)
        return quantized * self.scale @ (self.weight * self.weight_scale)


Writer = Callable[..., QdqModel]


@pytest.fixture(scope="session")
def write_qdq(tmp_path_factory: pytest.TempPathFactory) -> Writer:
    """``write(dtype=np.float32, k=64, n=32, dims=("batch", "sequence"), tail=())``; tail: operators after it.

    ``storage`` is the type of the steps; ``unsigned`` stores those of the input as U8 with zero point 128.
    """

    def write(
        dtype: type = np.float32,
        k: int = 64,
        n: int = 32,
        dims: tuple[str | int | None, ...] = ("batch", "sequence"),
        tail: tuple[str, ...] = (),
        storage: type | None = None,
        unsigned: bool = False,
    ) -> QdqModel:
        random = np.random.default_rng(0)
        storage = storage or np.int8
        # Seven bits: without VNNI a CPU adds two products of bytes in 16 bits.
        weight = random.integers(-64, 65, (k, n)).astype(np.int8)
        weight_scale = random.uniform(0.001, 0.002, n).astype(dtype)
        scale = 0.02
        tensors = {
            "s": np.array(scale, dtype),
            "z": np.array(128, np.uint8) if unsigned else np.array(0, storage),
            "w": weight.astype(storage),
            "ws": weight_scale,
            "wz": np.zeros(n, storage),
        }
        node = onnx.helper.make_node
        nodes = [
            node("QuantizeLinear", ["x", "s", "z"], ["q"], name="layer/quantize"),
            node("DequantizeLinear", ["q", "s", "z"], ["dq"], name="layer/dequantize"),
            node("DequantizeLinear", ["w", "ws", "wz"], ["wd"], name="layer/weight", axis=1),
            node("MatMul", ["dq", "wd"], ["m"], name="layer/matmul"),
        ]
        last = "m"
        for index, operator in enumerate(tail):
            nodes.append(node(operator, [last], [f"t{index}"], name=f"tail/{index}"))
            last = f"t{index}"
        nodes.append(node("Identity", [last], ["y"], name="out"))
        element = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        graph = onnx.helper.make_graph(
            nodes,
            "qdq",
            [onnx.helper.make_tensor_value_info("x", element, [*dims, k])],
            [onnx.helper.make_tensor_value_info("y", element, [*dims, n])],
            [onnx.numpy_helper.from_array(array, name) for name, array in tensors.items()],
        )
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
        path = tmp_path_factory.mktemp("onnx") / "model.onnx"
        onnx.save(model, path)
        return QdqModel(path, weight, weight_scale, scale)

    return write


@pytest.fixture(scope="session")
def qdq(write_qdq: Writer) -> QdqModel:
    """FP32 and S8, dynamic batch and sequence: what OpenVINO and ONNX Runtime take."""
    return write_qdq()


@pytest.fixture(scope="session")
def qdq_half(write_qdq: Writer) -> QdqModel:
    """FP16 and S8, dynamic batch and sequence: what TensorRT takes."""
    return write_qdq(dtype=np.float16)


@pytest.fixture(scope="session")
def qdq_unsigned(write_qdq: Writer) -> QdqModel:
    """FP32 with a U8 input, which ONNX Runtime fuses into one integer product."""
    return write_qdq(unsigned=True)


def _saved(path: Path, nodes: list[object], tensors: dict[str, object], dims: list[object], out: list[object]) -> Path:
    graph = onnx.helper.make_graph(
        nodes,
        "graph",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, dims)],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, out)],
        [onnx.numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10), path)
    return path


@pytest.fixture
def write_float(tmp_path: Path) -> Callable[..., Path]:
    """``write(weight_only=False, mask=False)``: a float product [batch, sequence, 64] to [.., 32].

    With ``weight_only`` its weight is dequantized; with ``mask`` a comparison decides what comes out.
    """

    def write(weight_only: bool = False, mask: bool = False) -> Path:
        node = onnx.helper.make_node
        steps = np.random.default_rng(0).integers(-127, 128, (64, 32)).astype(np.int8)
        tensors: dict[str, object] = {"zero": np.array(0, np.float32)}
        nodes = []
        if weight_only:
            tensors |= {"w8": steps, "s": np.full(32, 0.01, np.float32)}
            nodes.append(node("DequantizeLinear", ["w8", "s"], ["w"], name="weight", axis=1))
        else:
            tensors["w"] = steps.astype(np.float32)
        nodes.append(node("MatMul", ["x", "w"], ["m"], name="layer/matmul"))
        nodes.append(node("Greater", ["m", "zero"], ["b"], name="compare"))
        nodes.append(node("Not", ["b"], ["c"], name="not"))
        last = node("Where", ["c", "m", "zero"], ["y"], name="where") if mask else node("Tanh", ["m"], ["y"], name="t")
        nodes = [n for n in nodes if mask or n.name not in ("compare", "not")]
        return _saved(
            tmp_path / "float.onnx", [*nodes, last], tensors, ["batch", "sequence", 64], ["batch", "sequence", 32]
        )

    return write


@pytest.fixture
def write_convolution(tmp_path: Path) -> Callable[[], Path]:
    """``write()``: a convolution in two groups with Q/DQ on both operands, [batch, 4, 8, 8] to [batch, 8, 6, 6]."""

    def write() -> Path:
        node = onnx.helper.make_node
        steps = np.random.default_rng(0).integers(-127, 128, (8, 2, 3, 3)).astype(np.int8)
        tensors: dict[str, object] = {
            "s": np.array(0.02, np.float32),
            "z": np.array(128, np.uint8),
            "w": steps,
            "ws": np.full(8, 0.01, np.float32),
            "wz": np.zeros(8, np.int8),
        }
        nodes = [
            node("QuantizeLinear", ["x", "s", "z"], ["q"], name="quantize"),
            node("DequantizeLinear", ["q", "s", "z"], ["dq"], name="dequantize"),
            node("DequantizeLinear", ["w", "ws", "wz"], ["wd"], name="weight", axis=0),
            node("Conv", ["dq", "wd"], ["c"], name="layer/conv", group=2),
            # ONNX Runtime has an integer convolution that writes steps, and none that writes floats.
            node("QuantizeLinear", ["c", "s", "z"], ["cq"], name="quantize 2"),
            node("DequantizeLinear", ["cq", "s", "z"], ["y"], name="dequantize 2"),
        ]
        return _saved(tmp_path / "conv.onnx", nodes, tensors, ["batch", 4, 8, 8], ["batch", 8, 6, 6])

    return write
