"""What stands in an exported file, and that engines compute with it what the proxy computes."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ConvNet, Mlp, Snapshot, batch, needs_exact_byte_products, tiny
from onnx_graphs import plain_session
from torch import Tensor, nn
from toy_nets import linear, net

from quantizer import Quantizer
from quantizer.check import check_file
from quantizer.engines import load_engine
from quantizer.errors import ExportError, ProxyError
from quantizer.export.exporter import export_onnx
from quantizer.plan.targets import profile

onnx = pytest.importorskip("onnx", reason="exporting needs enginequant[onnx]")
pytest.importorskip("onnxscript", reason="exporting needs enginequant[onnx]")

MASK = -30000.0
PRODUCTS = ("MatMul", "Gemm", "Conv")

pytestmark = pytest.mark.usefixtures("exact_byte_products")


@dataclass
class Exported:
    """A model, its frozen proxy, and the file."""

    quantizer: Quantizer
    model: nn.Module
    frozen: nn.Module
    path: Path

    def __post_init__(self) -> None:
        self.onnx = onnx.load(self.path)
        self.nodes = list(self.onnx.graph.node)
        self.makers = {output: node for node in self.nodes for output in node.output}
        self.constants = {item.name: onnx.numpy_helper.to_array(item) for item in self.onnx.graph.initializer}

    def of(self, *kinds: str) -> list[Any]:
        """The nodes of some operators."""
        return [node for node in self.nodes if node.op_type in kinds]

    def maker(self, value: str) -> str:
        """The operator that makes a value; empty for an input or an initializer."""
        return self.makers[value].op_type if value in self.makers else ""

    def node_of(self, site: str) -> Any:
        """The product or add of a site."""
        host, function, operation = site.rsplit(".", 2) if site.count(".") > 1 else ("", *site.rsplit(".", 1))
        scope = f"{host}.site_{function}_{operation}".removeprefix(".")
        (found,) = [n for n in self.of(*PRODUCTS, "Add") if n.name.startswith(f"{scope}/") and self._main(n)]
        return found

    def _main(self, node: Any) -> bool:
        # A linear exports as MatMul and the Add of its bias.
        return node.op_type != "Add" or "_add_" in node.name


def _export(
    folder: Path, backend: str, model: nn.Module, data: list[Any], fallback: int = 0, **options: Any
) -> Exported:
    torch.set_num_threads(1)
    quantizer = Quantizer(preset="plain", backend=backend, **options)
    quantizer.calibrate(model, data)
    if fallback:
        amp = quantizer.amp(model)
        with torch.no_grad():
            amp(**data[0])
        quantizer.fallback(amp, num=fallback)
    frozen = quantizer.quantize(model)
    return Exported(quantizer, model, frozen, quantizer.export(frozen, folder / "model.onnx", data[0]))


def _batches() -> list[dict[str, Tensor]]:
    return [batch("bert", padded=True, seed=seed, rows=4, length=16) for seed in range(4)]


@pytest.fixture(scope="module")
def bert_openvino(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return _export(tmp_path_factory.mktemp("openvino"), "openvino", tiny("bert"), _batches())


@pytest.fixture(scope="module")
def bert_rtx(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return _export(tmp_path_factory.mktemp("rtx"), "tensorrt-rtx", tiny("bert"), _batches())


@pytest.fixture(scope="module")
def bert_fallback(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    sites = {"residual_add": True}
    folder = tmp_path_factory.mktemp("fallback")
    return _export(folder, "tensorrt-rtx", tiny("bert", "sdpa"), _batches(), fallback=9, sites=sites)


@pytest.fixture(scope="module")
def conv(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    torch.manual_seed(0)
    model = ConvNet().eval()
    with torch.no_grad():
        model.norm.running_mean.normal_()
        model.norm.running_var.uniform_(0.5, 2)
    return _export(tmp_path_factory.mktemp("conv"), "openvino", model, [torch.randn(4, 3, 16, 16) for _ in range(2)])


@pytest.fixture(params=["bert_openvino", "bert_rtx", pytest.param("bert_fallback", marks=pytest.mark.nightly), "conv"])
def any_export(request: pytest.FixtureRequest) -> Exported:
    exported: Exported = request.getfixturevalue(request.param)
    return exported


# -- every file ----------------------------------------------------------------------------------------------------


def test_the_checker_takes_it(any_export: Exported) -> None:
    onnx.checker.check_model(any_export.onnx, full_check=True)
    assert any_export.onnx.opset_import[0].version == 20


def test_the_target_s_rules_hold(any_export: Exported) -> None:
    found = check_file(any_export.path, any_export.quantizer.config.backend)
    # Fallback alone may keep in float one operand of an add, the one that skips a block, and leave the other.
    halves = [
        site
        for site in any_export.quantizer.plan.values()
        if any_export.quantizer.chosen_fallback is not None
        and site.kind == "residual_add"
        and [operand.quantized for operand in site.operands] == [True, False]
    ]
    assert [finding.rule for finding in found] == ["residual-side"] * len(halves)


def test_nothing_else_is_written(any_export: Exported) -> None:
    assert [path.name for path in any_export.path.parent.iterdir()] == ["model.onnx"]


def test_weights_are_stored_as_integers_with_a_dequantize_alone(any_export: Exported) -> None:
    weights = [n for n in any_export.of("DequantizeLinear") if n.input[0] in any_export.constants]
    planned = [o for s in any_export.quantizer.plan.values() for o in s.operands if o.role == "weight" and o.quantized]
    assert len(weights) == len(planned) > 0
    for node in weights:
        assert any_export.constants[node.input[0]].dtype == np.int8
        # The zero point is left out: it is zero.
        assert len(node.input) == 2
    for node in any_export.of("QuantizeLinear"):
        assert node.input[0] not in any_export.constants
        zero = any_export.constants[node.input[2]]
        assert (zero.dtype, int(zero)) in ((np.int8, 0), (np.uint8, 128))


def test_activations_are_unsigned_where_the_target_says_so(any_export: Exported) -> None:
    weights = {n.output[0] for n in any_export.of("DequantizeLinear") if n.input[0] in any_export.constants}
    where = profile(any_export.quantizer.config.backend).unsigned_activations
    seen = set()
    for product in any_export.of(*PRODUCTS):
        weighted = any(name in weights for name in product.input)
        for name in product.input:
            maker = any_export.makers.get(name)
            if maker is not None and maker.op_type == "DequantizeLinear" and name not in weights:
                zero = any_export.constants[any_export.makers[maker.input[0]].input[2]]
                assert (zero.dtype == np.uint8) == (where == "all" or (where == "weighted" and weighted))
                seen.add(weighted)
    assert True in seen


def test_channels_are_on_the_axis_of_the_product(any_export: Exported) -> None:
    for node in any_export.of(*PRODUCTS):
        maker = any_export.makers.get(node.input[1])
        if maker is None or maker.op_type != "DequantizeLinear" or maker.input[0] not in any_export.constants:
            continue
        weight, scale = any_export.constants[maker.input[0]], any_export.constants[maker.input[1]]
        axis = next(attribute.i for attribute in maker.attribute if attribute.name == "axis")
        transposed = any(a.name == "transB" and a.i for a in node.attribute)
        assert axis == (0 if node.op_type == "Conv" or transposed else 1)
        assert scale.shape == (weight.shape[axis],)
        assert not np.array_equal(scale, np.full_like(scale, scale[0]))


def test_a_dequantize_is_read_by_products_and_adds_alone(any_export: Exported) -> None:
    outputs = {item.name for item in any_export.onnx.graph.output}
    for node in any_export.of("DequantizeLinear"):
        readers = [n for n in any_export.nodes if node.output[0] in n.input]
        assert readers
        assert {n.op_type for n in readers} <= {*PRODUCTS, "Add"}
        assert node.output[0] not in outputs
        if node.input[0] not in any_export.constants:
            assert any_export.maker(node.input[0]) == "QuantizeLinear"
            assert any_export.makers[node.input[0]].input[1] == node.input[1]
    for node in any_export.of("QuantizeLinear"):
        assert {n.op_type for n in any_export.nodes if node.output[0] in n.input} == {"DequantizeLinear"}


def test_sites_are_quantized_as_planned_and_never_by_half(any_export: Exported) -> None:
    checked = 0
    for name, site in any_export.quantizer.plan.items():
        if not site.operands:
            continue
        node = any_export.node_of(name)
        # A bias is an input of its product too, and never quantized.
        inputs = node.input[: len(site.operands)]
        makers = [any_export.maker(value) == "DequantizeLinear" for value in inputs]
        assert makers == [operand.quantized for operand in site.operands], name
        if site.kind != "residual_add":
            assert len(set(makers)) == 1, name
        checked += 1
    assert checked >= 4


def test_node_names_say_where_they_are_from(any_export: Exported) -> None:
    names = [node.name for node in any_export.nodes]
    assert len(set(names)) == len(names)
    modules = {name for name, _ in any_export.frozen.named_modules()} | {"graph"}
    for name in names:
        assert name.rpartition("/")[0] in modules


def test_no_path_of_this_machine_is_in_the_file(any_export: Exported) -> None:
    data = any_export.path.read_bytes()
    assert str(Path(__file__).parents[2]).encode() not in data
    assert b"site-packages" not in data
    assert not any(node.metadata_props for node in any_export.nodes)


# -- BERT ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["bert_openvino", "bert_rtx", "bert_fallback"])
def test_batch_and_sequence_are_dynamic(which: str, request: pytest.FixtureRequest) -> None:
    graph = request.getfixturevalue(which).onnx.graph
    shapes = {
        item.name: [d.dim_param or d.dim_value for d in item.type.tensor_type.shape.dim]
        for item in [*graph.input, *graph.output]
    }
    assert shapes == {
        "input_ids": ["batch", "sequence"],
        "attention_mask": ["batch", "sequence"],
        "last_hidden_state": ["batch", "sequence", 32],
        "pooler_output": ["batch", 32],
    }


@pytest.mark.parametrize("which", ["bert_rtx", "bert_fallback"])
def test_half_is_the_only_float_type_for_tensorrt(which: str, request: pytest.FixtureRequest) -> None:
    exported = request.getfixturevalue(which)
    inferred = onnx.shape_inference.infer_shapes(exported.onnx, strict_mode=True).graph
    values = [*inferred.value_info, *inferred.input, *inferred.output]
    types = {item.type.tensor_type.elem_type for item in values} | {item.data_type for item in inferred.initializer}
    assert onnx.TensorProto.FLOAT16 in types
    assert not types & {onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.BFLOAT16}
    to_bool = [a.i for node in exported.of("Cast") for a in node.attribute if a.name == "to"]
    assert set(to_bool) <= {onnx.TensorProto.BOOL}
    for node in exported.of("QuantizeLinear", "DequantizeLinear"):
        scale = exported.constants[node.input[1]]
        assert scale.dtype == np.float16
        assert (scale > 0).all()


def test_single_is_the_only_float_type_for_openvino(bert_openvino: Exported) -> None:
    types = {value.dtype.name for value in bert_openvino.constants.values()}
    assert "float32" in types
    assert not types & {"float16", "float64"}
    assert not any(node.op_type == "Cast" and node.attribute[0].i != 9 for node in bert_openvino.nodes)


@pytest.mark.parametrize("which", ["bert_rtx", "bert_fallback"])
def test_mask_constants_are_ones_that_half_can_add_to(which: str, request: pytest.FixtureRequest) -> None:
    exported = request.getfixturevalue(which)
    values = [value for value in exported.constants.values() if value.dtype == np.float16]
    values += [
        onnx.numpy_helper.to_array(a.t) for n in exported.of("Constant") for a in n.attribute if a.name == "value"
    ]
    lowest = min(float(value.min()) for value in values if value.size and value.dtype == np.float16)
    assert lowest == MASK


def test_attention_is_the_plain_pattern(bert_rtx: Exported) -> None:
    assert len(bert_rtx.of("Softmax")) == 2
    assert not bert_rtx.of("Attention", "IsNaN")
    for softmax in bert_rtx.of("Softmax"):
        (reader,) = [n for n in bert_rtx.nodes if softmax.output[0] in n.input]
        assert reader.op_type == "QuantizeLinear"


def test_sites_kept_in_float_carry_no_quantization(bert_fallback: Exported) -> None:
    chosen = bert_fallback.quantizer.chosen_fallback
    assert chosen is not None
    assert len(chosen.groups) == 9
    # An add of which one operand was kept in float is quantized still, and says so.
    plan = bert_fallback.quantizer.plan.values()
    back = [site for site in plan if "fallback(num=9)" in site.reason and not site.quantized]
    assert {site.kind for site in back} >= {"linear"}
    for site in back:
        for value in bert_fallback.node_of(site.name).input[:2]:
            assert bert_fallback.maker(value) != "DequantizeLinear"
    floats = {name for name, value in bert_fallback.constants.items() if value.dtype == np.float16 and value.ndim == 2}
    linears = [site for site in back if site.kind == "linear"]
    # A linear's weight is an initializer, or one behind a Transpose.
    for site in linears:
        value = bert_fallback.node_of(site.name).input[1]
        source = value if value in floats else bert_fallback.makers[value].input[0]
        assert source in floats


# -- engines -------------------------------------------------------------------------------------------------------


def sqnr_db(reference: np.ndarray, other: np.ndarray) -> float:
    reference, other = reference.astype(np.float64), other.astype(np.float64)
    noise = ((reference - other) ** 2).sum()
    return float("inf") if noise == 0 else float(10 * np.log10((reference**2).sum() / noise))


def _reference(frozen: nn.Module, inputs: Mapping[str, Tensor] | Tensor) -> list[np.ndarray]:
    with torch.no_grad():
        output = frozen(**inputs) if isinstance(inputs, Mapping) else frozen(inputs)
    return [tensor.numpy() for tensor in (output.values() if isinstance(output, Mapping) else [output])]


@pytest.mark.parametrize(("rows", "length"), [(1, 2), (4, 16), (7, 40)])
def test_onnxruntime_computes_what_the_proxy_computes(bert_openvino: Exported, rows: int, length: int) -> None:
    inputs = batch("bert", padded=rows > 1, seed=9, rows=rows, length=length)
    session = plain_session(bert_openvino.path)
    results = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    mask = inputs["attention_mask"].bool().numpy()
    hidden, pooled = _reference(bert_openvino.frozen, inputs)
    assert sqnr_db(hidden[mask], results[0][mask]) > 100
    assert sqnr_db(pooled, results[1]) > 100


@needs_exact_byte_products
@pytest.mark.parametrize(("rows", "length"), [(1, 2), (4, 16), (7, 40)])
def test_openvino_computes_what_the_proxy_computes(bert_openvino: Exported, rows: int, length: int) -> None:
    pytest.importorskip("openvino", reason="needs enginequant[openvino]")
    inputs = batch("bert", padded=rows > 1, seed=9, rows=rows, length=length)
    results = load_engine("openvino", bert_openvino.path)({name: value.numpy() for name, value in inputs.items()})
    mask = inputs["attention_mask"].bool().numpy()
    hidden, pooled = _reference(bert_openvino.frozen, inputs)
    assert sqnr_db(hidden[mask], results["last_hidden_state"][mask]) > 100
    assert sqnr_db(pooled, results["pooler_output"]) > 100


def test_a_half_file_computes_what_the_proxy_computes(bert_rtx: Exported) -> None:
    inputs = batch("bert", padded=True, seed=9, rows=4, length=16)
    results = plain_session(bert_rtx.path).run(None, {name: value.numpy() for name, value in inputs.items()})
    mask = inputs["attention_mask"].bool().numpy()
    hidden, pooled = _reference(bert_rtx.frozen, inputs)
    assert sqnr_db(hidden[mask], results[0][mask]) > 35
    assert sqnr_db(pooled, results[1]) > 35


def test_convolutions_compute_what_the_proxy_computes(conv: Exported) -> None:
    assert {site.kind for site in conv.quantizer.plan.values() if site.quantized} >= {"conv", "linear"}
    assert not [node for node in conv.of("Conv") if conv.maker(node.input[1]) != "DequantizeLinear"]
    for rows in (1, 5):
        x = torch.randn(rows, 3, 16, 16, generator=torch.Generator().manual_seed(3))
        (expected,) = _reference(conv.frozen, x)
        (result,) = plain_session(conv.path).run(None, {"x": x.numpy()})
        assert sqnr_db(expected, result) > 100
        if importlib.util.find_spec("openvino"):
            (result,) = load_engine("openvino", conv.path)({"x": x.numpy()}).values()
            assert sqnr_db(expected, result) > 100


@pytest.mark.parametrize("which", ["bert_rtx", "bert_fallback"])
def test_tensorrt_rtx_builds_it_for_another_machine(which: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if importlib.util.find_spec("tensorrt_rtx_bindings") is None:
        pytest.skip("needs enginequant[tensorrt-rtx]")
    exported = request.getfixturevalue(which)
    ranges = {"batch": (1, 2, 4), "sequence": (16, 16, 32)}
    built = exported.quantizer.build(
        exported.path, tmp_path / "model.engine", dynamic=ranges, compute_capability="sm89"
    )
    assert built.size_bytes == (tmp_path / "model.engine").stat().st_size > 10_000


# -- other models, examples and options ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mlp() -> tuple[Quantizer, nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = Mlp().eval(), torch.randn(4, 32)
    quantizer = Quantizer(preset="plain", backend="openvino")
    quantizer.calibrate(model, [x])
    return quantizer, model, quantizer.quantize(model), x


Prepared = tuple[Quantizer, nn.Module, nn.Module, Tensor]


@pytest.mark.parametrize("form", ["tuple", "mapping", "one row"])
def test_forms_of_an_example(mlp: Prepared, tmp_path: Path, form: str) -> None:
    quantizer, _, frozen, x = mlp
    example = {"tuple": (x,), "mapping": {"x": x}, "one row": x[:1]}[form]
    path = quantizer.export(frozen, tmp_path / "m.onnx", example)
    assert path == tmp_path / "m.onnx"
    other = torch.randn(9, 32)
    (result,) = plain_session(path).run(None, {"x": other.numpy()})
    assert sqnr_db(_reference(frozen, other)[0], result) > 100


@pytest.mark.parametrize(("axes", "shape"), [({}, [4, 32]), ({"x": {0: "rows"}}, ["rows", 32])])
def test_dynamic_axes(mlp: Prepared, tmp_path: Path, axes: Any, shape: list[Any]) -> None:
    quantizer, _, frozen, x = mlp
    path = quantizer.export(frozen, tmp_path / "m.onnx", x, dynamic_axes=axes)
    (entry,) = onnx.load(path).graph.input
    assert [d.dim_param or d.dim_value for d in entry.type.tensor_type.shape.dim] == shape


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"y": {0: "rows"}}, "names the input 'y'; the example has: x"),
        ({"x": {2: "rows"}}, "'x' has no axis 2; expected 0 to 1"),
        ({"x": {0: "two words"}}, "'two words' is not a valid dimension name"),
    ],
)
def test_wrong_dynamic_axes(mlp: Prepared, tmp_path: Path, axes: Any, message: str) -> None:
    quantizer, _, frozen, x = mlp
    with pytest.raises(ExportError, match=message):
        quantizer.export(frozen, tmp_path / "m.onnx", x, dynamic_axes=axes)
    assert not list(tmp_path.iterdir())


def test_exporting_twice_replaces_and_gives_the_same_bytes(mlp: Prepared, tmp_path: Path) -> None:
    quantizer, _, frozen, x = mlp
    first = quantizer.export(frozen, tmp_path / "m.onnx", x).read_bytes()
    assert quantizer.export(frozen, tmp_path / "m.onnx", x).read_bytes() == first
    assert oct((tmp_path / "m.onnx").stat().st_mode)[-3:] == "644"


@pytest.mark.parametrize("backend", ["openvino", "tensorrt"])
def test_exporting_changes_neither_the_model_nor_the_proxy(tmp_path: Path, backend: str) -> None:
    model = Mlp().eval()
    model.register_buffer("constants", torch.ones(3, dtype=torch.float16))
    x = torch.randn(4, 32)
    quantizer = Quantizer(preset="plain", backend=backend)
    quantizer.calibrate(model, [x])
    frozen = quantizer.quantize(model).train()
    with torch.no_grad():
        expected = frozen(x)
    before, frozen_before = Snapshot.of(model), Snapshot.of(frozen)
    quantizer.export(frozen, tmp_path / "m.onnx", x)
    before.assert_unchanged(model)
    frozen_before.assert_unchanged(frozen)
    with torch.no_grad():
        assert torch.equal(frozen(x), expected)


def test_a_model_in_train_mode_is_exported_in_eval_mode(tmp_path: Path) -> None:
    model, x = ConvNet().eval(), torch.randn(2, 3, 16, 16)
    quantizer = Quantizer(preset="plain", backend="openvino")
    quantizer.calibrate(model, [x])
    frozen = quantizer.quantize(model)
    expected = _reference(frozen, x)[0]
    (result,) = plain_session(quantizer.export(frozen.train(), tmp_path / "m.onnx", x)).run(None, {"x": x.numpy()})
    assert sqnr_db(expected, result) > 100


def test_bfloat16(tmp_path: Path) -> None:
    model, x = Mlp().eval(), torch.randn(4, 32)
    quantizer = Quantizer(preset="plain", backend="tensorrt", fallback_dtype="bfloat16")
    quantizer.calibrate(model, [x])
    proto = onnx.load(quantizer.export(quantizer.quantize(model), tmp_path / "m.onnx", x))
    types = {item.data_type for item in proto.graph.initializer}
    assert types == {onnx.TensorProto.BFLOAT16, onnx.TensorProto.INT8}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_model_of_another_type_whose_weights_are_all_stored(dtype: torch.dtype, tmp_path: Path) -> None:
    model, x = nn.Linear(32, 32, bias=False).eval().to(dtype), torch.randn(4, 32).to(dtype)
    quantizer = Quantizer(preset="plain", backend="onnxruntime")
    quantizer.calibrate(model, [x])
    frozen = quantizer.quantize(model)
    assert not any(parameter.is_floating_point() for _, parameter in frozen.named_parameters())
    path = quantizer.export(frozen, tmp_path / "m.onnx", x)
    (result,) = plain_session(path).run(None, {"input": x.float().numpy()})
    with torch.no_grad():
        assert sqnr_db(frozen(x).float().numpy(), result) > 30


def test_a_float_model_is_exported_to_compare_with(tmp_path: Path) -> None:
    model, x = Mlp().eval(), torch.randn(4, 32)
    path = Quantizer(backend="openvino").export(model, tmp_path / "float.onnx", x)
    assert not {n.op_type for n in onnx.load(path).graph.node} & {"QuantizeLinear", "DequantizeLinear"}
    (result,) = plain_session(path).run(None, {"x": x.numpy()})
    assert sqnr_db(_reference(model, x)[0], result) > 100


@pytest.mark.parametrize("which", ["calib proxy", "amp proxy"])
def test_no_proxy_but_a_frozen_one_is_exported(tmp_path: Path, which: str) -> None:
    model, x = Mlp().eval(), torch.randn(4, 32)
    quantizer = Quantizer(preset="plain", backend="openvino")
    calib = quantizer.calibrate(model, [x])
    proxies = {"calib proxy": calib, "amp proxy": quantizer.amp(model)}
    with pytest.raises(ProxyError, match=r"export\(\) expects the model that quantize\(\) returned"):
        quantizer.export(proxies[which], tmp_path / "m.onnx", x)
    assert not list(tmp_path.iterdir())


class _Masked(nn.Module):
    """Takes its mask only through keywords that it does not name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, **kwargs: Tensor) -> Tensor:
        """The rows that the mask keeps."""
        return self.linear(x) * kwargs["mask"][:, :, None]


def test_an_input_that_comes_through_kwargs_has_dynamic_axes(tmp_path: Path) -> None:
    example = {"x": torch.randn(2, 3, 4), "mask": torch.ones(2, 3, dtype=torch.long)}
    path = export_onnx(
        _Masked(),
        tmp_path / "m.onnx",
        example,
        opset=20,
        dtype=torch.float32,
        axes={"x": {1: "rows"}, "mask": {1: "rows"}},
    )
    inputs = {
        value.name: [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in onnx.load(path).graph.input
    }
    assert inputs == {"x": [2, "rows", 4], "mask": [2, "rows"]}


def two_sequences() -> nn.Module:
    """An encoder's tokens and a decoder's, whose lengths have nothing to do with each other."""
    return net(
        "self.layer(self.table(decoder_ids) + self.table(ids).mean(1, keepdim=True))",
        "ids, decoder_ids",
        table=nn.Embedding(16, 32),
        layer=linear(),
    )


def test_sequences_of_two_lengths_are_two_dimensions(tmp_path: Path) -> None:
    model = two_sequences().eval()
    generator = torch.Generator().manual_seed(0)
    data, other = (
        {
            "ids": torch.randint(0, 16, (rows, length), generator=generator),
            "decoder_ids": torch.randint(0, 16, (rows, 5), generator=generator),
        }
        for rows, length in ((2, 9), (3, 6))
    )
    exported = _export(tmp_path, "onnxruntime", model, [data])
    dims = {item.name: [d.dim_param for d in item.type.tensor_type.shape.dim] for item in exported.onnx.graph.input}
    assert dims == {"ids": ["batch", "sequence"], "decoder_ids": ["batch", "decoder_ids_sequence"]}
    other["decoder_ids"] = other["decoder_ids"][:, :3]
    engine = load_engine("onnxruntime", exported.path)
    (found,) = engine({name: value.numpy() for name, value in other.items()}).values()
    with torch.no_grad():
        np.testing.assert_allclose(found, exported.frozen(**other).numpy(), atol=1e-4)


class _TwoHeads(nn.Module):
    """Returns the values of two heads, and the values that both read."""

    def __init__(self) -> None:
        super().__init__()
        self.boxes, self.scores = nn.Linear(32, 4), nn.Linear(32, 5)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        return {"hidden": x * 2, "boxes": self.boxes(x), "scores": self.scores(x)}


@pytest.mark.parametrize("names", [("boxes",), ("boxes", "scores"), ("boxes", "absent")])
def test_a_model_may_name_the_outputs_of_its_files(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Of other names, none is left out."""
    torch.manual_seed(0)
    model, x = _TwoHeads().eval(), torch.randn(8, 32)
    vars(model)["exported_outputs"] = names
    q = Quantizer(backend="onnxruntime")
    q.calibrate(model, [{"x": x}])
    quantized = q.quantize(model)
    for exported in (model, quantized):
        graph = onnx.load(q.export(exported, tmp_path / "m.onnx", {"x": x})).graph
        expected = ["hidden", "boxes", "scores"] if "absent" in names else [*names]
        assert [value.name for value in graph.output] == expected
        assert len([node for node in graph.node if node.op_type in ("Gemm", "MatMul")]) == len({*expected} - {"hidden"})
        assert [*exported(x)] == ["hidden", "boxes", "scores"]
