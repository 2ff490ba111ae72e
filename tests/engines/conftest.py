"""Small ONNX files with Q/DQ, and what they compute, in numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

onnx = pytest.importorskip("onnx", reason="the engine tests write ONNX files: install quantizer[onnx]")

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
    """``write(dtype=np.float32, k=64, n=32, dims=("batch", "sequence"), tail=())``; tail: operators after it."""

    def write(
        dtype: type = np.float32,
        k: int = 64,
        n: int = 32,
        dims: tuple[str | int | None, ...] = ("batch", "sequence"),
        tail: tuple[str, ...] = (),
        storage: type | None = None,
    ) -> QdqModel:
        random = np.random.default_rng(0)
        storage = storage or np.int8
        weight = random.integers(-127, 128, (k, n)).astype(np.int8)
        weight_scale = random.uniform(0.001, 0.002, n).astype(dtype)
        scale = 0.02
        tensors = {
            "s": np.array(scale, dtype),
            "z": np.array(0, storage),
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
