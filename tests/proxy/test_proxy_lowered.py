"""Lowered proxies: the model's own Python around integer kernels, and what computes as before."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ConvNet, Mlp, Snapshot, batch, needs_exact_byte_products, tiny
from quick_start import quick_compiler
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from toy_nets import net

from quantizer import Quantizer
from quantizer.engines.torch_engine.compiled import missing_compiler
from quantizer.errors import ProxyError
from quantizer.proxy.build import sites_of
from quantizer.proxy.integer_kernels import StoredWeight
from quantizer.proxy.lower import Lowering, lower

pytestmark = pytest.mark.usefixtures("exact_byte_products")


FP8 = {"activations": "fp8", "weights": "fp8"}


def rows(seed: int = 0, width: int = 32, count: int = 12) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def calibrated(model: nn.Module, *batches: Any, **config: Any) -> Quantizer:
    q = Quantizer(**{"preset": "plain", "backend": "torch", **config})
    q.calibrate(model.eval(), batches or [rows()], progress=False)
    return q


def flat(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def sqnr_db(found: Any, expected: Any) -> float:
    made, wanted = flat(found).detach().double(), flat(expected).detach().double()
    return float(10 * torch.log10(wanted.square().sum() / (made - wanted).square().sum().clamp(min=1e-30)))


class Wanders(nn.Module):
    """Control flow that depends on the data, which no exporter takes: a branch, a loop, and a list that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.step = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.rounds = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.left(x) if x.sum() > 0 else self.right(x)
        seen = [x]
        while seen[-1].abs().max() > 0.5 and len(seen) < 4:
            seen.append(0.6 * torch.tanh(self.step(seen[-1])))
        self.rounds = len(seen)
        return torch.stack(seen).sum(0)


def test_a_model_that_does_not_export_keeps_its_control_flow() -> None:
    model = Wanders().eval()
    inputs = [rows(1).abs(), -rows(2).abs(), 0.01 * rows(3).abs()]
    with pytest.raises(GuardOnDataDependentSymNode, match="data-dependent"):
        torch.export.export(model, (inputs[0],), strict=False)
    q = calibrated(model, *inputs)
    off, frozen, lowered = q.proxy(model), q.quantize(model), q.lower(model)
    assert {row.kernel for row in q.kernels(lowered)} == {"onednn::qlinear_pointwise"}
    counts = []
    for x in inputs:
        assert torch.equal(off(x), model(x))
        made = lowered(x)
        assert sqnr_db(made, frozen(x)) > 40
        assert sqnr_db(made, model(x)) > 20
        assert lowered.rounds == frozen.rounds == model.rounds
        counts.append(lowered.rounds)
    assert len(set(counts)) > 1


def test_the_model_and_its_frozen_proxy_stay_as_they_were() -> None:
    model = tiny("bert", "sdpa")
    given = batch("bert")
    q = calibrated(model, given)
    frozen, before = q.quantize(model), Snapshot.of(model)
    expected = frozen(**given)[0]
    q.lower(model)(**given)
    before.assert_unchanged(model)
    assert torch.equal(frozen(**given)[0], expected)


@pytest.mark.parametrize("architecture", ["bert", "mpnet", "vit", "dinov2"])
def test_encoders(architecture: str) -> None:
    model = tiny(architecture)
    given = batch(architecture)
    q = calibrated(model, given)
    frozen, lowered = q.quantize(model), q.lower(model)
    assert {row.kernel for row in q.kernels(lowered)} <= {"onednn::qlinear_pointwise", "onednn::qconv_pointwise"}
    with torch.no_grad():
        assert sqnr_db(lowered(**given), frozen(**given)) > 40


def test_attention_whose_products_stay_float_is_the_models_own() -> None:
    model, given = tiny("bert", "sdpa"), batch("bert", padded=True)
    q = calibrated(model, given)
    lowered = q.lower(model)
    own = [module for module in lowered.modules() if type(module).__name__ == "BertSelfAttention"]
    assert all(module.config._attn_implementation == "sdpa" for module in own)
    # Rewritten functions hold torch's own object, so the call is counted below it.
    with torch.profiler.profile() as seen:
        lowered(**given)
    assert any("scaled_dot_product" in event.name for event in seen.events())
    # Where products of activations are quantized, they are sites, and those round.
    q = calibrated(model, given, backend="openvino")
    lowered = q.lower(model)
    reasons = {row.operation: row.reason for row in q.kernels(lowered) if row.kernel is None}
    assert reasons["matmul"] == "no kernel multiplies two activations"
    assert all(
        module.config._attn_implementation == "eager" for module in lowered.modules() if hasattr(module, "config")
    )
    assert sqnr_db(lowered(**given), q.quantize(model)(**given)) > 40


def test_layers_of_transformer_encoders_of_torch_run_their_sites() -> None:
    model = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval()
    x = rows().reshape(2, 6, 32)
    q = calibrated(model, x)
    lowered = q.lower(model)
    with torch.no_grad():
        assert sqnr_db(lowered(x), q.quantize(model)(x)) > 40
    assert len(q.kernels(lowered)) >= 3


class Conv1D(nn.Module):
    """The linear of GPT-2, whose weight is [K, N]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(0.2 * rows(5, 48, 32)), nn.Parameter(rows(6, 48, 1)[0])

    def forward(self, x: Tensor) -> Tensor:
        size = (*x.shape[:-1], 48)
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(size)


class Products(nn.Module):
    """Weights read in all ways that have a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table = Conv1D(), nn.Embedding(20, 32)
        self.plain, self.turned = nn.Parameter(0.2 * rows(7, 32, 48)), nn.Parameter(0.2 * rows(8, 32, 16))

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.relu(self.first(self.table(ids))) @ self.plain
        return torch.mm(x.flatten(0, 1), self.turned.t())


def test_products_by_weights_in_all_spellings() -> None:
    model, ids = Products(), torch.arange(20).reshape(4, 5)
    q = calibrated(model, ids, backend="onnxruntime", sites={"embedding": True})
    frozen, lowered = q.quantize(model), q.lower(model)
    kernels = {row.operation: row.kernel for row in q.kernels(lowered)}
    assert kernels == {
        "embedding": "aten::embedding",
        **dict.fromkeys(("addmm", "matmul", "mm"), "onednn::qlinear_pointwise"),
    }
    assert sqnr_db(lowered(ids), frozen(ids)) > 40


def test_a_call_that_no_kernel_makes_rounds_as_before() -> None:
    model = net(
        "torch.addmm(self.bias, x, self.weight, beta=self.beta)",
        weight=nn.Parameter(rows(3, 16, 32)),
        bias=nn.Parameter(torch.ones(16)),
        beta=1.0,
    ).eval()
    q = calibrated(model)
    frozen, lowered = q.quantize(model), q.lower(model)
    assert not torch.equal(lowered(rows()), frozen(rows()))
    lowered.beta = frozen.beta = 0.5
    assert torch.equal(lowered(rows()), frozen(rows()))


@needs_exact_byte_products
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_convolutions_keep_the_layout_that_the_model_goes_on_with(layout: torch.memory_format) -> None:
    model = ConvNet().eval().to(memory_format=layout)
    x = torch.randn(4, 3, 16, 16).to(memory_format=layout)
    q = calibrated(model, x)
    frozen, lowered = q.quantize(model), q.lower(model)
    assert [row.kernel for row in q.kernels(lowered)].count("onednn::qconv_pointwise") == 2
    with torch.no_grad():
        assert sqnr_db(lowered(x), frozen(x)) > 40
        assert lowered.stem(x).is_contiguous(memory_format=layout)


@pytest.mark.parametrize(
    ("backend", "width", "kernel"),
    [
        ("onnxruntime", 32, "onednn::qlinear_pointwise"),
        ("openvino", 128, "onednn::qlinear_pointwise"),  # a block is a row
        ("openvino", 256, None),
    ],
)
def test_ranges_of_each_call(backend: str, width: int, kernel: str | None) -> None:
    model = nn.Sequential(nn.Linear(width, 16)).eval()
    q = calibrated(model, rows(0, width), backend=backend, activations={"ranges": "dynamic"})
    frozen, lowered = q.quantize(model), q.lower(model)
    (row,) = q.kernels(lowered)
    assert row.kernel == kernel
    assert ("one range per 128 values" in row.reason) == (kernel is None)
    for size in (0.1, 40.0):
        x = size * rows(1, width).reshape(3, 4, width)
        assert sqnr_db(lowered(x), frozen(x)) > 50


def test_outliers_moved_into_weights_and_corrected_biases() -> None:
    model = Mlp().eval()
    loud = rows()
    loud[:, 3] *= 50
    q = calibrated(model, loud, activations={"smoothquant_alpha": 0.5})
    frozen, lowered = q.quantize(model), q.lower(model)
    assert any(site.quantizer(0).factor is not None for site in sites_of(lowered))
    for site in sites_of(frozen), sites_of(lowered):
        for one in site:
            if one.active and one.source.operation == "linear":
                one.bias_shift = torch.linspace(-1, 1, one.quantizer(1).stored.shape[0])
    for site in sites_of(lowered):
        if site.active:
            site.chosen = None
    assert sqnr_db(lowered(loud), frozen(loud)) > 40
    assert torch.equal(lowered(loud), lowered(loud))


@pytest.mark.parametrize(
    ("formats", "reason"),
    [
        (
            {"activations": "float", "weights": "int4", "block_size": 16},
            "no kernel supports weights in int4 with",
        ),
        ({"activations": "float", "weights": "int8"}, "only its weight is quantized"),
        (FP8, "CPUs have no kernels for fp8"),
    ],
)
def test_sites_without_a_kernel_round_as_before(
    formats: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(128, 64)).eval()
    q = calibrated(model, rows(0, 128), backend="tensorrt", formats=[formats])
    lowered = q.lower(model)
    (row,) = q.kernels(lowered)
    assert row.kernel is None
    assert reason in row.reason
    assert f"lower() found no kernel, so the model is the same as after quantize(): {reason}" in caplog.text
    assert reason.split()[-1] in str(q.kernels(lowered))
    assert torch.equal(lowered(rows(1, 128)), q.quantize(model)(rows(1, 128)))


def test_sites_that_fell_back_are_not_listed() -> None:
    model = Mlp().eval()
    q = calibrated(model, rows(), exclude={"names": ["up"]})
    assert [row.name for row in q.kernels(q.lower(model))] == ["down.forward.linear_0"]


def test_what_arrives_at_run_time_decides_too() -> None:
    model = nn.Sequential(nn.Linear(32, 8)).eval()
    q = calibrated(model)
    frozen, lowered = q.quantize(model), q.lower(model)
    assert lowered(rows()[:0]).shape == (0, 8)
    assert lowered(rows()[0]).shape == (8,)
    turned = rows().t()[:, :12].reshape(4, 8, 12).transpose(0, 2).contiguous()
    image = turned.reshape(1, 12, 4, 8).permute(0, 3, 2, 1)[..., :12]
    wide = nn.functional.pad(image, (0, 20)).to(memory_format=torch.channels_last)
    assert not wide.is_contiguous()
    assert sqnr_db(lowered(wide), frozen(wide)) > 40
    with torch.inference_mode():
        assert sqnr_db(lowered(rows(1)), frozen(rows(1))) > 40


def test_reads_of_a_stored_weight_outside_of_its_site() -> None:
    model = nn.Sequential(nn.Linear(32, 8)).eval()
    q = calibrated(model)
    frozen, lowered = q.quantize(model), q.lower(model)
    weight = lowered[0].weight
    assert isinstance(weight, StoredWeight)
    assert weight is lowered[0].weight
    assert (weight.dtype, weight.shape, weight.device) == (torch.float32, (8, 32), torch.device("cpu"))
    assert torch.equal(weight + 0, frozen[0].weight)
    assert torch.equal(weight.t()[3:5], frozen[0].weight.t()[3:5])
    assert repr(weight).startswith("StoredWeight(tensor(")
    first = next(lowered.parameters())
    assert isinstance(first, nn.Parameter)
    assert torch.equal(first.detach() + 0, frozen[0].weight)
    assert torch.equal(copy.deepcopy(weight), frozen[0].weight)
    assert lowered.state_dict().keys() == frozen.state_dict().keys()


def test_another_weight_than_the_frozen_one_is_refused() -> None:
    model = net(
        "F.linear(x, self.table[self.pick])", table=nn.Parameter(rows(3, 32, 16).reshape(2, 8, 32)), pick=0
    ).eval()
    q = calibrated(model)
    lowered = q.lower(model)
    assert q.kernels(lowered)[0].kernel is not None
    lowered(rows())
    lowered.pick = 1
    with pytest.raises(ProxyError, match="is not the frozen one"):
        lowered(rows())


def test_it_is_for_inference() -> None:
    model = Mlp().eval()
    q = calibrated(model)
    lowered = q.lower(model)
    assert not lowered.training
    lowered.train()
    with pytest.raises(ProxyError, match="frozen with integer weights and cannot be trained"):
        lowered(rows())
    lowered.eval()
    x = rows().requires_grad_()
    assert torch.equal(lowered(x), lowered(rows()))
    with pytest.raises(ProxyError, match="the model is already a proxy"):
        q.lower(lowered)
    with pytest.raises(ProxyError, match="the model that quantize"):
        q.export(lowered, "never.onnx", rows())
    with pytest.raises(ProxyError, match="the model that lower"):
        q.kernels(q.quantize(model))


def test_copies_casts_and_loaded_states_choose_their_kernels_again() -> None:
    model, other = Mlp().eval(), Mlp().eval()
    q, theirs = calibrated(model), calibrated(other)
    lowered = q.lower(model)
    x = rows(1)
    expected = lowered(x)
    twin = copy.deepcopy(lowered)
    assert torch.equal(twin(x), expected)
    assert all(row.kernel for row in q.kernels(twin))
    double = copy.deepcopy(lowered).double()
    assert {row.reason for row in q.kernels(double) if row.operation == "linear"} == {
        "no kernel returns float64, the type of the weight"
    }
    twin.load_state_dict(theirs.quantize(other).state_dict())
    assert torch.equal(twin(x), theirs.lower(other)(x))
    assert torch.equal(lowered(x), expected)


def test_a_saved_quantizer_lowers_again(tmp_path: Path) -> None:
    model = Mlp().eval()
    q = calibrated(model)
    q.save(tmp_path / "saved")
    assert torch.equal(Quantizer.load(tmp_path / "saved").lower(model)(rows(1)), q.lower(model)(rows(1)))


def test_weights_whose_products_saturate_are_left_to_floats() -> None:
    model = nn.Sequential(nn.Linear(32, 8)).eval()
    q = calibrated(model, backend="onnxruntime")
    frozen = q.quantize(model)
    widest = int(next(site for site in sites_of(frozen)).quantizer(1).stored.int().abs().max())
    (row,) = q.kernels(lower(q.quantize(model), Lowering(widest=widest - 1)))
    assert row.kernel is None
    assert row.reason == "this CPU adds products of bytes in 16 bits, which saturate"
    (row,) = q.kernels(lower(q.quantize(model), Lowering(widest=widest)))
    assert row.kernel is not None


@pytest.mark.parametrize(
    ("config", "kernel"),
    [
        ({"backend": "torch"}, "aten::_int_mm"),
        ({"backend": "onnxruntime", "activations": {"ranges": "dynamic"}}, "aten::_int_mm"),
        ({"backend": "tensorrt-rtx"}, "aten::_int_mm"),
        ({"backend": "tensorrt", "formats": [FP8]}, "aten::_scaled_mm"),
    ],
)
def test_the_kernels_of_a_gpu_run_here_too(config: dict[str, Any], kernel: str) -> None:
    model = nn.Sequential(nn.Linear(36, 20), nn.GELU(), nn.Linear(20, 12)).eval()
    q = calibrated(model, rows(0, 36), **config)
    frozen, lowered = q.quantize(model), lower(q.quantize(model), Lowering(kernels="cuda"))
    assert {row.kernel for row in q.kernels(lowered)} == {kernel}
    assert sqnr_db(lowered(rows(1, 36)), frozen(rows(1, 36))) > 40


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Inductor imports
@pytest.mark.parametrize(
    "config",
    [
        {},
        pytest.param(
            {"backend": "onnxruntime", "activations": {"ranges": "dynamic"}}, marks=pytest.mark.nightly, id="dynamic"
        ),
    ],
)
def test_a_compiled_one_fuses_what_lies_between(config: dict[str, Any]) -> None:
    if missing_compiler() is not None:
        pytest.skip(f"nothing can be compiled here: {missing_compiler()}")
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8)).eval()
    q = calibrated(model, **config)
    frozen, lowered = q.quantize(model), q.lower(model)
    # As one that was moved to a GPU, and was not called there before.
    compiled = torch.compile(q.lower(model).cpu(), fullgraph=True)
    with torch.no_grad(), quick_compiler():
        assert sqnr_db(compiled(rows(1)), lowered(rows(1))) > 40
        assert sqnr_db(compiled(rows(2)), frozen(rows(2))) > 40


@pytest.mark.parametrize("kernels", [None, "cuda"])
@pytest.mark.parametrize(
    ("dtype", "config"),
    [
        (torch.float16, {}),
        (torch.bfloat16, {}),
        # Without float16: under its autocast torch's operator for FP8 on a CPU adds in it, and overflows.
        (torch.bfloat16, {"backend": "tensorrt", "formats": [FP8]}),
    ],
    ids=["int8-float16", "int8", "fp8"],
)
def test_in_half_precision_results_have_the_type_of_the_model_or_of_autocast(
    kernels: str | None, dtype: torch.dtype, config: dict[str, Any]
) -> None:
    model = nn.Sequential(nn.Linear(36, 20), nn.GELU(), nn.Linear(20, 12)).eval()
    q = calibrated(model, rows(0, 36), **config)
    frozen, lowered = q.quantize(model), lower(q.quantize(model), Lowering(kernels=kernels))
    held = copy.deepcopy(lowered).to(dtype)
    if kernels is not None:
        assert all(row.kernel for row in [*q.kernels(lowered), *q.kernels(held)])
    x = rows(1, 36)
    with torch.autocast("cpu", dtype=dtype):
        found, expected = lowered(x), frozen(x)
    assert found.dtype is expected.dtype is held(x.to(dtype)).dtype is dtype
    assert sqnr_db(found.float(), frozen(x)) > 35
    assert sqnr_db(held(x.to(dtype)).float(), frozen(x)) > 35


def test_a_table_of_a_model_in_half_precision_gives_rows_in_it() -> None:
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 8)).eval()
    q = calibrated(model, torch.randint(0, 50, (12, 7)))
    lowered = q.lower(model)
    held = copy.deepcopy(lowered).bfloat16()
    ids = torch.randint(0, 50, (2, 7))
    assert all(row.kernel for row in q.kernels(held))
    assert held[0](ids).dtype is torch.bfloat16
    assert sqnr_db(held(ids).float(), lowered(ids)) > 35


@pytest.mark.parametrize("triton", [False, True])
@pytest.mark.parametrize("config", [{}, {"backend": "tensorrt", "formats": [FP8]}], ids=["int8", "fp8"])
def test_blocks_with_other_ranges_share_one_compilation(config: dict[str, Any], triton: bool) -> None:
    if triton:
        pytest.importorskip("triton", reason="kernels need enginequant[triton]")
    counter = CompileCounter()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4))).eval()
    q = calibrated(model, rows(), **config)
    lowered, expected = lower(q.quantize(model), Lowering(kernels="cuda", triton=triton)), q.quantize(model)(rows(1))
    assert len({float(site.quantizer(0).scale) for site in sites_of(lowered)}) == 4
    for block in lowered:
        block.compile(backend=counter)
    with torch.no_grad():
        assert sqnr_db(lowered(rows(1)), expected) > 40
    assert counter.frame_count == 1


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Inductor imports
@pytest.mark.parametrize("triton", [False, True])
def test_on_a_gpu_eager_and_compiled(triton: bool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU is here")
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)).eval()
    q = calibrated(model, rows(0, 64, 40))
    frozen, lowered = q.quantize(model), q.lower(model, triton=triton).cuda()
    assert {row.kernel for row in q.kernels(lowered)} == {"quantizer::triton_linear" if triton else "aten::_int_mm"}
    x = rows(1, 64, 40)
    with torch.no_grad():
        assert sqnr_db(lowered(x.cuda()).cpu(), frozen(x)) > 40
        assert sqnr_db(torch.compile(lowered)(x.cuda()).cpu(), frozen(x)) > 40


class Forces(nn.Module):
    """A model of energies, whose forward computes the forces as their gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 16))

    def forward(self, places: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            places = places.detach().requires_grad_(True)
            energy = self.energy(places).sum() + places.square().sum()
            return energy.detach(), -torch.autograd.grad(energy, places)[0]


def test_a_gradient_of_a_lowered_model_is_an_error_and_not_a_wrong_one() -> None:
    torch.manual_seed(0)
    model, x = Forces().eval(), rows()
    q = calibrated(model, x)
    lowered = q.lower(model)
    with pytest.raises(ProxyError, match=r"linear_0: integer kernels of a lowered model have no gradients"):
        lowered(x)
    expected = model(x)[1]
    torch.testing.assert_close(q.quantize(model)(x)[1], expected, rtol=0.1, atol=0.05)


def test_parameters_of_a_lowered_model_need_no_gradient() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 300), nn.ReLU(inplace=True), nn.Linear(300, 300), nn.Tanh())
    model[0].weight.data.uniform_(0.5, 1.5)
    q = calibrated(model)
    lowered = q.lower(model)
    # With gradients recorded, as nobody has said otherwise.
    assert not lowered(rows()).requires_grad
    assert all(parameter.requires_grad for parameter in model.parameters())
