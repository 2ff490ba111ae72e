"""Each operation of the catalogue: exact while off, observed, rounded as torch rounds, frozen, saved and exported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_same
from torch import Tensor, nn
from torch.nn import functional as F
from toy_nets import linear, net

from quantizer import Quantizer
from quantizer.plan.reasons import ReasonCode
from quantizer.plan.site_plan import SitePlan
from quantizer.plan.targets.base import TargetProfile
from quantizer.proxy.eager_attention import attention
from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.proxy.weight import Weights

sdpa = F.scaled_dot_product_attention


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- products of two activations -----------------------------------------------------------------------------------


PRODUCTS = {
    "mm": "torch.mm(x[0], y[0])",
    "method mm": "x[0].mm(mat2=y[0])",
    "addmm": "torch.addmm(x[0, :, :1], x[0], y[0], beta=0.5, alpha=2)",
    "method addmm": "(x[0] @ y[0]).addmm(x[0], mat2=y[0])",
    "baddbmm": "torch.baddbmm(x[..., :1], batch1=x, batch2=y)",
    "method baddbmm": "x.new_ones(1).baddbmm(x, y, alpha=0.125)",
    "baddbmm in place": """
total = x.new_zeros(3, 16, 24)
same = total.view(-1)
total.baddbmm_(x, y, beta=0)
return same.view(3, 16, 24)
""",
    "unbound": "Tensor.matmul(x, y)",
    "addbmm": "torch.addbmm(x[0, :, :1], x, y)",
    "method addbmm": "x[0, :, :1].addbmm(x, y, beta=0)",
    "einsum": "torch.einsum('bij,bjk->bik', x, y)",
    "einsum with dots": "torch.einsum('...ij, ...jk', x, y)",
    "einsum of a pair": "equation = 'bij,bjk->bik'; return torch.einsum(equation, (x, y))",
}


# -- products by a weight ------------------------------------------------------------------------------------------


# expression, shape of the weight, axis of its channels, rows that it multiplies
WEIGHTED = {
    "matmul": ("torch.matmul(x, self.w)", (32, 24), 1, 48),
    "on the left": ("self.w.matmul(x.transpose(1, 2))", (24, 32), 0, 48),
    "addmm": ("torch.addmm(self.b, x[0], self.w)", (32, 24), 1, 16),
    "einsum": ("torch.einsum('bti,io->bto', x, self.w)", (32, 24), 1, 48),
    "view t": ("x @ self.w.t()", (24, 32), 1, 48),
    "view transpose": ("torch.matmul(x, self.w.transpose(0, 1))", (24, 32), 1, 48),
    "view permute": ("torch.bmm(x, self.w.permute(2, 0, 1))", (32, 24, 3), 2, 48),
    "view T": ("torch.addmm(self.b[:1], x[0], self.w.T)", (24, 32), 1, 16),
    "view mT": ("F.linear(x, self.w.mT)", (32, 24), 0, 48),
    "view": ("x @ self.w.view(32, -1)", (8, 4, 24), 1, 48),
    "view detached": ("x @ self.w.detach()", (32, 24), 1, 48),
}


def _by_weight(text: str, *shape: int) -> nn.Module:
    """A net with a weight of its own, and a bias."""
    return net(text, w=nn.Parameter(_random(*shape, seed=1)), b=nn.Parameter(_random(*shape[-1:], seed=2)))


def _calibrated(model: nn.Module, *batch: Tensor, **options: Any) -> Quantizer:
    """The proxies are exact, and the model is calibrated."""
    model.eval()
    q = Quantizer(preset="plain", **{"backend": "openvino", "activations": {"calibrator": "max"}, **options})
    with torch.no_grad():
        expected = model(*batch)
        assert_same(q.proxy(model)(*batch), expected)
        assert_same(q.calib(model)(*batch), expected)
    return q


def _product(q: Quantizer) -> SitePlan:
    """The one quantized site."""
    (site,) = (site for site in q.plan.values() if site.quantized)
    return site


def _fake(x: Tensor, scale: Tensor | None, axis: int | None = None) -> Tensor:
    """What torch itself makes of an operand."""
    assert scale is not None
    if axis is None:
        return torch.fake_quantize_per_tensor_affine(x, float(scale), 0, -128, 127)
    return torch.fake_quantize_per_channel_affine(x, scale, torch.zeros(len(scale), dtype=torch.int32), axis, -128, 127)


def _exported(q: Quantizer, frozen: nn.Module, folder: Path, *batch: Tensor, **options: Any) -> list[str]:
    """ONNX Runtime computes what the frozen proxy computes; the operators of the graph."""
    onnx = pytest.importorskip("onnx", reason="needs enginequant[onnx]")
    ort = pytest.importorskip("onnxruntime", reason="needs enginequant[onnxruntime]")
    path = q.export(frozen, folder / "model.onnx", batch, dynamic_axes={}, **options)
    settings = ort.SessionOptions()
    settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    (result,) = session.run(None, {name: value.numpy() for name, value in zip(names, batch, strict=True)})
    with torch.no_grad():
        expected = frozen(*batch)
    # A sum in another order may move a value over a rounding step behind it.
    assert (torch.from_numpy(result) - expected).norm() <= 1e-3 * expected.norm()
    return [node.op_type for node in onnx.load(path).graph.node]


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_of_activations(name: str, tmp_path: Path) -> None:
    batch = (_random(3, 16, 32), _random(3, 32, 24, seed=3))
    model = net(PRODUCTS[name], "x, y")
    q = _calibrated(model, *batch, sites={"residual_add": False})
    frozen = q.quantize(model)
    sites = [site for site in q.plan.values() if site.quantized]
    assert {site.kind for site in sites} == {"matmul"}
    assert {site.multiply_adds for site in sites} == {(1 if "[0]" in PRODUCTS[name] else 3) * 16 * 32 * 24}
    with torch.no_grad():
        x, y = (_fake(value, operand.scale) for value, operand in zip(batch, sites[0].operands, strict=True))
        # What an operation adds to the product of rounded operands is not rounded.
        added = {
            "addmm": 0.5 * batch[0][0, :, :1] + 2 * x[0] @ y[0],
            "method addmm": 2 * x[0] @ y[0],
            "baddbmm": batch[0][..., :1] + x @ y,
            "addbmm": batch[0][0, :, :1] + (x @ y).sum(0),
        }
        expected = added[name] if name in added else model(x, y)
        torch.testing.assert_close(frozen(*batch), expected, rtol=1e-5, atol=1e-4)
    assert _exported(q, frozen, tmp_path, *batch).count("QuantizeLinear") >= 2


@pytest.mark.parametrize("name", WEIGHTED)
def test_a_product_by_a_weight(name: str, tmp_path: Path) -> None:
    text, shape, axis, rows = WEIGHTED[name]
    model, x = _by_weight(text, *shape), _random(3, 16, 32)
    q = _calibrated(model, x)
    site = _product(q)
    weight = next(operand for operand in site.operands if operand.role == "weight")
    assert (site.kind, site.multiply_adds, site.reads) == ("linear", rows * 32 * 24, ("w",))
    assert (weight.parameter, weight.axis, len(weight.scale)) == ("w", axis, 24)
    # Each output channel of the float product has the range of its weights.
    seen = weight.view.of(model.w) if weight.view else model.w.detach()
    assert torch.equal(weight.amax, seen.abs().amax(dim=[d for d in range(seen.dim()) if d != axis]))
    frozen = q.quantize(model)
    with torch.no_grad():
        rounded = _by_weight(text, *shape)
        rounded.w.copy_(_as_parameter(_fake(seen, weight.scale, axis), weight.view, shape))
        scale = next(operand.scale for operand in site.operands if operand.role == "activation")
        torch.testing.assert_close(frozen(x), rounded(_fake(x, scale)), rtol=1e-5, atol=1e-4)
    assert [value.dtype for key, value in frozen.named_buffers() if key.endswith("stored")] == [torch.int8]
    # A weight seen through a view stays the module's own too.
    assert ("w" in dict(frozen.named_parameters())) == name.startswith("view")
    operators = _exported(q, frozen, tmp_path, x)
    assert (operators.count("DequantizeLinear"), operators.count("QuantizeLinear")) == (2, 1)


def _as_parameter(operand: Tensor, view: Any, shape: tuple[int, ...]) -> Tensor:
    """The parameter of which ``operand`` is the view."""
    if view is None:
        return operand
    back = [view.order.index(axis) for axis in range(len(view.order))]
    return operand.permute(back).reshape(shape)


def test_packed_weights_are_parts_of_one_parameter(tmp_path: Path) -> None:
    text = "first, second = self.w.chunk(2); return F.linear(x, first) @ F.linear(x, second).mT"
    model, x = _by_weight(text, 32, 32), _random(3, 16, 32)
    q = _calibrated(model, x)
    weights = [operand for site in q.plan.values() for operand in site.operands if operand.role == "weight"]
    assert [(o.parameter, o.view.offset, o.axis, o.quantized) for o in weights] == [
        ("w", 0, 0, True),
        ("w", 16 * 32, 0, True),
    ]
    assert torch.equal(torch.cat([o.amax for o in weights]), model.w.detach().abs().amax(1))
    with torch.no_grad():
        frozen = q.quantize(model)(x)
        assert torch.equal(Quantizer.load(q.save(tmp_path / "saved")).quantize(model)(x), frozen)
        assert 0 < float((frozen - model(x)).abs().max()) < 0.1 * float(model(x).abs().max())


def test_a_scattered_part_of_a_parameter_is_a_computed_weight() -> None:
    text = "x @ self.w[:, :8] + x @ self.w.t().contiguous().t()[:, 8:16] + x @ self.w[:, ::3]"
    model, x = _by_weight(text, 32, 24), _random(3, 16, 32)
    q = _calibrated(model, x, sites={"residual_add": False})
    products = [site for site in q.plan.values() if site.kind == "linear"]
    assert [(site.quantized, site.operands[1].parameters, site.operands[1].view) for site in products] == [
        (True, ("w",), None)
    ] * 3
    with torch.no_grad():
        frozen = q.quantize(model)(x)
        assert 0 < float((frozen - model(x)).abs().max()) < 0.1 * float(model(x).abs().max())


@pytest.mark.parametrize(
    ("take", "same"),
    [
        (lambda w: w, True),
        (lambda w: w.t(), True),
        (lambda w: w[None], True),
        (lambda w: w.view(2, 12, 32).permute(1, 0, 2), True),
        (lambda w: w.view(24, 32, 1).mT, True),
        (lambda w: w.data.T, True),
        (lambda w: w[1:], True),
        (lambda w: w[3:9].T, True),
        (lambda w: w[2:4].unsqueeze(0).transpose(0, 1), True),
        (lambda w: w.unsqueeze(-1), True),
        (lambda w: w.data.view(torch.int32), False),
        (lambda w: w.flatten()[:5].repeat(2), False),
        (lambda w: w[:, 1:], False),
        (lambda w: w[:, ::2], False),
        (lambda w: w[:1].expand(24, 32), False),
        (lambda w: w.clone(), False),
        (lambda w: w.half(), False),
        (lambda w: 3, False),
    ],
)
def test_what_is_an_unbroken_part_of_a_parameter(take: Callable[[Tensor], Any], same: bool) -> None:
    parameter = nn.Parameter(_random(24, 32))
    other = nn.Parameter(_random(24, 32))
    value = take(parameter)
    found = Weights([("other", other), ("w", parameter)]).find(value)
    assert (found is not None) == same
    if found is not None:
        assert found.path == "w"
        assert torch.equal(found.tensor(), value.detach())


@pytest.mark.parametrize(
    ("switch", "left"), [("linear", {"matmul"}), ("matmul", {"linear"})], ids=["no linear", "no matmul"]
)
def test_a_switch_goes_by_what_the_operands_are(switch: str, left: set[str]) -> None:
    model = _by_weight("torch.matmul(torch.matmul(x, self.w), x.mT)", 32, 32)
    q = _calibrated(model, _random(3, 16, 32), sites={switch: False})
    assert {site.kind for site in q.plan.values() if site.quantized} == left
    (off,) = (site for site in q.plan.values() if not site.quantized)
    assert (off.reason, off.rule) == ("this kind of site is switched off", f"sites.{switch}: false")
    # What is switched off is measured, but has no range.
    assert off.multiply_adds > 0
    assert off.operands == ()


def test_a_target_without_attention_quantizes_products_by_weights() -> None:
    q = _calibrated(_by_weight("torch.matmul(x, self.w)", 32, 24), _random(3, 16, 32), backend="onnxruntime")
    assert _product(q).kind == "linear"


def test_what_a_product_by_a_weight_makes_may_be_a_residual() -> None:
    model = _by_weight("x + torch.matmul(x, self.w)", 32, 32)
    q = _calibrated(model, _random(3, 16, 32), sites={"residual_add": True})
    assert [site.kind for site in q.plan.values() if site.quantized] == ["residual_add", "linear"]


def test_a_vector_of_weights_has_one_scale() -> None:
    weight = _product(_calibrated(_by_weight("torch.matmul(x, self.w)", 32), _random(3, 16, 32))).operands[1]
    assert (weight.role, weight.axis) == ("weight", None)


def test_transformers_conv1d(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs enginequant[hf]")
    from transformers.pytorch_utils import Conv1D

    model, x = nn.Sequential(Conv1D(24, 32)), _random(3, 16, 32)
    nn.init.normal_(model[0].bias)
    q = _calibrated(model, x)
    weight = _product(q).operands[1]
    assert (_product(q).kind, weight.axis, weight.parameter) == ("linear", 1, "0.weight")
    assert torch.equal(weight.amax, model[0].weight.detach().abs().amax(0))
    frozen = q.quantize(model)
    assert "0.weight" not in dict(frozen.named_parameters())
    assert {"MatMul", "Add"} <= set(_exported(q, frozen, tmp_path, x))


# -- transposed convolutions and embeddings ------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2], ids=lambda groups: f"groups={groups}")
def test_a_transposed_convolution(axes: int, groups: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No engine for CPUs has an integer kernel for it, and TensorRT takes more channels: a target that plans it.
    monkeypatch.setattr(TargetProfile, "kernel_reason", lambda *_: None)
    make = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[axes]
    model = make(4, 6, 3, stride=2, groups=groups)
    x = _random(2, 4, *[5] * axes)
    q = _calibrated(model, x)
    site = _product(q)
    weight = site.operands[1]
    # With groups, axis 1 holds the channels of all groups: one scale.
    assert (site.kind, weight.axis) == ("conv", 1 if groups == 1 else None)
    assert site.multiply_adds == x.numel() * (6 // groups) * 3**axes
    frozen = q.quantize(model)
    with torch.no_grad():
        wanted = make(4, 6, 3, stride=2, groups=groups)
        wanted.weight.copy_(_fake(model.weight, weight.scale, weight.axis))
        wanted.bias.copy_(model.bias)  # type: ignore[union-attr]
        torch.testing.assert_close(frozen(x), wanted(_fake(x, site.operands[0].scale)), rtol=1e-5, atol=1e-5)
    assert "ConvTranspose" in _exported(q, frozen, tmp_path, x)


def _lookup() -> nn.Module:
    return net("self.head(self.words(ids))", "ids", words=nn.Embedding(20, 32, padding_idx=0), head=nn.Linear(32, 24))


@pytest.mark.parametrize(
    ("backend", "first"),
    [("tensorrt-rtx", ["DequantizeLinear", "Gather"]), ("openvino", ["Gather", "Cast", "Gather", "Mul"])],
    ids=["the table", "its rows"],
)
def test_an_embedding_is_stored_row_by_row(tmp_path: Path, backend: str, first: list[str]) -> None:
    model, ids = _lookup(), torch.arange(20).reshape(2, 10)
    q = _calibrated(model, ids, backend=backend, fallback_dtype="float32", sites={"embedding": True})
    table = q.plan["words.forward.embedding_0"]
    (weight,) = table.operands
    assert (table.kind, table.multiply_adds, weight.axis, weight.parameter) == ("embedding", 0, 0, "words.weight")
    assert weight.group == "words.forward.embedding_0"
    frozen = q.quantize(model)
    with torch.no_grad():
        expected = _fake(model.words.weight, weight.scale, 0)[ids]
        assert torch.equal(frozen.words(ids), expected)
    assert "words.weight" not in dict(frozen.named_parameters())
    assert frozen.words.weight.shape == (20, 32)
    operators = _exported(q, frozen, tmp_path, ids)
    assert operators[: len(first)] == first


@pytest.mark.parametrize(
    ("rows", "backend", "sites", "reason", "rule"),
    [
        (2**13, "openvino", {}, "int8: weight", ""),
        (2**13, "onnxruntime", {}, "int8: weight", ""),
        (2**13, "openvino", {"embedding": False}, "this kind of site is switched off", "sites.embedding: false"),
        (
            2**13,
            "tensorrt-rtx",
            {},
            "tensorrt-rtx gains nothing from quantizing this kind of site",
            "sites.embedding: auto",
        ),
        (
            2**13 - 1,
            "openvino",
            {},
            "its embedding table has 262112 elements, fewer than 262144: integers",
            "sites.embedding: auto",
        ),
    ],
)
def test_large_tables_are_stored_in_codes_where_rows_of_them_are_read(
    rows: int, backend: str, sites: dict[str, bool], reason: str, rule: str
) -> None:
    model = _lookup()
    model.words = nn.Embedding(rows, 32)
    q = _calibrated(model, torch.arange(20).reshape(2, 10), backend=backend, sites=sites)
    row = q.plan["words.forward.embedding_0"]
    assert (row.quantized, row.rule) == (not rule, rule or f"target {backend}")
    assert row.reason.startswith(reason)
    assert ("words.weight" in dict(q.quantize(model).named_parameters())) == bool(rule)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_frozen_lookup_dequantizes_the_rows_that_are_asked_for(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = _lookup().to(dtype), torch.arange(20).reshape(2, 10)
    model.words.weight.data[3] = 0
    q = _calibrated(model, ids, sites={"embedding": True})
    frozen = q.quantize(model)
    whole = frozen.words.weight
    expected = whole + 0
    monkeypatch.setattr(OperandQuantizer, "dequantized", lambda _: pytest.fail("the whole table"))
    for rows in (torch.tensor([[3, 3], [19, 0]]), torch.tensor(7), torch.empty(0, dtype=torch.long)):
        assert_same(frozen.words(rows), expected[rows])


@pytest.mark.parametrize("rounding", ["nearest", "gptq"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lookup_in_a_table_that_trains_rounds_the_same_rows(dtype: torch.dtype, rounding: str) -> None:
    model, ids = _lookup().to(dtype), torch.arange(20).reshape(2, 10)
    q = _calibrated(model, ids, sites={"embedding": True}, weights={"rounding": rounding})
    proxy = q.qat(model, copy=True).eval()
    with torch.no_grad():
        found = proxy.words(ids)
    assert_same(found, proxy.words(ids).detach())
    assert_same(found, q.quantize(model).words(ids))


@pytest.mark.parametrize("scales", ["fixed", "average", "learned"])
def test_a_table_trains_as_if_it_were_rounded_whole(scales: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.tensor([[3, 3, 7, 0], [19, 3, 0, 5]])

    def trained() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        model = _lookup()
        q = _calibrated(model, torch.arange(20).reshape(2, 10), sites={"embedding": True})
        proxy = q.qat(model, copy=True, scales=scales)
        optimizer = torch.optim.Adam(proxy.parameters(), lr=0.01)
        for _ in range(4):
            optimizer.zero_grad()
            proxy(ids).square().sum().backward()
            optimizer.step()
        proxy.eval()
        with torch.no_grad():
            found = proxy.words(ids)
        assert_same(found, proxy.words(ids).detach())
        return proxy, found

    proxy, found = trained()
    monkeypatch.setattr(OperandQuantizer, "rows", lambda *_: None)
    whole, expected = trained()
    # The gradient of a learned scale is a sum over the calls of its row, in another order.
    near = {"rtol": 1e-4, "atol": 1e-4} if scales == "learned" else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(found, expected, **near)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(proxy.get_parameter(name), parameter, **near)


@pytest.mark.parametrize("backend", ["openvino", "onnxruntime"])
def test_tables_have_codes_beside_ranges_at_run_time(backend: str) -> None:
    model, ids = _lookup(), torch.arange(20).reshape(2, 10)
    q = _calibrated(model, ids, backend=backend, activations={"ranges": "dynamic"}, sites={"embedding": True})
    assert q.plan["words.forward.embedding_0"].quantized


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"formats": [{"weights": "int4"}]}, "embedding tables are quantized only to int8"),
        ({"weights": {"granularity": "per_tensor"}}, "embedding tables are quantized only to int8"),
        ({}, "its lookup renormalizes the embedding table in place (max_norm)"),
        ({"exclude": {"names": ["head"]}}, "its embedding table is also read in float (head.forward.linear_0)"),
        ({"sites": {"embedding": True}, "exclude": {"names": ["head"]}}, None),
    ],
    ids=["int4", "one scale", "max_norm", "tied", "tied and asked for"],
)
def test_large_tables_stay_float_where_codes_save_nothing(settings: dict[str, Any], reason: str | None) -> None:
    model = _lookup()
    model.words = nn.Embedding(2**13, 32, max_norm=None if settings else 1.0)
    if "exclude" in settings:
        model.head = nn.Linear(32, 2**13)
        model.head.weight = model.words.weight
    row = _calibrated(model, torch.arange(20).reshape(2, 10), backend="onnxruntime", **settings).plan[
        "words.forward.embedding_0"
    ]
    assert row.quantized == (reason is None)
    assert reason is None or row.reason.startswith(reason)


def test_a_frozen_lookup_that_limits_norms() -> None:
    model, ids = _lookup(), torch.arange(20).reshape(2, 10)
    model.words.max_norm = 1.0
    frozen = _calibrated(model, ids, sites={"embedding": True}).quantize(model)
    found = frozen.words(ids)
    assert_same(found, F.embedding(ids, frozen.words.weight + 0, max_norm=1.0))
    assert float(found.norm(dim=-1).max()) < 1.001


def test_the_weight_of_a_frozen_table_is_an_array_too() -> None:
    model, ids = _lookup(), torch.arange(20).reshape(2, 10)
    frozen = _calibrated(model, ids, sites={"embedding": True}).quantize(model)
    expected = (frozen.words.weight + 0).numpy()
    np.testing.assert_array_equal(frozen.words.weight.numpy(), expected)
    np.testing.assert_array_equal(np.asarray(frozen.words.weight), expected)
    np.testing.assert_array_equal(frozen.words.weight.detach().cpu().numpy(), expected)


def test_a_frozen_lookup_of_jagged_rows() -> None:
    model, ids = _lookup(), torch.arange(20).reshape(2, 10)
    frozen = _calibrated(model, ids, sites={"embedding": True}).quantize(model)
    jagged = torch.nested.nested_tensor([torch.arange(3), torch.arange(5)], layout=torch.jagged)
    for found, given in zip(frozen.words(jagged).unbind(), jagged.unbind(), strict=True):
        assert_same(found, frozen.words(given))


@pytest.mark.parametrize("other", ["max_norm", "fp8", "compiled"])
def test_other_frozen_lookups_have_the_whole_table(other: str) -> None:
    model, ids = _lookup(), torch.arange(20).reshape(2, 10)
    if other == "max_norm":
        model.words.max_norm = 100.0
    formats = [{"kinds": ["embedding"], "weights": "fp8"}] if other == "fp8" else []
    q = _calibrated(model, ids, backend="tensorrt", formats=formats, sites={"embedding": True})
    frozen = q.quantize(model)
    called = torch.compile(frozen.words, backend="eager") if other == "compiled" else frozen.words
    with torch.no_grad():
        assert_same(called(ids), frozen.words.weight[ids])


def test_a_table_that_a_linear_reads_too_stays() -> None:
    model = _lookup()
    model.head = nn.Linear(32, 20)
    model.head.weight = model.words.weight
    q = _calibrated(model, torch.arange(20).reshape(2, 10), sites={"embedding": True})
    assert {site.kind for site in q.plan.values() if site.quantized} == {"embedding", "linear"}
    assert "words.weight" in dict(q.quantize(model).named_parameters())


# -- attention -----------------------------------------------------------------------------------------------------

BOOLEAN = (_random(3, 1, 6, 9, seed=4) > 0).index_fill(2, torch.tensor([2]), False)
MASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "boolean": {"attn_mask": BOOLEAN},
    "boolean of keys": {"attn_mask": BOOLEAN[:, :, :1]},
    "float": {"attn_mask": _random(6, 9, seed=5)},
    "float with -inf": {"attn_mask": torch.zeros(3, 1, 6, 9).masked_fill(~BOOLEAN, float("-inf"))},
    "lowest": {"attn_mask": torch.zeros(3, 1, 6, 9).masked_fill(~BOOLEAN, torch.finfo(torch.float32).min)},
    "scale": {"scale": 0.3},
    "groups": {"enable_gqa": True},
    "causal groups": {"enable_gqa": True, "is_causal": True},
}
EXACT: dict[str, Callable[[Tensor], Tensor]] = dict.fromkeys(
    ("query", "key", "probabilities", "value"), lambda operand: operand
)


def _operands(options: dict[str, Any], lengths: tuple[int, int] = (6, 9)) -> tuple[Tensor, Tensor, Tensor]:
    heads = 2 if options.get("enable_gqa") else 4
    rows, columns = lengths
    return _random(3, 4, rows, 16), _random(3, heads, columns, 16, seed=1), _random(3, heads, columns, 8, seed=2)


def _resized(mask: Tensor, rows: int, columns: int) -> Tensor:
    """A mask of these lengths, repeated or cut; one row for all stays one."""
    spread = mask if mask.shape[-2] == 1 else torch.cat([mask, mask], -2)[..., :rows, :]
    return torch.cat([spread, spread], -1)[..., :columns]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("lengths", [(6, 9), (9, 6), (6, 6)], ids=str)
def test_taken_apart_attention_is_that_of_torch(name: str, lengths: tuple[int, int]) -> None:
    options = dict(MASKS[name])
    operands = _operands(options, lengths)
    if "attn_mask" in options:
        options["attn_mask"] = _resized(options["attn_mask"], *lengths)
    torch.testing.assert_close(attention(EXACT, *operands, **options), sdpa(*operands, **options), rtol=1e-5, atol=1e-6)


def test_dropout_of_attention_is_that_of_torch() -> None:
    operands = _operands({})
    results = []
    for function in (sdpa, lambda *args, **options: attention(EXACT, *args, **options)):
        torch.manual_seed(3)
        results.append(function(*operands, None, 0.5))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MASKS)
def test_attention_has_four_rounded_operands(name: str, tmp_path: Path) -> None:
    options = MASKS[name]
    batch = _operands(options)
    model = _attention(**options)
    q = _calibrated(model, *batch)
    site = _product(q)
    assert (site.operation, site.kind) == ("scaled_dot_product_attention", "matmul")
    assert site.multiply_adds == 3 * 4 * 6 * 9 * (16 + 8)
    assert [operand.name for operand in site.operands] == ["query", "key", "probabilities", "value"]
    assert len({operand.group for operand in site.operands}) == 1
    scales = {operand.name: operand.scale for operand in site.operands}
    frozen = q.quantize(model)
    with torch.no_grad():
        seen: dict[str, Tensor] = {}
        attention(_watching(seen), *batch, **options)
        for operand in site.operands:
            assert operand.maximum == float(seen[operand.name].max())
            assert operand.minimum == float(seen[operand.name].min())
        rounders = {key: _rounder(scale) for key, scale in scales.items()}
        torch.testing.assert_close(frozen(*batch), attention(rounders, *batch, **options), rtol=1e-4, atol=1e-2)
        assert not torch.equal(frozen(*batch), model(*batch))
    operators = _exported(q, frozen, tmp_path, *batch)
    chain = [name for name in operators if name in ("MatMul", "Softmax", "QuantizeLinear")]
    assert sorted(chain) == ["MatMul"] * 2 + ["QuantizeLinear"] * 4 + ["Softmax"]
    assert chain[-1] == "MatMul"


def _attention(**options: Any) -> nn.Module:
    return net("F.scaled_dot_product_attention(q, k, value=v, **self.options)", "q, k, v", options=options)


def _watching(seen: dict[str, Tensor]) -> dict[str, Callable[[Tensor], Tensor]]:
    def watch(name: str) -> Callable[[Tensor], Tensor]:
        # The operand is what it was, and is remembered.
        return lambda operand: seen.setdefault(name, operand)

    return {name: watch(name) for name in EXACT}


def _rounder(scale: Tensor | None) -> Callable[[Tensor], Tensor]:
    return lambda operand: _fake(operand, scale)


def test_attentions_of_one_function_are_one_group() -> None:
    first = "F.scaled_dot_product_attention(q, k, v, None, 0.0, True)"  # everything by position
    model = net(f"{first} + torch._C._nn.scaled_dot_product_attention(q, k, v)", "q, k, v")
    q = _calibrated(model, *_operands({}), sites={"residual_add": False})
    sites = [site for site in q.plan.values() if site.quantized]
    assert len(sites) == 2
    assert len({operand.group for site in sites for operand in site.operands}) == 1
    # They read one query, one key and one value.
    assert sites[1].operands[0].range_group == sites[0].operands[0].range_group


def test_attention_in_train_mode_drops_out_and_has_gradients() -> None:
    batch = [operand.requires_grad_() for operand in _operands({})]
    model = _attention(dropout_p=0.5)
    results = []
    for used in (model, Quantizer(preset="plain", backend="openvino").proxy(model)):
        torch.manual_seed(1)
        output = used(*batch)
        results.append([output, *torch.autograd.grad(output.sum(), batch)])
    assert_same(*results)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_attention_in_half_hides_what_the_mask_hides(dtype: torch.dtype) -> None:
    operands = [(operand * 30).to(dtype) for operand in _operands({})]
    result = attention(EXACT, *operands, attn_mask=BOOLEAN)
    assert torch.isfinite(result).all()
    torch.testing.assert_close(result, sdpa(*operands, attn_mask=BOOLEAN), rtol=0.05, atol=1.0)


class Heads(nn.Module):
    """Attention with grouped queries, a mask and a causal one, between two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 128)
        self.outer = nn.Linear(64, 64)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (-1, 16)).transpose(1, 2) for part in self._split(x))
        seen = F.scaled_dot_product_attention(query, key, value, mask[:, None, None].bool(), enable_gqa=True)
        seen = seen + F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.outer(seen.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.inner(x).split([64, 32, 32], -1)


@pytest.fixture(scope="module")
def heads() -> tuple[Quantizer, nn.Module]:
    model = Heads()
    q = _calibrated(model, *_padded(4, 24))
    assert sum(site.operation == "scaled_dot_product_attention" for site in q.plan.values() if site.quantized) == 2
    return q, q.quantize(model)


def _padded(rows: int, length: int) -> tuple[Tensor, Tensor]:
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, length - 3 :] = 0
    return _random(rows, length, 64), mask


def test_quantized_attention_is_traced_and_compiled(heads: tuple[Quantizer, nn.Module]) -> None:
    frozen, batch = heads[1], _padded(4, 24)
    with torch.no_grad():
        with pytest.warns(DeprecationWarning, match="torch.jit.trace"):
            traced = torch.jit.trace(frozen, batch)
        compiled = torch.compile(frozen, fullgraph=True, backend="eager")
        assert_same(compiled(*batch), frozen(*batch))
        for lengths in ((4, 24), (2, 18)):
            assert_same(traced(*_padded(*lengths)), frozen(*_padded(*lengths)))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.nightly)])
def test_quantized_attention_is_exported_with_dynamic_axes(
    heads: tuple[Quantizer, nn.Module], dtype: str, tmp_path: Path
) -> None:
    ort = pytest.importorskip("onnxruntime", reason="needs enginequant[onnxruntime]")
    pytest.importorskip("onnx", reason="needs enginequant[onnx]")
    axes = {name: {0: "batch", 1: "sequence"} for name in ("x", "mask")}
    example = dict(zip(("x", "mask"), _padded(4, 24), strict=True))
    q = Quantizer(heads[0].config, fallback_dtype=dtype)
    path = q.export(heads[1], tmp_path / "model.onnx", example, dynamic_axes=axes)
    settings = ort.SessionOptions()
    settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    x, mask = _padded(3, 17)
    (result,) = session.run(None, {"x": x.to(getattr(torch, dtype)).numpy(), "mask": mask.numpy()})
    with torch.no_grad():
        expected = heads[1](x, mask)
    gap = (torch.from_numpy(result).float() - expected).norm() / expected.norm()
    assert gap < (1e-5 if dtype == "float32" else 0.02)


@pytest.mark.parametrize("options", [{"sites": {"matmul": False}}, {"exclude": {"sites": ["forward.*"]}}], ids=str)
def test_attention_that_stays_float_computes_no_probabilities(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Tensor:
        raise AssertionError("nobody asked for them")

    monkeypatch.setattr("quantizer.proxy.site.observed_probabilities", fail)
    q = _calibrated(_attention(), *_operands({}), **options)
    (site,) = q.plan.values()
    assert (site.quantized, site.multiply_adds) == (False, 3 * 4 * 6 * 9 * (16 + 8))


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_attention_of_nested_tensors_stays_float() -> None:
    rows = "torch.nested.nested_tensor([x[:3], x], layout=torch.jagged).unflatten(-1, (2, 16)).transpose(1, 2)"
    text = f"rows = {rows}; return F.scaled_dot_product_attention(rows, rows, rows).transpose(1, 2).values()"
    q = _calibrated(net(text), _random(6, 32))
    assert [site.reason for site in q.plan.values()] == ["an operand is a nested tensor"]


def test_attention_measures_and_falls_back() -> None:
    model, batch = _attention(), _operands({})
    q = _calibrated(model, *batch)
    with torch.no_grad():
        amp = q.amp(model)
        assert_same(amp(*batch), model(*batch))
        (group,) = q.sensitivity.rows
        assert 0 < group.error < 0.01
        q.fallback(amp, num=1)
        assert_same(q.quantize(model)(*batch), model(*batch))


# -- what cannot be rounded ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelled",
    [
        *("a.add(b)", "torch.Tensor.add(a, b)"),
        # Those in place are seen through another name.
        *("a += b; return same", "a.add_(b); return same", "torch.Tensor.add_(a, b); return same"),
        "a.add_(b * 0.5, alpha=2); return same",
    ],
)
def test_residual_sums_are_alike_however_they_are_spelled(spelled: str) -> None:
    results, x = [], _random(8, 32)
    for text in ("a + b", spelled):
        torch.manual_seed(0)
        lines = f"a, b = self.first(x), self.second(x); same = a; {text if 'return' in text else f'return {text}'}"
        model = net(lines, first=linear(), second=linear())
        q = _calibrated(model, x, sites={"residual_add": True})
        frozen = q.quantize(model)
        with torch.no_grad():
            results.append(frozen(x))
            assert not torch.equal(results[-1], model(x))
        assert sum(site.quantized and site.kind == "residual_add" for site in q.plan.values()) == 1
    assert_same(results[0], results[1])


class Maths:
    """Has a method with the name of a product."""

    def mm(self, other: int) -> int:
        return other + 1


NO_FLOATS = "its operands are not floating-point tensors"
STAYS_FLOAT = {
    "mm of integers": ("torch.mm(x.long(), x.long())", NO_FLOATS),
    "einsum of integers": ("torch.einsum('ij,jk->ik', x.long(), x.long())", NO_FLOATS),
    "addmm of integers": ("torch.addmm(x.long(), x.long(), x.long())", NO_FLOATS),
    "no tensor": ("self.maths.mm(3)", NO_FLOATS),
    "embedding of integers": ("F.embedding(x.long(), x.long())", NO_FLOATS),
    "a table that is no parameter": (
        "F.embedding(x.long(), torch.ones(20, 4))",
        "the embedding table is not a parameter",
    ),
    "out": ("torch.mm(x, x, out=torch.empty_like(x))", ReasonCode.OUT_ARGUMENT.text()),
    "three operands": (
        "torch.einsum('ij,jk,kl->il', x, x, x)",
        "an einsum with 3 operands is not quantized",
    ),
    "an equation that is computed": ("torch.einsum(''.join('ij,jk->ik'), x, x)", ReasonCode.EINSUM_UNSPELLED.text()),
    "starred": ("torch.einsum(*('ij,jk->ik', x, x))", ReasonCode.EINSUM_STARRED.text()),
    "a parameter that attends": (
        "F.scaled_dot_product_attention(self.w[None], x[None], x[None])",
        "an operand of the attention is a parameter",
    ),
    "a weight in two ways": (
        "sum(x @ w for w in (self.w, self.w.t()))",
        "an operand is a parameter in some calls",
    ),
}


@pytest.mark.parametrize("name", STAYS_FLOAT)
def test_why_a_product_stays_float(name: str) -> None:
    text, reason = STAYS_FLOAT[name]
    model = net(text, w=nn.Parameter(_random(4, 4)), maths=Maths())
    q = _calibrated(model, torch.eye(4), sites={"residual_add": False, "embedding": True})
    assert any(row.reason.startswith(reason) for row in q.coverage)
    assert not q.coverage.quantized


def test_starred_operands_are_seen_when_they_arrive(tmp_path: Path) -> None:
    product = "torch.baddbmm(x[..., :1], *pair) + F.scaled_dot_product_attention(*(x, x), value=x)[..., :24]"
    model, batch = net(f"pair = (x, y); return {product}", "x, y"), (_random(3, 16, 32), _random(3, 32, 24, seed=3))
    q = _calibrated(model, *batch, sites={"residual_add": False})
    assert len([site for site in q.plan.values() if site.quantized]) == 2
    assert _exported(q, q.quantize(model), tmp_path, *batch).count("MatMul") == 3
