"""Other quantizers on MiniLM: each as its manual says, then kept to the sites that ours quantizes.

How many products each rounds on both sides is counted in what it made, because not all can be told to do as ours does:
NNCF and Model Optimizer leave the softmax's output, and with it the second product of an attention, in float, though
Model Optimizer rounds that product's other operand.

What is left of differences between them: NNCF takes asymmetric ranges for activations, moves outliers into weights
(SmoothQuant) and corrects biases; Model Optimizer takes the maximum; ONNX Runtime takes symmetric ranges here, the
maximum or a percentile, and neither it nor NNCF leaves padding out.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import openvino
import torch
import torch.nn.functional as F

from quantizer.engines import load_engine
from quantizer.export.exporter import export_onnx
from quantizer.tasks import Batch, Run, Task

__all__ = ["DYNAMIC", "PEERS", "BatchReader", "model_optimizer", "nncf_by_default", "nncf_model", "onnxruntime_file"]

_NO_PRODUCTS = ["Add", "Multiply", "Divide", "Subtract", "MVN", "Gather"]
"""OpenVINO's names of what NNCF would quantize besides."""

Peer = Callable[[torch.nn.Module, Task, list[Batch]], tuple[Run, int]]
"""From model, task and calibration batches to something that runs a batch, and how many products it rounds."""


def model_optimizer(model: torch.nn.Module, batches: list[Batch], *, matmuls: bool) -> torch.nn.Module:
    """A copy of the model with Model Optimizer's INT8 preset: maximum, weights per channel."""
    import modelopt.torch.quantization as mtq

    config = copy.deepcopy(mtq.INT8_DEFAULT_CFG)
    config["quant_cfg"].append({"quantizer_name": "*LayerNorm*", "enable": False})
    if matmuls:
        entry = {"quantizer_name": "*[qkv]_bmm_quantizer", "cfg": {"num_bits": 8, "axis": None}, "enable": True}
        config["quant_cfg"].append(entry)

    def run_batches(quantized: torch.nn.Module) -> None:
        with torch.no_grad():
            for batch in batches:
                quantized(**batch)

    quantized: torch.nn.Module = mtq.quantize(copy.deepcopy(model), config, run_batches)
    return quantized


def nncf_model(path: Path, batches: list[Batch], *, matmuls: bool) -> openvino.Model:
    """The float ONNX file with NNCF's transformer preset."""
    import nncf

    model = openvino.Core().read_model(path)
    two_activations = [
        node.get_friendly_name()
        for node in model.get_ops()
        if node.get_type_name() == "MatMul" and not any(_is_constant(value.get_node()) for value in node.input_values())
    ]
    return nncf.quantize(
        model,
        nncf.Dataset(batches, lambda batch: {name: tensor.numpy() for name, tensor in batch.items()}),
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=len(batches),
        ignored_scope=nncf.IgnoredScope(types=_NO_PRODUCTS, names=[] if matmuls else two_activations, validate=False),
    )


def nncf_by_default(path: Path, batches: list[dict[str, np.ndarray]], *, transformer: bool) -> openvino.Model:
    """The float ONNX file as NNCF quantizes it for who sets nothing but whether it is a transformer."""
    import nncf

    kind = {"model_type": nncf.ModelType.TRANSFORMER} if transformer else {}
    return nncf.quantize(openvino.Core().read_model(path), nncf.Dataset(batches), subset_size=len(batches), **kind)


def _rounded_by_nncf(value: openvino.Output) -> bool:
    """Activations have a FakeQuantize; weights are stored as integers, with what makes floats of them behind."""
    node = value.get_node()
    while node.get_type_name() in ("Convert", "Multiply", "Reshape", "Transpose"):
        node = node.input_value(0).get_node()
    return node.get_type_name() == "FakeQuantize" or node.get_element_type() == openvino.Type.i8


def _is_constant(node: openvino.Node) -> bool:
    if node.get_type_name() in ("Convert", "Transpose", "Reshape"):
        node = node.input_value(0).get_node()
    return bool(node.get_type_name() == "Constant")


class BatchReader:
    """Calibration data as ONNX Runtime takes it: ``get_next`` until None, all [B, S] of one S.

    Its histograms refuse tensors whose shapes change. Zeros are masked padding here, as what the tokenizer adds.
    """

    def __init__(self, batches: list[Batch]) -> None:
        longest = max(tensor.shape[1] for batch in batches for tensor in batch.values())
        self._rest = iter(
            [
                {name: F.pad(tensor, (0, longest - tensor.shape[1])).numpy() for name, tensor in batch.items()}
                for batch in batches
            ]
        )

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._rest, None)


def onnxruntime_file(path: Path, target: Path, batches: list[Batch], *, matmuls: bool, method: str) -> Path:
    """The float ONNX file with ONNX Runtime's static quantization: S8 on both sides, weights per channel."""
    import onnx
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    graph = onnx.load(path).graph
    weights = {tensor.name for tensor in graph.initializer}
    products = [node for node in graph.node if node.op_type in ("MatMul", "Gemm")]
    quantize_static(
        path,
        target,
        BatchReader(batches),
        quant_format=QuantFormat.QDQ,
        nodes_to_quantize=[node.name for node in products if matmuls or weights & set(node.input)],
        per_channel=True,
        activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8,
        calibrate_method=CalibrationMethod[method],
        extra_options={
            "ActivationSymmetric": True,
            "WeightSymmetric": True,
            # By default it rounds what products give, too.
            "OpTypesToExcludeOutputQuantization": ["MatMul", "Gemm"],
        },
    )
    return target


def _rounded_by_onnxruntime(path: Path) -> int:
    import onnx

    graph = onnx.load(path).graph
    rounded = {name for node in graph.node if node.op_type == "DequantizeLinear" for name in node.output}
    return sum(rounded >= set(node.input[:2]) for node in graph.node if node.op_type in ("MatMul", "Gemm"))


def _model_optimizer(*, matmuls: bool) -> Peer:
    def make(model: torch.nn.Module, _: Task, batches: list[Batch]) -> tuple[Run, int]:
        quantized = model_optimizer(model, batches, matmuls=matmuls)
        # The weight of a linear and the key of an attention meet what is rounded, too; a value meets the softmax.
        ends = ("weight_quantizer", "k_bmm_quantizer")
        rounded = sum(name.endswith(ends) and part.is_enabled for name, part in quantized.named_modules())
        return (lambda batch: quantized(**batch)), rounded

    return make


def _nncf(*, matmuls: bool) -> Peer:
    def make(model: torch.nn.Module, task: Task, batches: list[Batch]) -> tuple[Run, int]:
        with tempfile.TemporaryDirectory() as folder:
            path = export_onnx(model, Path(folder) / "float.onnx", task.example(), opset=20, dtype=torch.float32)
            quantized = nncf_model(path, batches, matmuls=matmuls)
            products = [node for node in quantized.get_ops() if node.get_type_name() == "MatMul"]
            rounded = sum(all(map(_rounded_by_nncf, node.input_values())) for node in products)
            compiled = openvino.Core().compile_model(quantized, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        names = [value.get_any_name() for value in compiled.inputs]
        return (lambda batch: {"last_hidden_state": compiled({n: batch[n].numpy() for n in names})[0]}), rounded

    return make


def _onnxruntime(*, matmuls: bool, method: str) -> Peer:
    def make(model: torch.nn.Module, task: Task, batches: list[Batch]) -> tuple[Run, int]:
        with tempfile.TemporaryDirectory() as folder:
            path = export_onnx(model, Path(folder) / "float.onnx", task.example(), opset=20, dtype=torch.float32)
            target = onnxruntime_file(path, Path(folder) / "int8.onnx", batches, matmuls=matmuls, method=method)
            engine = load_engine("onnxruntime", target, threads=2)
            rounded = _rounded_by_onnxruntime(target)
        return (lambda batch: engine({name: batch[name].numpy() for name in engine.input_names})), rounded

    return make


def _onnxruntime_dynamic(model: torch.nn.Module, task: Task, _: list[Batch]) -> tuple[Run, int]:
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as folder:
        path = export_onnx(model, Path(folder) / "float.onnx", task.example(), opset=20, dtype=torch.float32)
        target = Path(folder) / "int8.onnx"
        quantize_dynamic(path, target, per_channel=True, weight_type=QuantType.QInt8)
        engine = load_engine("onnxruntime", target, threads=2)
        rounded = sum(node.op_type == "MatMulInteger" for node in onnx.load(target).graph.node)
    return (lambda batch: engine({name: batch[name].numpy() for name in engine.input_names})), rounded


DYNAMIC: dict[str, Peer] = {"ONNX Runtime, at run time": _onnxruntime_dynamic}
"""Peers that take each range at run time, by name."""

PEERS: dict[str, dict[str, Peer]] = {
    placement: {
        "Model Optimizer": _model_optimizer(matmuls=matmuls),
        "NNCF": _nncf(matmuls=matmuls),
        "ONNX Runtime, MinMax": _onnxruntime(matmuls=matmuls, method="MinMax"),
        "ONNX Runtime, Percentile": _onnxruntime(matmuls=matmuls, method="Percentile"),
    }
    for placement, matmuls in (("linears", False), ("linears and matmuls", True))
}
"""By placement and name."""
