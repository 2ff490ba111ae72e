"""What is said of engines: by OpenVINO and ONNX Runtime themselves, by TensorRT's JSON, and by a graph alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantizer.engines import (
    InputSizes,
    Inspection,
    Layer,
    build_engine,
    check_precision,
    detect_backend,
    graph_inspection,
    inspect_engine,
    inspect_file,
    observe_engine,
    runs_here,
)
from quantizer.engines.inspection import inspection_from_layers
from quantizer.engines.tensorrt import layers_from_json
from quantizer.errors import EngineError
from quantizer.utils.records import attention_work, convolution_work, matmul_work

onnx = pytest.importorskip("onnx", reason="install enginequant[onnx]")

BACKENDS = ["openvino", "onnxruntime"]


@pytest.fixture(params=BACKENDS)
def name(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param, reason=f"install enginequant[{request.param}]")
    return str(request.param)


def products(inspection: Inspection) -> list[Layer]:
    return [layer for layer in inspection.layers if layer.role == "product"]


def share(inspection: Inspection, precision: str) -> float:
    return sum(part.multiply_add_share or 0.0 for part in inspection.shares if part.precision == precision)


def product(name: str, precision: str = "int8", **more: Any) -> Layer:
    return Layer(name=name, type="MatMul", role="product", precision=precision, multiply_adds=100, **more)


# -- engines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("built", [False, True], ids=["onnx", "engine"])
def test_a_quantized_product(name: str, built: bool, write_qdq: Any, tmp_path: Path) -> None:
    model = write_qdq(tail=("Tanh",), unsigned=True)
    path = build_engine(name, model.path, tmp_path / "model.engine").path if built else model.path
    inspection = inspect_engine(name, path, sizes=InputSizes(2, 8))
    assert inspection.verified
    assert inspection.note == "seen in a run at 2 x 8 with 1 thread; times are the lower quartile of 5 runs"
    (layer,) = products(inspection)
    assert "layer/matmul" in layer.name
    assert (layer.precision, layer.writes) == ("int8", "fp32")
    assert layer.multiply_adds == 2 * 8 * 64 * 32
    assert layer.time_us is not None
    assert share(inspection, "int8") == 1.0
    assert sum(part.time_share or 0.0 for part in inspection.shares) == pytest.approx(1.0)
    assert sum(part.layer_share for part in inspection.shares) == pytest.approx(1.0)
    assert inspection.float_outputs == 1
    assert any("the INT8 layer before it writes FP32" in reason for reason in inspection.reasons)
    assert inspection.low_share() == 1.0


def test_a_float_product(name: str, write_float: Any) -> None:
    inspection = inspect_engine(name, write_float(), sizes=InputSizes(2, 8))
    (layer,) = products(inspection)
    assert (layer.precision, layer.multiply_adds) == ("fp32", 2 * 8 * 64 * 32)
    assert inspection.low_share() == 0.0
    assert inspection.quantizers == 0
    assert inspection.reasons == (f"1 MatMul/Conv/Gemm layer is FP32, with non-quantized operands: {layer.name}",)


def test_a_convolution(name: str, write_convolution: Any) -> None:
    inspection = inspect_engine(name, write_convolution(), sizes=InputSizes(2))
    (layer,) = products(inspection)
    assert layer.precision == "int8"
    # Two groups: each of the 8 output channels sees 2 of the 4 input channels.
    assert layer.multiply_adds == 2 * 8 * 6 * 6 * 2 * 3 * 3


def test_an_engine_without_the_precision_is_refused(name: str, write_qdq: Any, tmp_path: Path) -> None:
    # OpenVINO multiplies no FP8 on a CPU, and ONNX Runtime no bytes with FP16 scales.
    if name == "openvino":
        model, kind = write_qdq(storage=pytest.importorskip("ml_dtypes").float8_e4m3fn), "FP8"
    else:
        model, kind = write_qdq(dtype=np.float16), "INT8"
    built = build_engine(name, model.path, tmp_path / "model.engine")
    with pytest.raises(
        EngineError, match=rf"the {name} engine lacks the requested precision: .* requests {kind} for 100"
    ) as caught:
        observe_engine(name, built.path, model.path, sizes=InputSizes(2, 8))
    # OpenVINO names a layer after the last of the nodes that it was made of.
    where = {"openvino": "y", "onnxruntime": "layer/matmul"}[name]
    assert f"\n  - {where} runs in FP32 (" in str(caught.value)
    # One that was chosen because it is fast only says so.
    told = observe_engine(name, built.path, model.path, sizes=InputSizes(2, 8), required=False)
    assert told.verified
    assert told.low_share() == 0


def test_an_engine_with_the_precision_passes(name: str, qdq_unsigned: Any, tmp_path: Path) -> None:
    built = build_engine(name, qdq_unsigned.path, tmp_path / "model.engine")
    assert observe_engine(name, built.path, qdq_unsigned.path, sizes=InputSizes(2, 8)).verified


def test_bad_sizes() -> None:
    with pytest.raises(EngineError, match="sequence is 0, expected 1 or more"):
        inspect_engine("openvino", "model.onnx", sizes=InputSizes(sequence=0))


# -- the rule ------------------------------------------------------------------------------------------------------


def test_the_rule_is_one_half_of_what_the_graph_asks_for() -> None:
    graph = inspection_from_layers("onnx", [product(n) for n in "abcd"], verified=False, note="")
    half = [product("a"), product("b"), product("c", "fp32", nodes=("c",)), product("d", "fp32", nodes=("d",))]
    check_precision(inspection_from_layers("openvino", half, verified=True, note=""), graph)
    less = [product("a"), *(product(n, "fp32", nodes=(n,)) for n in "bcd")]
    with pytest.raises(EngineError, match=r"100.0% of the work, the engine computes 25.0%") as caught:
        check_precision(inspection_from_layers("openvino", less, verified=True, note=""), graph)
    assert "\n  - b runs in FP32 (MatMul)\n" in str(caught.value)
    # What was not observed is not judged, and neither is a graph that asks for nothing.
    check_precision(inspection_from_layers("openvino", less, verified=False, note=""), graph)
    floats = inspection_from_layers("onnx", [product("a", "fp32")], verified=False, note="")
    check_precision(inspection_from_layers("openvino", less, verified=True, note=""), floats)


# -- facts ---------------------------------------------------------------------------------------------------------


def test_why_products_write_floats() -> None:
    layers = [
        product("net.layer.3.out/MatMul", writes="fp16", readers=("net.layer.3.out/Add",)),
        Layer(name="net.layer.3.out/Add", type="Add", role="addition", precision="fp16", readers=("move",)),
        Layer(name="move", type="Reshape", role="move", precision="fp16", readers=("net.layer.3/Add",)),
        product("net.layer.3.up/MatMul", writes="fp16", readers=("net.layer.3/Add",)),
        Layer(name="net.layer.3/Add", type="Add", role="addition", precision="fp16"),
        product("net.layer.4.out/MatMul", writes="int8"),
        product("head/MatMul", writes="fp32"),
    ]
    inspection = inspection_from_layers("tensorrt", layers, verified=True, note="")
    assert inspection.reasons == (
        "the residual add in net.layer.3 is FP16: the 2 INT8 layers before it write FP16",
        "the output in head is FP32: the INT8 layer before it writes FP32",
    )
    assert inspection.float_outputs == 3


def test_blocks_are_listed_as_ranges() -> None:
    layers = [product(f"net.layer.{n}.fc/MatMul", "fp32") for n in (0, 1, 2, 3, 4)] + [product("x/MatMul")]
    inspection = inspection_from_layers("openvino", layers, verified=True, note="")
    assert inspection.reasons == ("5 MatMul/Conv/Gemm layers are FP32, with non-quantized operands: net.layer.0 to 4",)


def test_blocks_that_are_not_consecutive_have_full_names() -> None:
    names = ("stage1.0", "stage1.1", "stage2.0", "stage2.1", "stage3.0")
    layers = [product(f"{name}.fc/MatMul", "fp32") for name in names] + [product("x/MatMul")]
    (reason,) = inspection_from_layers("openvino", layers, verified=True, note="").reasons
    assert reason.endswith("operands: stage1.0, stage1.1, stage2.0, stage2.1 and 1 more")


def test_attention_apart() -> None:
    layers = [
        product("q", "fp32", readers=("scale",)),
        Layer(name="scale", type="Mul", precision="fp32", readers=("softmax",)),
        Layer(name="softmax", type="Softmax", role="softmax", precision="fp32", readers=("v",)),
        product("v", "fp32"),
        Layer(name="head", type="Softmax", role="softmax", precision="fp32"),
        Layer(name="mha", type="MHA", role="attention", precision="fp16"),
    ]
    inspection = inspection_from_layers("openvino", layers, verified=True, note="")
    assert (inspection.attention_fused, inspection.attention_apart) == (1, 1)


def test_products_that_are_not_counted_make_the_share_one_of_products() -> None:
    layers = [product("a"), Layer(name="rnn", type="RNN", role="product", precision="fp32")]
    inspection = inspection_from_layers("openvino", layers, verified=True, note="")
    assert inspection.uncounted == 1
    assert inspection.low_share() == 0.5


def test_multiply_adds() -> None:
    assert matmul_work((2, 5, 7), (2, 5, 3)) == 2 * 5 * 3 * 7
    assert matmul_work((7, 5), (5, 3)) == 5 * 3 * 7  # the left operand is transposed
    assert matmul_work((7,), (3,)) is None
    assert matmul_work((2, 5, 7), (2, 4, 3)) is None
    assert convolution_work((8, 2, 3, 3), 8, (1, 8, 6, 6)) == 8 * 6 * 6 * 2 * 9
    assert convolution_work((8, 2, 3, 3), 0, ()) is None
    # 2 heads, 5 queries, 6 keys; 4 wide, and values of 3.
    assert attention_work((2, 5, 4), (2, 4, 6), (2, 6, 3), (2, 5, 3)) == 2 * 5 * 6 * (4 + 3)
    assert attention_work((2, 5, 4), (2, 4, 7), (2, 6, 3), (2, 5, 3)) is None


# -- a graph alone -------------------------------------------------------------------------------------------------


def test_a_graph_says_what_it_asks_for_and_is_not_verified(qdq: Any) -> None:
    inspection = graph_inspection(qdq.path, "no GPU", sizes=InputSizes(2, 8))
    assert not inspection.verified
    assert inspection.note == "no GPU; the figures show the precision that the ONNX file requests, at 2 x 8"
    (layer,) = products(inspection)
    assert (layer.name, layer.precision, layer.multiply_adds) == ("layer/matmul", "int8", 2 * 8 * 64 * 32)
    assert (inspection.quantizers, inspection.low_share()) == (3, 1.0)


def test_a_graph_in_which_one_operand_is_dequantized_asks_for_floats(write_float: Any) -> None:
    assert graph_inspection(write_float(weight_only=True), "").low_share() == 0.0


def test_a_graph_with_weights_elsewhere(qdq: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(onnx.load(qdq.path), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    (tmp_path / "w.bin").unlink()  # only the shapes are needed
    assert graph_inspection(path, "").low_share() == 1.0


def test_a_grouped_convolution_of_a_graph(write_convolution: Any) -> None:
    (layer,) = products(graph_inspection(write_convolution(), "", sizes=InputSizes(2)))
    assert (layer.precision, layer.multiply_adds) == ("int8", 2 * 8 * 6 * 6 * 2 * 3 * 3)


# -- files ---------------------------------------------------------------------------------------------------------


def test_the_backend_of_a_file(name: str, write_qdq: Any, tmp_path: Path) -> None:
    model = write_qdq(unsigned=True)
    assert detect_backend(model.path) is None
    path = build_engine(name, model.path, tmp_path / "model.engine").path
    assert detect_backend(path) == name
    assert inspect_file(path).backend == name
    assert inspect_file(model.path).backend == "onnx"
    assert inspect_file(model.path, name).verified


def test_a_file_of_no_backend(tmp_path: Path) -> None:
    path = tmp_path / "model.engine"
    path.write_bytes(b"ptrt and then something")
    with pytest.raises(EngineError, match=r"model\.engine is neither an ONNX file nor a recognized engine"):
        inspect_file(path)


def test_an_engine_that_cannot_run_here_is_not_verified(
    qdq: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert runs_here("openvino")
    assert not runs_here("tensorrt")
    path = tmp_path / "model.engine"
    path.write_bytes(b"vtrt")
    inspection = inspect_file(path)
    assert (inspection.backend, inspection.verified, inspection.shares) == ("tensorrt-rtx", False, ())
    assert "which this machine lacks, and" in inspection.note
    (tmp_path / "model.onnx").write_bytes(qdq.path.read_bytes())
    inspection = inspect_file(path)
    assert (inspection.backend, inspection.verified, inspection.low_share()) == ("tensorrt-rtx", False, 1.0)


# -- TensorRT's JSON -----------------------------------------------------------------------------------------------


def tensor(name: str, kind: str, *shape: int) -> dict[str, Any]:
    return {"Name": name, "Location": "Device", "Dimensions": list(shape), "Format/Datatype": kind}


ENTRIES = [
    {
        "Name": "Reformatting CopyNode for Input Tensor 0",
        "LayerType": "Reformat",
        "Inputs": [tensor("x", "Row major linear FP16 format", 8, 128, 384)],
        "Outputs": [tensor("x2", "Channel major FP16 format where channel % 8 == 0", 8, 128, 384)],
        "Metadata": "",
    },
    {
        "Name": "net.layer.3.dense/MatMul_myl0_4",
        "LayerType": "gemm",
        "Inputs": [tensor("x8", "Int8", 8, 128, 384), tensor("w", "Int8", 384, 1536)],
        "Outputs": [tensor("y", "Half", 8, 128, 1536)],
        "TacticName": "sm89_xmma_gemm_i8f16_i8i32_f32_tn_n",
        "Metadata": "[ONNX Layer: net.layer.3.dense/MatMul]\x1e[ONNX Layer: net.layer.3.dense/Add]",
    },
    {
        "Name": "_gemm_mha_v2_myl0_7",
        "LayerType": "kgen",
        "Inputs": [tensor("y", "Half", 8, 12, 128, 32)],
        "Outputs": [tensor("z", "Float", 8, 12, 128, 32)],
        "Metadata": "[ONNX Layer: net.layer.3.attention/Softmax]",
    },
]


def test_the_inspectors_json() -> None:
    layers = layers_from_json(json.dumps({"Layers": ENTRIES, "Bindings": []}), {"_gemm_mha_v2_myl0_7": 12.5})
    assert [layer.role for layer in layers] == ["reformat", "product", "attention"]
    assert [layer.precision for layer in layers] == ["fp16", "int8", "fp16"]
    assert [layer.writes for layer in layers] == ["fp16", "fp16", "fp32"]
    assert layers[1].nodes == ("net.layer.3.dense/MatMul", "net.layer.3.dense/Add")
    assert layers[1].readers == ("_gemm_mha_v2_myl0_7",)
    assert layers[1].multiply_adds == 8 * 128 * 384 * 1536
    assert layers[2].time_us == 12.5
    inspection = inspection_from_layers("tensorrt", layers, verified=True, note="")
    assert inspection.reasons[0] == ("the attention in net.layer.3 is FP16: the INT8 layer before it writes FP16")


def test_what_the_json_does_not_tell_is_unknown() -> None:
    entry = {"Name": "a", "LayerType": "gemm", "Inputs": [tensor("x", "Mystery", -1, 4)], "Outputs": []}
    (layer,) = layers_from_json(json.dumps({"Layers": [entry]}))
    assert (layer.precision, layer.writes, layer.multiply_adds) == ("unknown", "unknown", None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"Layers": ["a", "b"]}', "only reports the names of its layers"),
        ("", "returned no list of layers"),
        ("[]", "returned no list of layers"),
    ],
    ids=["names", "empty", "list"],
)
def test_json_without_layers(text: str, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        layers_from_json(text)


def test_unsigned_bytes_are_int8_and_truth_values_are_not(write_float: Any) -> None:
    pytest.importorskip("openvino")
    inspection = inspect_engine("openvino", write_float(mask=True), sizes=InputSizes(2, 8))
    assert {layer.precision for layer in inspection.layers} == {"fp32", "index"}


@pytest.mark.usefixtures("exact_byte_products")
def test_a_network_in_one_kernel_is_its_products(tmp_path: Path) -> None:
    """OpenVINO makes one kernel of small linear layers, which states the type of its result alone."""
    pytest.importorskip("openvino")
    torch = pytest.importorskip("torch")
    from quantizer import Quantizer
    from quantizer.engines import BuildOptions

    layers = [torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32), torch.nn.ReLU()]
    model, x = torch.nn.Sequential(*layers).eval(), torch.randn(32, 64)
    quantizer = Quantizer(backend="openvino", preset="plain")
    quantizer.calibrate(model, [x])
    for what, precision in ((quantizer.quantize(model), "int8"), (model, "fp32")):
        quantizer.export(what, tmp_path / "m.onnx", x[:2])
        build_engine(
            "openvino", tmp_path / "m.onnx", tmp_path / "m.engine", BuildOptions(dynamic={"batch": (1, 8, 64)})
        )
        inspection = inspect_engine("openvino", tmp_path / "m.engine", sizes=InputSizes(8))
        assert {layer.precision for layer in products(inspection)} == {precision}
        assert sum(layer.multiply_adds or 0 for layer in products(inspection)) == 8 * 64 * (64 + 32)
        assert inspection.low_share() == (precision == "int8")
