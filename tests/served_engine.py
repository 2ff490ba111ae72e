"""Engines of one operator with the facts that a server needs."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx

from quantizer.engines.engine_file import write_engine
from quantizer.export.qdq.structure import Signature, Value, read_signature
from quantizer.pipeline.triton import ServedEngine

TEXTS = Signature(
    inputs=tuple(Value(name, "int64", ("batch", "sequence")) for name in ("input_ids", "attention_mask")),
    outputs=(Value("logits", "float32", ("batch", 2)), Value("hidden", "float32", ("batch", "sequence", 32))),
)


def write_onnx(path: Path, operators: tuple[str, ...] = (), external: bool = False) -> Path:
    """An ONNX file that adds a constant to its rows, and then applies operators of one input."""
    tensor = onnx.TensorProto.FLOAT
    bias = onnx.numpy_helper.from_array(np.arange(4, dtype=np.float32), "bias")
    nodes = [onnx.helper.make_node("Add", ["x", "bias"], ["0"])]
    nodes += [onnx.helper.make_node(kind, [str(n)], [str(n + 1)]) for n, kind in enumerate(operators)]
    nodes.append(onnx.helper.make_node("Identity", [str(len(operators))], ["y"]))
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info("x", tensor, ["batch", 4])],
        [onnx.helper.make_tensor_value_info("y", tensor, ["batch", 4])],
        [bias],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    where = {"save_as_external_data": True, "location": f"{path.name}.data", "size_threshold": 0} if external else {}
    onnx.save(model, str(path), **where)
    return path


def served(folder: Path, backend: str, **changes: object) -> ServedEngine:
    """An engine whose files are an ONNX file of one operator, or made-up bytes with a checksum behind them."""
    path, engine = write_onnx(folder / "model.onnx"), folder / "model.engine"
    if backend.startswith("tensorrt"):
        write_engine(engine, memoryview(b"ftrt" + bytes(4000)))
    else:
        shutil.copy(path, engine)
    made = ServedEngine(
        name="m",
        backend=backend,
        onnx=path,
        engine=engine,
        signature=read_signature(path),
        dimensions={"batch": (1, 8, 32), "sequence": (16, 128, 512)},
        threads=2,
    )
    return replace(made, **changes)  # type: ignore[arg-type]
