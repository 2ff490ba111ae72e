"""ONNX graphs of tests: made from ONNX's text form, listed, and computed node by node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest


def graph(inputs: str, outputs: str, nodes: str, opset: int = 21, **constants: np.ndarray) -> Any:
    """An ``onnx_ir`` model from ONNX's text form, with constants by name."""
    onnx = pytest.importorskip("onnx", reason="exporting needs enginequant[onnx]")
    ir = pytest.importorskip("onnx_ir", reason="exporting needs enginequant[onnx]")
    text = f'<ir_version: 10, opset_import: ["" : {opset}]> g ({inputs}) => ({outputs}) {{ {nodes} }}'
    proto = onnx.parser.parse_model(text)
    for name, array in constants.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


def operators(model: Any) -> list[str]:
    """The operators of a file or of an ``onnx_ir`` model, in their order."""
    onnx = pytest.importorskip("onnx", reason="exporting needs enginequant[onnx]")
    nodes = onnx.load(model).graph.node if isinstance(model, Path) else model.graph
    return [node.op_type for node in nodes]


def computed(model: Any, **inputs: np.ndarray) -> list[np.ndarray]:
    """What ONNX's reference computes of a model that its checker takes."""
    onnx = pytest.importorskip("onnx", reason="exporting needs enginequant[onnx]")
    ir = pytest.importorskip("onnx_ir", reason="exporting needs enginequant[onnx]")
    reference = pytest.importorskip("onnx.reference", reason="exporting needs enginequant[onnx]")
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    return list(reference.ReferenceEvaluator(proto).run(None, inputs))


def plain_session(path: Path | str | bytes) -> Any:
    """ONNX Runtime that computes a file node by node, as it is written."""
    ort = pytest.importorskip("onnxruntime", reason="running ONNX needs enginequant[onnxruntime]")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    file = path if isinstance(path, bytes) else str(path)
    return ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def node_by_node(path: Path | str | bytes, *inputs: Any) -> list[Any]:
    """What a file gives for tensors or arrays in the order of its inputs."""
    session = plain_session(path)
    names = [entry.name for entry in session.get_inputs()]
    results: list[Any] = session.run(None, {name: np.asarray(value) for name, value in zip(names, inputs, strict=True)})
    return results
