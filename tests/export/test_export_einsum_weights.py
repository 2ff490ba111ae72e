"""Weights of three and more axes: engines take the file, and compute what the proxy computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx_graphs import computed, operators
from torch import nn
from toy_nets import net

from quantizer import Quantizer
from quantizer.export.passes import run_passes
from quantizer.export.passes.einsum import EinsumWeights

onnx = pytest.importorskip("onnx", reason="exporting needs enginequant[onnx]")
ir = pytest.importorskip("onnx_ir", reason="exporting needs enginequant[onnx]")

pytestmark = pytest.mark.usefixtures("exact_byte_products")

SIZES = {"b": 2, "t": 6, "h": 4, "d": 32, "k": 16, "e": 3}


# what is computed, the axes of x and of the weight, and whether it becomes a product of matrices
MODELS = [
    ("torch.einsum('btd,hkd->bhtk', x, self.weight)", "btd", "hkd", True),
    ("torch.einsum('btd,dhk->bthk', x, self.weight)", "btd", "dhk", True),
    ("torch.einsum('bd,hkd->bhk', x, self.weight)", "bd", "hkd", True),
    ("torch.einsum('hdk,btd->kbht', self.weight, x)", "btd", "hdk", True),
    ("torch.einsum('bthk,hkd->btd', x, self.weight)", "bthk", "hkd", True),
    ("torch.einsum('bhtk,dhk->btd', x, self.weight)", "bhtk", "dhk", True),
    ("torch.einsum('...d,dhk->...hk', x, self.weight)", "btd", "dhk", True),
    ("torch.einsum('btd,ehkd->bethk', x, self.weight)", "btd", "ehkd", True),
    ("torch.einsum('bhtd,hdk->bhtk', x, self.weight)", "bhtd", "hdk", False),
    ("torch.einsum('bthd,hkd->bthk', x, self.weight)", "bthd", "hkd", False),
    ("x @ self.weight", "bhtd", "hdk", True),
    ("torch.matmul(x, self.weight.mT)", "bhtd", "hkd", True),
]


def weighted(text: str, *shape: int) -> nn.Module:
    torch.manual_seed(0)
    return net(text, weight=nn.Parameter(torch.randn(*shape) * torch.linspace(0.1, 1.0, shape[-1]))).eval()


def shape(labels: str) -> tuple[int, ...]:
    return tuple(SIZES[label] for label in labels)


WEIGHTS_ALONE: dict[str, Any] = {"formats": [{"activations": "float", "weights": "int8"}]}


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        pytest.param("openvino", {}, id="openvino-all"),
        pytest.param("onnxruntime", {}, id="onnxruntime-all", marks=pytest.mark.nightly),
        pytest.param("openvino", WEIGHTS_ALONE, id="openvino-weights", marks=pytest.mark.nightly),
        pytest.param("onnxruntime", WEIGHTS_ALONE, id="onnxruntime-weights", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize(("text", "x", "weight", "matrices"), MODELS)
def test_engines_compute_what_the_proxy_computes(
    text: str, x: str, weight: str, matrices: bool, options: dict[str, Any], engine: str, tmp_path: Path
) -> None:
    pytest.importorskip(engine, reason=f"needs enginequant[{engine}]")
    from quantizer.engines import load_engine

    model, data = weighted(text, *shape(weight)), torch.randn(shape(x))
    q = Quantizer(preset="plain", backend=engine, **options)
    q.calibrate(model, [data], progress=False)
    assert all(row.quantized for row in q.coverage.rows)
    frozen = q.quantize(model)
    path = q.export(frozen, tmp_path / "net.onnx", data)
    assert ("Einsum" not in operators(path)) == matrices
    runner = load_engine(engine, path)
    for rows in (data, torch.randn(3, *data.shape[1:])):
        expected = frozen(rows).detach().numpy()
        (got,) = runner({"x": rows.numpy()}).values()
        # Sums in another order tip values over the border between two steps.
        assert np.linalg.norm(got - expected) < 0.01 * np.linalg.norm(expected)


def graph(equation: str, weight: tuple[int, ...], axis: int) -> Any:
    """A graph of one Einsum by a stored weight, with scales along an axis of it."""
    text = (
        f'<ir_version: 10, opset_import: ["" : 20]> g (float[B, 6, 32] x) => (float y)'
        f"<int8[{','.join(map(str, weight))}] w, float[{weight[axis]}] s>"
        f"{{ d = DequantizeLinear <axis = {axis}> (w, s) "
        f'y = Einsum <equation = "{equation}"> (x, d) }}'
    )
    proto = onnx.parser.parse_model(text)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    generator = np.random.default_rng(0)
    stored = generator.integers(-100, 100, weight).astype(np.int8)
    scales = generator.uniform(0.01, 0.02, weight[axis]).astype(np.float32)
    for name, array in (("w", stored), ("s", scales)):
        old = [entry for entry in proto.graph.initializer if entry.name == name]
        for entry in old:
            proto.graph.initializer.remove(entry)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


@pytest.mark.parametrize(
    ("equation", "weight", "axis", "becomes"),
    [
        ("btd,hkd->bhtk", (4, 16, 32), 1, True),
        ("btd,hkd->bhtk", (4, 16, 32), 0, True),
        ("btd,dkh->thbk", (32, 16, 4), 1, True),
        ("btd,hkd->bhtk", (4, 16, 32), 2, False),  # scales along what is summed over
        ("btd,tkd->btk", (6, 16, 32), 1, False),  # a label of both in the output
        ("btd,hkd->btk", (4, 16, 32), 1, False),  # a sum over the weight alone
        ("btd,hkd->bhk", (4, 16, 32), 1, False),  # a sum over the activation alone
        ("btd,dk->btk", (32, 16), 1, False),  # a matrix already
    ],
)
def test_the_pass_by_itself(equation: str, weight: tuple[int, ...], axis: int, becomes: bool) -> None:
    x = np.random.default_rng(1).normal(size=(2, 6, 32)).astype(np.float32)
    (expected,) = computed(graph(equation, weight, axis), x=x)
    model = graph(equation, weight, axis)
    run_passes(model, [EinsumWeights()])
    assert ("MatMul" in operators(model)) == becomes
    assert ("Einsum" in operators(model)) != becomes
    assert operators(model).count("DequantizeLinear") == 1
    np.testing.assert_allclose(computed(model, x=x)[0], expected, rtol=1e-4, atol=1e-4)


def test_a_weight_that_others_read_stays_for_them() -> None:
    model = graph("btd,hkd->bhtk", (4, 16, 32), 1)
    weight = next(node for node in model.graph if node.op_type == "DequantizeLinear").outputs[0]
    model.graph.outputs.append(weight)
    run_passes(model, [EinsumWeights()])
    assert operators(model).count("DequantizeLinear") == 2
    assert "Einsum" not in operators(model)


def test_a_weight_with_one_scale_becomes_a_matrix_too(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs enginequant[onnxruntime]")
    from quantizer.engines import load_engine

    model, data = weighted("torch.einsum('btd,hkd->bhtk', x, self.weight)", *shape("hkd")), torch.randn(shape("btd"))
    q = Quantizer(preset="plain", backend="onnxruntime", weights={"granularity": "per_tensor"})
    q.calibrate(model, [data], progress=False)
    frozen = q.quantize(model)
    path = q.export(frozen, tmp_path / "net.onnx", data)
    assert "Einsum" not in operators(path)
    (found,) = load_engine("onnxruntime", path)({"x": data.numpy()}).values()
    expected = frozen(data).detach().numpy()
    assert np.linalg.norm(found - expected) < 0.01 * np.linalg.norm(expected)
