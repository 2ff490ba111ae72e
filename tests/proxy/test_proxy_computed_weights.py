"""Weights that a model computes from parameters and buffers at each call are weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import yaml
from calibrated import make_calibrated
from daily import some_daily
from helpers import Snapshot, assert_same
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from toy_nets import linear, net

from quantizer import Quantizer
from quantizer.engines import load_engine
from quantizer.errors import CalibrationError, ProxyError, QuantizerError
from quantizer.proxy.weight import Computation, Step, named_tensors

X = torch.randn(32, 32, generator=torch.Generator().manual_seed(3))
SOUND = torch.randn(8, 32, 20, generator=torch.Generator().manual_seed(4))
IMAGES = torch.randn(4, 32, 6, 6, generator=torch.Generator().manual_seed(5))


class Standardized(nn.Conv2d):
    """A convolution whose weight has mean 0 and variance 1 for each output channel, as BiT has it."""

    def made(self) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        return F.batch_norm(flat, None, None, training=True, momentum=0.0, eps=1e-6).reshape_as(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.made(), self.bias, self.stride, self.padding)


class Masked(nn.Linear):
    """A linear with a mask of its weight."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("mask", torch.rand(outputs, inputs) > 0.3)

    def made(self) -> Tensor:
        return self.weight * self.mask

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.made(), self.bias)


def symmetric() -> nn.Module:
    """A parametrization."""
    return net("w.triu() + w.triu(1).transpose(-1, -2)", "w")


def _materialized(layer: nn.Module) -> nn.Module:
    """A layer of torch with the weight that ``layer`` computes."""
    plain: Any = nn.Conv2d(32, 32, 3) if isinstance(layer, Standardized) else nn.Linear(32, 32)
    plain = nn.Conv1d(32, 32, 3) if isinstance(layer, nn.Conv1d) else plain
    with torch.no_grad():
        plain.weight.copy_(layer.made() if isinstance(layer, Standardized | Masked) else layer.weight)
        plain.bias.copy_(layer.bias)
    return plain


def _registered() -> nn.Module:
    linear = nn.Linear(32, 32)
    parametrize.register_parametrization(linear, "weight", symmetric())
    return linear


def _with_old_norm(layer: nn.Module) -> nn.Module:
    with pytest.warns(FutureWarning, match="is deprecated"):
        return nn.utils.weight_norm(layer)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Conv1d(32, 32, 3)), SOUND),
    "weight_norm of old": (lambda: _with_old_norm(nn.Linear(32, 32)), X),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(32, 32)), X),
    "spectral_norm of old": (lambda: nn.utils.spectral_norm(nn.Linear(32, 32)), X),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(32, 32)), X),
    "parametrize": (_registered, X),
    "prune": (lambda: prune.l1_unstructured(nn.Linear(32, 32), "weight", 0.3), X),
    "mask": (lambda: Masked(32, 32), X),
    "standardized": (lambda: Standardized(32, 32, 3), IMAGES),
}


def _net(name: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """A net with a computed weight, the same net with that weight as a parameter, and inputs."""
    torch.manual_seed(0)
    make, x = LAYERS[name]
    layer = make().eval()
    with torch.no_grad():
        layer(x)  # the old weight_norm computes the weight when it is called
    return nn.Sequential(nn.Tanh(), layer).eval(), nn.Sequential(nn.Tanh(), _materialized(layer)).eval(), x


def _weight(q: Quantizer) -> Any:
    return next(o for site in q.plan.values() if site.quantized for o in site.operands if o.role == "weight")


@pytest.mark.parametrize("name", LAYERS)
def test_it_is_quantized_as_if_it_were_a_parameter(name: str, tmp_path: Path) -> None:
    model, twin, x = _net(name)
    before = Snapshot.of(model)
    q, other = (make_calibrated(one, [x], backend="openvino") for one in (model, twin))
    weight, expected = _weight(q), _weight(other)
    assert weight.computation is not None
    assert torch.equal(weight.scale, expected.scale)
    assert (weight.axis, weight.minimum, weight.maximum) == (expected.axis, expected.minimum, expected.maximum)
    assert [row.reason for row in q.coverage if row.kind == "source"] == []
    with torch.no_grad():
        assert torch.equal(q.proxy(model)(x), model(x))
        frozen = q.quantize(model)
        assert torch.equal(frozen(x), other.quantize(twin)(x))
        assert torch.equal(q.qat(model).eval()(x), frozen(x))
        loaded = Quantizer.load(q.save(tmp_path / "saved"))
        assert torch.equal(loaded.quantize(model)(x), frozen(x))
    before.assert_unchanged(model)


@pytest.mark.usefixtures("exact_byte_products")
@pytest.mark.parametrize("name", some_daily(["weight_norm", "spectral_norm of old", "orthogonal", "standardized"], 2))
def test_the_file_holds_its_integers_alone(name: str, tmp_path: Path) -> None:
    model, twin, x = _net(name)
    graphs = []
    for place, one in enumerate((model, twin)):
        q = make_calibrated(one, [x], backend="onnxruntime")
        frozen = q.quantize(one)
        path = q.export(frozen, tmp_path / f"{place}.onnx", (x,))
        graph = onnx.load(path).graph
        kinds = sorted((tensor.data_type, tuple(tensor.dims)) for tensor in graph.initializer)
        graphs.append((sorted(node.op_type for node in graph.node), kinds))
        q.build(path, tmp_path / f"{place}.engine")
        with torch.no_grad():
            expected = frozen(x)
        for backend, file in (("onnxruntime", tmp_path / f"{place}.engine"), ("openvino", path)):
            (result,) = load_engine(backend, file)({graph.input[0].name: x.numpy()}).values()
            # An engine adds in another order, which flips a rounding now and then.
            assert float((torch.as_tensor(result) - expected).abs().max()) < 0.01 * float(expected.abs().max())
    assert graphs[0] == graphs[1]


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
def test_training_reaches_the_parameters_that_it_is_computed_from(name: str, tmp_path: Path) -> None:
    model, _, x = _net(name)
    q = make_calibrated(model, [x], backend="openvino")
    proxy = q.qat(model)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(parameters.values(), lr=1.0)
    before = {name: value.detach().clone() for name, value in parameters.items()}
    proxy(x).square().mean().backward()
    assert all(value.grad is not None and bool(value.grad.any()) for value in parameters.values())
    optimizer.step()
    assert not any(torch.equal(value, before[name]) for name, value in parameters.items())
    with torch.no_grad():
        # In train mode spectral normalization changes its buffers, too.
        proxy(x)
        expected = q.quantize(model)(x)
        assert torch.equal(expected, proxy.eval()(x))
        assert torch.equal(Quantizer.load(q.save(tmp_path / "saved")).quantize(model)(x), expected)


def test_scales_are_those_of_the_parameters_that_a_model_has_now(tmp_path: Path) -> None:
    model, _, x = _net("weight_norm")
    q = make_calibrated(model, [x], backend="openvino")
    loaded, scale = Quantizer.load(q.save(tmp_path / "saved")), _weight(q).scale
    with torch.no_grad():
        model[1].parametrizations.weight.original0.mul_(2)
    with pytest.warns(UserWarning, match=r"1 of 3 parameters changed.*original0"):
        frozen = loaded.quantize(model)
    site = next(m for m in frozen.modules() if getattr(m, "stored", None) is not None)
    assert torch.allclose(site.scale, 2 * scale)
    other = nn.Sequential(nn.Tanh(), nn.Conv1d(32, 32, 3)).eval()
    with pytest.warns(UserWarning, match="changed"), pytest.raises(ProxyError, match=r"belongs to another model"):
        Quantizer.load(tmp_path / "saved").quantize(other)


def test_a_mask_that_changed_is_told_and_ends_chosen_codes(tmp_path: Path) -> None:
    model, _, x = _net("mask")
    q = make_calibrated(model, [x], backend="openvino", weights={"rounding": "gptq"})
    loaded = Quantizer.load(q.save(tmp_path / "saved"))
    with torch.no_grad():
        model[1].mask.logical_not_()
        for one in (q, loaded):
            with (
                pytest.warns(UserWarning, match=r"^1 buffers that weights are computed from changed .* is 1\.mask"),
                pytest.warns(UserWarning, match="^1 weights changed since their integers were chosen"),
            ):
                error = one.quantize(model)(x) - model(x)
            assert float(error.square().mean()) < 1e-3 * float(model(x).square().mean())


def tables() -> nn.Module:
    """Looks up rows of a computed table, and blurs with a kernel that is a buffer."""
    return net(
        "F.conv1d(F.embedding(ids, F.normalize(self.table)).mT, self.blur, groups=32)",
        "ids",
        table=nn.Parameter(torch.randn(9, 32)),
        blur=torch.rand(32, 1, 3),
    )


def test_computed_tables_and_buffers_are_weights() -> None:
    torch.manual_seed(0)
    model, ids = tables().eval(), torch.randint(0, 9, (8, 16))
    q = make_calibrated(model, [ids], backend="onnxruntime", sites={"embedding": True})
    # A convolution has a site for its result beside it.
    products = [site for site in q.plan.values() if site.kind != "output"]
    weights = {site.kind: next(o for o in site.operands if o.role == "weight") for site in products}
    assert {kind: (weight.quantized, weight.parameters) for kind, weight in weights.items()} == {
        "embedding": (True, ("table",)),
        "conv": (True, ("blur",)),
    }
    with torch.no_grad():
        error = q.quantize(model)(ids) - model(ids)
        assert 0 < float(error.square().mean()) < 1e-3 * float(model(ids).square().mean())


def test_what_is_frozen_stays_so() -> None:
    model, _, x = _net("weight_norm")
    frozen = make_calibrated(model, [x], backend="openvino").quantize(model)
    with torch.no_grad():
        expected = frozen(x)
        model[1].parametrizations.weight.original1.mul_(1.5)
        assert torch.equal(frozen(x), expected)
        assert torch.equal(copy.deepcopy(frozen)(x), expected)


class Weighted(nn.Module):
    """Multiplies by what ``make`` gives for a weight and an input."""

    def __init__(self, make: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32))
        self.bank = nn.Parameter(torch.randn(2, 32, 32))
        self.register_buffer("gain", torch.ones(1))
        self.loose = [nn.Parameter(torch.randn(32, 32))]
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.make(self, x))


def _emptied(m: Any, x: Tensor) -> Tensor:
    made = m.weight * 2
    made[:, 0] = 0
    return made


def _filled(m: Any, x: Tensor) -> Tensor:
    made = m.weight.clone()
    made[:, 0] = x.mean()
    return made * 2


def _counted(m: Any, x: Tensor) -> Tensor:
    made = m.weight * m.gain
    m.gain.add_(1)
    return made


BAD: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "dropout": (lambda m, x: F.dropout(m.weight, 0.5, training=True), "with random numbers"),
    "noise": (lambda m, x: m.weight + torch.randn_like(m.weight), "with random numbers"),
    "random factor": (lambda m, x: m.weight * torch.rand(32, 32), "with random numbers"),
    "length": (lambda m, x: (m.weight * 2)[: len(x)], "but differently in different calls"),
    "picked": (lambda m, x: m.bank[len(x) % 2] * 2, "but differently in different calls"),
    "in place": (_emptied, "and is changed in place"),
    "data in place": (_filled, "and is changed in place"),
    "a buffer that changes": (_counted, "and gives other values when the computation is repeated"),
    "a number": (lambda m, x: m.weight / m.bank[0, 0, 0].item(), "and from numbers that Python code reads from"),
    "unregistered": (lambda m, x: m.loose[0] * 2, "from a tensor that no module of the model registers"),
    "long": (lambda m, x: sum([m.weight * 2] * 120, m.weight), "in more than 100 steps"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_one_weight_stays_float(name: str) -> None:
    make, why = BAD[name]
    torch.manual_seed(0)
    model = Weighted(make).eval()
    q = make_calibrated(model, [X, X[:31]], backend="openvino")
    (entry,) = q.plan.values()
    assert not entry.quantized
    assert entry.reason.startswith(f"an operand is computed from parameters at each call, {why}")


def test_what_depends_on_the_data_is_no_weight() -> None:
    torch.manual_seed(0)
    q = make_calibrated(Weighted(lambda m, x: m.weight * x.mean()).eval(), [X], backend="openvino")
    assert [o.role for o in q.plan["forward.linear_0"].operands] == ["activation", "activation"]


def test_a_choice_at_run_time_that_calibration_did_not_see_is_an_error() -> None:
    torch.manual_seed(0)
    model = Weighted(BAD["picked"][0]).eval()
    frozen = make_calibrated(model, [X], backend="openvino").quantize(model)
    with torch.no_grad():
        frozen(X)
        with pytest.raises(ProxyError, match=r"forward.linear_0.weight: .* the model selects it at run time"):
            frozen(X[:31])


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_trace_does_not_compare_weights() -> None:
    # torch warns of every number that a trace reads from a tensor.
    model, _, x = _net("mask")
    frozen = make_calibrated(model, [x], backend="openvino").quantize(model)
    with torch.no_grad():
        assert_same(torch.jit.trace(frozen, x)(x), frozen(x))


def test_a_computed_weight_of_zeros_is_the_frozen_one() -> None:
    torch.manual_seed(0)
    gated = net(
        "F.linear(x, self.weight * self.gate)",
        weight=nn.Parameter(torch.randn(32, 32)),
        gate=nn.Parameter(torch.zeros(1)),
    )
    model = nn.Sequential(nn.Linear(32, 32), gated).eval()
    frozen = make_calibrated(model, [X], backend="openvino").quantize(model)
    with torch.no_grad():
        assert torch.equal(frozen(X), torch.zeros(32, 32))


def test_a_computed_weight_with_nan_is_an_error() -> None:
    model = Weighted(lambda m, x: (m.weight * 0) / m.gain.sub(1)).eval()
    with pytest.raises(CalibrationError, match=r"computed from weight, gain, .* contains NaN"):
        make_calibrated(model, [X])


def positions_net() -> nn.Module:
    """Projects a table of its own and multiplies by it, as relative positions do."""
    return net(
        "x @ self.key(self.norm(self.table)[:40]).mT",
        table=nn.Parameter(torch.randn(64, 32)),
        norm=nn.LayerNorm(32),
        key=linear(),
    )


def test_the_input_of_a_layer_is_an_activation_even_if_it_is_a_parameter() -> None:
    torch.manual_seed(0)
    model = positions_net().eval()
    q = make_calibrated(model, [X], backend="openvino")
    assert [(site.kind, [o.role for o in site.operands]) for site in q.plan.values()] == [
        ("linear", ["activation", "weight"]),
        ("matmul", ["activation", "activation"]),
    ]
    assert q.coverage.share == 1.0
    with torch.no_grad():
        error = q.quantize(model)(X) - model(X)
        assert float(error.square().mean()) < 1e-3 * float(model(X).square().mean())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"operation": "aten.mul_.Tensor"}, "is not a function of tensors and numbers only"),
        ({"operation": "aten.from_file.default"}, "is not a function of tensors"),
        ({"operation": "os.system"}, "is not an operation of torch"),
        ({"arguments": "[1"}, r"computation.steps\[0\]"),
        ({"arguments": "[]"}, "expected a list and an object of keywords"),
    ],
)
def test_a_damaged_computation_is_told(change: dict[str, str], match: str, tmp_path: Path) -> None:
    model, _, x = _net("mask")
    folder = make_calibrated(model, [x], backend="openvino").save(tmp_path / "saved")
    document = yaml.safe_load((folder / "quantizer.yaml").read_text())
    operand = next(o for site in document["sites"] for o in site["operands"] if "computation" in o)
    operand["computation"]["steps"][0].update(change)
    (folder / "quantizer.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(QuantizerError, match=match):
        Quantizer.load(folder)


_SQUARE = Step("aten.mul.Tensor", '[[{"input": 0}, {"input": 0}], {}]')


@pytest.mark.parametrize(
    ("steps", "output", "match"),
    [
        ((_SQUARE,), 3, r"^output 3 of aten\.mul\.Tensor is not a tensor$"),
        ((_SQUARE,), -2, r"^output -2 of aten\.mul\.Tensor is not a tensor$"),
        ((_SQUARE, Step("aten.dim.default", '[[{"input": 0}], {}]')), 0, r"^output 0 of aten\.dim\.default is not"),
        (
            (_SQUARE, replace(_SQUARE, arguments='[[{"input": 7}], {}]')),
            0,
            r"^steps\[1\], aten\.mul\.Tensor: list index",
        ),
    ],
)
def test_a_computation_that_gives_no_weight_is_told(steps: tuple[Step, ...], output: int, match: str) -> None:
    assert_same(Computation(("w",), (_SQUARE,)).of([X]), X * X)
    with pytest.raises(ValueError, match=match):
        Computation(("w",), steps, output).of([X])


def test_a_buffer_that_two_modules_have_is_known_by_both_names() -> None:
    model = nn.Sequential(Masked(4, 4), Masked(4, 4))
    model[1].mask = model[0].mask
    assert {"0.mask", "1.mask"} <= set(named_tensors(model))


def test_a_computed_weight_is_called_after_its_largest_input() -> None:
    model, _, x = _net("weight_norm")
    weight = _weight(make_calibrated(model, [x], backend="openvino"))
    assert weight.parameter == "1.parametrizations.weight.original1"
    assert model.get_parameter(weight.parameter).dim() == 3
