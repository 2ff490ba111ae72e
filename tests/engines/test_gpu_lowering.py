"""A Q/DQ graph lowered to kernels of a GPU, executed with their references in torch on a CPU, beside the frozen proxy.

With float32 between the kernels, only the order of float sums differs from the proxy: about 140 dB were measured, and
one quantized value that falls on the other side of a tie lowers that to about 65 dB. With float16, 46 to 74 dB were
measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import batch, tiny
from torch import Tensor, fx, nn

from quantizer import Quantizer
from quantizer.engines.torch_engine import gpu_lowering
from quantizer.engines.torch_engine.gpu_lowering import (
    ATTENTIONS,
    KERNELS,
    LINEARS,
    QUANTIZERS,
    lower_for_gpu,
    sign_activations,
)
from quantizer.engines.torch_engine.graph_file import program
from quantizer.engines.torch_engine.kernel_plan import KernelPlan, kernel_plan
from quantizer.engines.torch_engine.lowering import fuse_attention, is_call, quantize
from quantizer.export.onnx_import.graph_builder import OperatorGraph
from quantizer.export.onnx_import.importer import Imported, import_onnx
from quantizer.tasks.metrics import sqnr_db

pytest.importorskip("onnx", reason="exporting needs enginequant[onnx]")


class Gated(nn.Module):
    """A block of a decoder with a gate of SiLU, and a layer behind it: [.., 24] to [.., 24]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up = nn.RMSNorm(24, 1e-5), nn.Linear(24, 40, bias=False), nn.Linear(24, 40)
        self.down, self.last = nn.Linear(40, 24), nn.Linear(24, 24)
        self.end = nn.RMSNorm(24, 1e-5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return self.end(y + self.last(self.norm(y)))


def _llama() -> nn.Module:
    import transformers as tf

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = tf.LlamaConfig(**sizes, vocab_size=99, max_position_embeddings=40, use_cache=False)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    return tf.LlamaModel(config).eval()


def _layers() -> nn.Module:
    torch.manual_seed(0)
    parts = [nn.Linear(36, 20), nn.GELU("tanh"), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 24), nn.SiLU()]
    return nn.Sequential(*parts, nn.Linear(24, 12)).eval()


def _gated() -> nn.Module:
    torch.manual_seed(0)
    return Gated().eval()


def _rows(width: int, seed: int) -> Tensor:
    return torch.randn(6, width, generator=torch.Generator().manual_seed(seed))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "bert": (lambda: tiny("bert"), lambda seed: batch("bert", seed=seed)),
    "vit": (lambda: tiny("vit"), lambda seed: batch("vit", seed=seed)),
    "llama": (_llama, lambda seed: batch("bert", seed=seed)),
    "layers": (_layers, lambda seed: _rows(36, seed)),
    "gated": (_gated, lambda seed: _rows(24, seed)),
}


@dataclass
class Exported:
    """A Q/DQ file, an input that the calibration did not contain, and the first output of the frozen proxy."""

    path: Path
    inputs: Any
    expected: Tensor

    def lowered(self, dtype: torch.dtype = torch.float16) -> tuple[Imported, KernelPlan]:
        """The graph with references of the kernels, and its plan."""
        imported = import_onnx(self.path, fp8=True)
        _, reasons = lower_for_gpu(imported, dtype=dtype, triton=False)
        return imported, kernel_plan(imported.module, reasons)

    def arguments(self, imported: Imported) -> list[Tensor]:
        """The inputs by position."""
        if isinstance(self.inputs, Tensor):
            return [self.inputs]
        return [self.inputs[spec.name] for spec in imported.inputs]


def exported(folder: Path, model: nn.Module, make: Callable[[int], Any], **settings: Any) -> Exported:
    """The Q/DQ file of a model that was calibrated on four batches."""
    q = Quantizer(**{"backend": "torch", "preset": "plain", **settings})
    q.calibrate(model, [make(seed) for seed in range(4)])
    frozen, inputs = q.quantize(model), make(9)
    with torch.no_grad():
        outputs = frozen(inputs) if isinstance(inputs, Tensor) else frozen(**inputs)
    path = q.export(frozen, folder / "m.onnx", make(0))
    return Exported(path, inputs, outputs if isinstance(outputs, Tensor) else outputs[0])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """The Q/DQ file of a model of ``MODELS``, exported once."""
    made: dict[str, Exported] = {}

    def file(name: str) -> Exported:
        if name not in made:
            model, make = MODELS[name]
            made[name] = exported(tmp_path_factory.mktemp(name), model(), make)
        return made[name]

    return file


def _db(found: Tensor, expected: Tensor) -> float:
    assert found.dtype is torch.float32
    return sqnr_db(expected.numpy(), found.numpy())


@pytest.mark.parametrize(("dtype", "least_db"), [(torch.float32, 55), (torch.float16, 40), (torch.bfloat16, 35)])
@pytest.mark.parametrize("name", MODELS)
def test_a_lowered_graph_computes_what_the_frozen_proxy_does(
    files: Callable[[str], Exported], name: str, dtype: torch.dtype, least_db: float
) -> None:
    file = files(name)
    imported, plan = file.lowered(dtype)
    assert plan.floating == {}
    assert _db(program(imported.module)(*file.arguments(imported))[0], file.expected) > least_db


def test_masks_of_padding_and_of_a_whole_row_in_float16(files: Callable[[str], Exported]) -> None:
    """The lowest float32, which the model adds to masked scores, is no number of float16."""
    file = files("bert")
    imported, _ = file.lowered()
    inputs = batch("bert", padded=True, seed=3)
    inputs["attention_mask"][2] = 0
    separate = import_onnx(file.path)
    found, expected = (
        program(each.module)(*(inputs[spec.name] for spec in each.inputs))[0] for each in (imported, separate)
    )
    assert _db(found, expected) > 40


class Masked(nn.Module):
    """Attentions [B, L, 32] that differ in the mask which they make of real tokens [B, L]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 96) for _ in range(6))

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        length, lowest = x.shape[1], torch.finfo(torch.float32).min
        keys, at = real[:, None, None, :], torch.arange(x.shape[1])
        causal = at[None, :] <= at[:, None]
        masks = [
            (1.0 - keys.float()) * -10000.0,
            (1.0 - keys.expand(-1, 1, length, -1).float()) * lowest,
            torch.where((keys > 0) & (at[:, None] >= 0)[None, None], 0.0, lowest),
            torch.where((keys > 0) & causal[None, None], 0.0, lowest),
            torch.where((keys > 0) & (at[:, None] >= 1)[None, None], 0.0, -1.0),
            None,
        ]
        for layer, mask in zip(self.layers, masks, strict=True):
            q, k, v = (part.unflatten(2, (2, 16)).transpose(1, 2) for part in layer(x).chunk(3, -1))
            scores = q @ k.transpose(2, 3) * 0.25
            y = (scores if mask is None else scores + mask).softmax(-1) @ v
            x = y.transpose(1, 2).flatten(2)
        return x


def _masked(seed: int) -> dict[str, Tensor]:
    lengths = torch.tensor([7, 3, 5])
    return {"x": _rows(7 * 32, seed)[:3].reshape(3, 7, 32), "real": (torch.arange(7) < lengths[:, None]).long()}


def test_attentions_whose_mask_is_the_same_for_all_queries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of older transformers, expanded ones and those of today; not causal ones, others of queries, and none."""
    torch.manual_seed(0)
    file = exported(tmp_path, Masked().eval(), _masked)
    imported, plan = file.lowered(torch.float32)
    found = [kernel.kernel for kernel in plan.kernels if "attention" in kernel.kernel]
    assert found == ["padded_attention"] * 3 + ["attention"] * 3
    shapes: dict[str, tuple[int, ...]] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            shapes[n.name] = getattr(result, "shape", ())
            return result

    found_output = Recorder(imported.module).run(*file.arguments(imported))[0]
    masks = [node.args[3] for node in imported.module.graph.nodes if is_call(node, *ATTENTIONS)]
    assert {tuple(shapes[mask.name]) for mask in masks} == {(3, 1, 1, 7)}
    assert _db(found_output, file.expected) > 55
    monkeypatch.setattr(gpu_lowering, "WIDEST_HEAD", 15)
    assert "padded_attention" not in str(file.lowered()[1])


TENSORRT: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8": ("bert", {"dtype": "fp8", "sites": {"matmul": False}}),
    "fp8 images": ("vit", {"dtype": "fp8", "sites": {"matmul": False}}),
    "int8 with quantized attention": ("bert", {"dtype": "int8"}),
}


@pytest.fixture(scope="module", params=TENSORRT)
def for_tensorrt(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Exported]:
    """The type of a file's products, and the file."""
    model, settings = TENSORRT[request.param]
    folder = tmp_path_factory.mktemp("tensorrt")
    file = exported(folder, MODELS[model][0](), MODELS[model][1], backend="tensorrt", **settings)
    return settings["dtype"], file


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_files_for_tensorrt_whose_floats_are_float16(for_tensorrt: tuple[str, Exported], dtype: torch.dtype) -> None:
    """40 to 55 dB were measured: constants in these files are rounded to float16."""
    products, file = for_tensorrt
    imported, plan = file.lowered(dtype)
    assert plan.floating == {}
    calls = [node for node in imported.module.graph.nodes if is_call(node, *LINEARS)]
    kind = torch.float8_e4m3fn if products == "fp8" else torch.int8
    assert {imported.module.get_buffer(str(node.args[1].target)).dtype for node in calls} == {kind}
    assert sum(node.args[9] is kind for node in calls) >= 2  # up of both layers
    found = program(imported.module)(*file.arguments(imported))[0]
    assert sqnr_db(file.expected.numpy(), found.float().numpy()) > 30


def _integers(imported: Imported, inputs: list[Tensor]) -> list[np.ndarray]:
    """The quantized values of activations in a run, in the order of the graph."""
    found: list[np.ndarray] = []

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            is_moved = is_call(n, torch.ops.aten.permute.default, torch.ops.aten.reshape.default)
            if n.op == "call_function" and isinstance(result, Tensor) and result.dtype is torch.int8 and not is_moved:
                integers = result.transpose(1, 2).flatten(2) if is_call(n, *ATTENTIONS) else result
                found.append(integers.numpy())
            return result

    with torch.no_grad():
        Recorder(imported.module).run(*inputs)
    return found


@pytest.mark.parametrize("name", ["bert", "vit", "layers"])
def test_kernels_write_the_integers_of_the_quantizers(files: Callable[[str], Exported], name: str) -> None:
    """At most one step apart, and equal but for one of 200 values, as ties are rare."""
    file = files(name)
    separate = import_onnx(file.path)
    fuse_attention(separate.module)
    sign_activations(separate.module)
    lowered, _ = file.lowered(torch.float32)
    found, expected = (_integers(each, file.arguments(each)) for each in (lowered, separate))
    assert len(found) == len(expected) > 0
    for mine, theirs in zip(found, expected, strict=True):
        apart = np.abs(mine.astype(int) - theirs.astype(int))
        assert apart.max() <= 1
        assert (apart > 0).mean() <= 1 / 200


def test_the_kernels_of_a_layer_of_bert(files: Callable[[str], Exported]) -> None:
    _, plan = files("bert").lowered()
    for layer in ("encoder.layer.0", "encoder.layer.1"):
        found = [(kernel.kernel, *kernel.fused) for kernel in plan.of(layer)]
        assert found == [
            ("linear_8bit",),
            ("padded_attention",),
            ("linear_8bit", "residual add"),
            ("norm_8bit",),
            ("linear_8bit", "gelu"),
            ("linear_8bit", "residual add"),
            ("norm_8bit",),
        ]
        (query, *_), (up,) = plan.of(f"{layer}.attention.self.query"), plan.of(f"{layer}.intermediate")
        assert [site.rpartition(".")[2] for site in query.sites] == ["query", "key", "value"]
        assert [result.bits for result in up.writes] == [8]
        attention = plan.of(f"{layer}.attention.self")[1]
        assert attention.reads == f"16 bits of {', '.join(query.sites)}"
        assert [result.bits for result in attention.writes] == [8]
        assert attention.writes[0].readers == (f"{layer}.attention.output.dense",)
    assert [kernel.kernel for kernel in plan.of("embeddings")] == ["embedding_norm_8bit"]
    norm = plan.of("encoder.layer.0.output.LayerNorm")[0]
    assert [result.bits for result in norm.writes] == [16, 8]
    assert norm.writes[0].readers == ("encoder.layer.1.attention.output.dense, which adds them",)


def test_the_kernels_of_a_layer_of_llama(files: Callable[[str], Exported]) -> None:
    _, plan = files("llama").lowered()
    found = Counter((kernel.kernel, *kernel.fused) for kernel in plan.of("layers.0"))
    assert found == {
        ("norm_8bit",): 2,
        ("linear_8bit",): 2,  # q, k and v; up
        ("linear_8bit", "silu"): 1,
        ("linear_8bit", "residual add"): 2,
        ("quantize_8bit",): 2,
        ("attention",): 1,
    }


@pytest.mark.parametrize("name", MODELS)
def test_no_value_is_written_in_16_bits_for_quantizers_alone(files: Callable[[str], Exported], name: str) -> None:
    imported, _ = files(name).lowered()
    kernels = [node for node in imported.module.graph.nodes if is_call(node, *KERNELS)]
    assert len(kernels) > 0
    for node in kernels:
        if not is_call(node, *QUANTIZERS):
            for result in [node] if is_call(node, *LINEARS) else node.users:
                assert not all(is_call(reader, *QUANTIZERS) for reader in result.users), node


@pytest.mark.parametrize(
    ("start", "step", "least", "is_true"), [(0, 1, 0, True), (0, 1, -2, True), (0, 1, 1, False), (-3, 1, 0, False)]
)
def test_a_condition_of_queries_that_is_always_true(start: int, step: int, least: int, is_true: bool) -> None:
    aten, graph = torch.ops.aten, fx.Graph()
    x = graph.placeholder("x")
    length = graph.call_function(aten.sym_size.int, (x, 0))
    column = graph.call_function(
        aten.unsqueeze.default, (graph.call_function(aten.arange.start_step, (start, length, step)), 1)
    )
    condition = graph.call_function(aten.ge.Tensor, (column, least))
    module = OperatorGraph(graph, {})
    found = gpu_lowering._of_any_query(module, condition, {condition: (5, 1, 7, 1)}, {})
    assert (found is not None) == is_true


def test_a_mask_that_excludes_nothing_is_dropped(files: Callable[[str], Exported]) -> None:
    """As transformers makes one for images."""
    imported, plan = files("vit").lowered()
    attention = torch.ops.aten.scaled_dot_product_attention.default
    for module, has_mask in ((import_onnx(files("vit").path).module, True), (imported.module, False)):
        fuse_attention(module)
        calls = [node for node in module.graph.nodes if is_call(node, attention)]
        assert [node.kwargs["attn_mask"] is not None for node in calls] == [has_mask] * 2
    assert "padded_attention" not in str(plan)


def test_a_plan_says_why_values_are_in_16_bits(files: Callable[[str], Exported]) -> None:
    text = str(files("bert").lowered()[1])
    assert "encoder.layer.0.intermediate.dense: linear_8bit + gelu\n" in text
    assert "    reads 8 bits of the attention of encoder.layer.0.attention.self\n" in text
    assert "    writes 16 bits for encoder.layer.0.output.dense, which adds them\n" in text
    attention = "the values of the attention of layers.0.self_attn come from an operator in floating point"
    text = str(files("llama").lowered()[1])
    assert f"    reads 8 bits that a kernel quantized, because {attention}\n" in text


@pytest.mark.parametrize("point", [0, 128, 77])
def test_zero_points_of_activations(tmp_path: Path, point: int) -> None:
    """A graph with UINT8 activations whose zero point is not that of symmetric values."""
    imported = _two_layers(tmp_path, point)
    x = _rows(8, 1)
    expected = program(_two_layers(tmp_path, point).module)(x)[0]
    lower_for_gpu(imported, dtype=torch.float32, triton=False)
    calls = [node for node in imported.module.graph.nodes if is_call(node, *KERNELS)]
    assert [is_call(node, *LINEARS) for node in calls] == [False, True, True]
    assert calls[1].args[7] == point - 128
    torch.testing.assert_close(program(imported.module)(x)[0], expected, rtol=1e-4, atol=1e-4)


def test_a_file_with_inputs_and_parameters_in_float16(tmp_path: Path) -> None:
    """Its output has the type that it has without a lowering."""
    x = _rows(8, 1).half()
    expected = program(_two_layers(tmp_path, 128, floats=np.float16).module)(x)[0]
    for dtype in (torch.float32, torch.float16):
        imported = _two_layers(tmp_path, 128, floats=np.float16)
        lower_for_gpu(imported, dtype=dtype, triton=False)
        found = program(imported.module)(x)[0]
        assert found.dtype is expected.dtype
        assert sqnr_db(expected.float().numpy(), found.float().numpy()) > 35


def _two_layers(folder: Path, point: int, *, weight_point: int = 0, floats: Any = np.float32) -> Imported:
    """Q > DQ > MatMul > Relu > Q > DQ > MatMul in UINT8, with these zero points."""
    import onnx
    from onnx import helper, numpy_helper

    draw = np.random.default_rng(0)
    constants = {"s": floats(0.02), "z": np.uint8(point), "ws": np.full(8, 0.01, floats)}
    constants |= {"wz": np.full(8, weight_point, np.int8), "b": draw.standard_normal(8).astype(floats)}
    constants |= {f"w{n}": draw.integers(-127, 128, (8, 8)).astype(np.int8) for n in (0, 1)}
    nodes = []
    for n, x in ((0, "x"), (1, "r")):
        nodes += [
            helper.make_node("QuantizeLinear", [x, "s", "z"], [f"q{n}"]),
            helper.make_node("DequantizeLinear", [f"q{n}", "s", "z"], [f"d{n}"]),
            helper.make_node("DequantizeLinear", [f"w{n}", "ws", "wz"], [f"dw{n}"], axis=1),
            helper.make_node("MatMul", [f"d{n}", f"dw{n}"], [f"m{n}"], name=f"layer{n}/MatMul"),
        ]
        nodes += [helper.make_node("Add", ["m0", "b"], ["a"]), helper.make_node("Relu", ["a"], ["r"])] if n == 0 else []
    values = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(floats)), ["batch", 8])
        for name in ("x", "m1")
    ]
    stored = [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], stored)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), folder / "two.onnx")
    return import_onnx(folder / "two.onnx")


def test_factors_of_smoothquant_are_part_of_the_scales(files: Callable[[str], Exported], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"activations": {"smoothquant_alpha": 0.5, "zero_point": True}}
    file = exported(tmp_path, tiny("bert", "sdpa"), MODELS["bert"][1], **settings)
    separate = import_onnx(file.path).module
    quantizers = [node for node in separate.graph.nodes if is_call(node, quantize)]
    assert sum(is_call(node.args[0], torch.ops.aten.mul.Tensor) for node in quantizers) >= 4
    imported, plan = file.lowered(torch.float32)
    _, plain = files("bert").lowered()
    assert [kernel.kernel for kernel in plan.kernels] == [kernel.kernel for kernel in plain.kernels]
    assert all("aten.mul" not in str(kernel) for kernel in plan.of("encoder"))
    assert _db(program(imported.module)(*file.arguments(imported))[0], file.expected) > 55


def test_a_layer_that_is_not_lowered_has_a_reason(tmp_path: Path) -> None:
    imported, separate = (_two_layers(tmp_path, 128, weight_point=3) for _ in range(2))
    _, reasons = lower_for_gpu(imported, dtype=torch.float32, triton=False)
    plan = kernel_plan(imported.module, reasons)
    assert set(plan.floating) == {"layer0", "layer1"}
    assert "without zero points" in plan.floating["layer0"]
    assert "layer0: floating point\n    its weight" in str(plan)
    x = _rows(8, 1)
    torch.testing.assert_close(program(imported.module)(x)[0], program(separate.module)(x)[0], rtol=1e-4, atol=1e-4)


def test_the_kernels_of_a_gated_block(files: Callable[[str], Exported]) -> None:
    _, plan = files("gated").lowered()
    found = [
        (kernel.sites[0], kernel.kernel, *kernel.fused, *(each.bits for each in kernel.writes))
        for kernel in plan.kernels
    ]
    assert found == [
        ("norm", "norm_8bit", 8),
        ("gate", "linear_8bit", "silu", 16),
        ("up", "linear_8bit", 16),
        ("down", "quantize_8bit", 8),
        ("down", "linear_8bit", "residual add", 16),
        ("norm", "norm_8bit", 8),
        ("last", "linear_8bit", "residual add", 16),
        ("end", "norm_8bit", 16),
    ]
