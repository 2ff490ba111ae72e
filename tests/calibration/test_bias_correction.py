"""The mean error of each site's output, moved into its bias: the figures by hand, what has none, what carries it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from calibrated import make_calibrated
from helpers import Mlp, assert_same
from torch import Tensor, nn
from torch.nn import functional as F
from toy_nets import net

from quantizer import QATCalibrate, Quantizer
from quantizer.algorithms.replay import OutputError
from quantizer.algorithms.sensitivity import fingerprint
from quantizer.errors import QuantizerError, TrainingError
from quantizer.integrations.tripy import tripy_scales
from quantizer.observe.replay_batches import ReplayBatches
from quantizer.plan.site_plan import Plan
from quantizer.proxy.build import sites_of
from quantizer.proxy.site import OUTPUT
from quantizer.utils.fingerprint import Fingerprint

BATCHES = 2  # as many as are kept to be run again
COARSE = {"calibrator": "percentile", "percentile": 90.0}
"""Ranges that clip a tenth of the values, whose mean error is not small."""


def net_net() -> nn.Module:
    """Two layers of all positive inputs: [rows, 8] to [rows, 8]."""
    torch.manual_seed(0)
    return net("self.second(torch.relu(self.first(x)))", first=nn.Linear(8, 16), second=nn.Linear(16, 8))


def data(batches: int = BATCHES, seed: int = 0, shape: tuple[int, ...] = (24, 8)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).square() for _ in range(batches)]


def calibrated(model: nn.Module, batches: list[Any] | None = None, **options: Any) -> Quantizer:
    settings = {"backend": "onnxruntime", "activations": COARSE, "bias_correction": True, **options}
    return make_calibrated(model.eval(), data() if batches is None else batches, **settings)


def uncorrected(model: nn.Module, batches: list[Any] | None = None, **options: Any) -> Any:
    """The frozen proxy of the same ranges without shifts."""
    return calibrated(model, batches, bias_correction=False, **options).quantize(model)


def shift_of(q: Quantizer, site: str) -> Tensor:
    shift = q.plan[site].bias_shift
    assert shift is not None
    assert shift.dtype == torch.float32
    return shift


def sums(y: Tensor, z: Tensor) -> tuple[Tensor, float]:
    """The formula of ``bias_correction.py`` for rows [R, C]."""
    y, z = y.double(), z.double()
    power = [float(row @ row) for row in y]
    middle = sorted(power)[(len(power) - 1) // 2]
    weights = [middle / (value + middle) for value in power]
    error = sum((w * (a - b) for w, a, b in zip(weights, y, z, strict=True)), torch.zeros(y.shape[1]).double())
    return error, sum(weights)


def sqnr_db(found: Tensor, expected: Tensor) -> float:
    return 10 * math.log10(float(expected.square().sum() / (found - expected).square().sum()))


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected.float(), rtol=1e-4, atol=1e-6)


# -- the figures -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_two_layers_by_hand() -> None:
    model = net_net().eval()
    (x,) = data(1)
    q = calibrated(model, [x])
    rounded = uncorrected(model, [x])
    y = model.first(x)
    z = rounded.first(x)
    error, weight = sums(y, z)
    first = error / weight
    # The second layer is compared with what it reads once the first is corrected.
    error, weight = sums(model.second(torch.relu(y)), rounded.second(torch.relu(z + first.float())))
    assert close(shift_of(q, "first.forward.linear_0"), first)
    assert close(shift_of(q, "second.forward.linear_0"), error / weight)
    expected = rounded.second(torch.relu(z + first.float())) + (error / weight).float()
    assert torch.allclose(q.quantize(model)(x), expected, atol=1e-5)


@torch.no_grad()
def test_several_batches_add_up() -> None:
    model = net_net().eval()
    q, rounded = calibrated(model), uncorrected(model)
    found = [sums(model.first(x), rounded.first(x)) for x in data()]
    expected = sum(error for error, _ in found) / sum(weight for _, weight in found)
    assert close(shift_of(q, "first.forward.linear_0"), torch.as_tensor(expected))


@torch.no_grad()
def test_the_output_is_better_on_other_data() -> None:
    model = net_net().eval()
    corrected, rounded = calibrated(model).quantize(model), uncorrected(model)
    for x in data(4, seed=5):
        # Measured: 0.3 to 0.5.
        assert sqnr_db(corrected(x), model(x)) - sqnr_db(rounded(x), model(x)) > 0.2


@torch.no_grad()
def test_rows_with_huge_values_do_not_decide() -> None:
    model = nn.Sequential(nn.Linear(8, 16)).eval()
    x = data(1, shape=(400, 8))[0]
    x[0] = 1000.0
    activations = {"calibrator": "percentile", "percentile": 99.0}
    shift = shift_of(calibrated(model, [x], activations=activations), "0.forward.linear_0")
    rounded = uncorrected(model, [x], activations=activations)
    error = model(x) - rounded(x)
    usual = error[1:].mean(0)
    assert float((error.mean(0) - usual).norm()) > 20 * float((shift - usual).norm())


@torch.no_grad()
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(8, 12, 3, groups=4), (4, 8, 6, 6)),
        (nn.Conv2d(8, 8, 3, groups=8), (4, 8, 6, 6)),
        (nn.Conv1d(8, 12, 3), (4, 8, 9)),
        (nn.ConvTranspose2d(64, 96, 3, groups=2), (4, 64, 6, 6)),
        (nn.Conv2d(8, 12, 3), (8, 6, 6)),
    ],
    ids=["groups", "depthwise", "one axis", "transposed", "no batch axis"],
)
def test_convolutions(layer: nn.Module, shape: tuple[int, ...]) -> None:
    model = nn.Sequential(layer).eval()
    (x,) = data(1, shape=shape)
    # ONNX Runtime and OpenVINO have no integer kernel for transposed ones.
    backend = "tensorrt" if isinstance(layer, nn.ConvTranspose2d) else "onnxruntime"
    q, rounded = calibrated(model, [x], backend=backend), uncorrected(model, [x], backend=backend)
    (site,) = [path for path, entry in q.plan.items() if entry.quantized and entry.kind != "output"]
    assert sqnr_db(q.quantize(model)(x), model(x)) > sqnr_db(rounded(x), model(x))
    # The shift is that of the product itself: on its way to its result's quantizer, which clips it.
    for result in sites_of(rounded):
        if result.source.operation == OUTPUT and result.path in q.plan:
            assert q.plan[result.path].bias_note is None
            result.reset()
    channels = -len(layer.kernel_size) - 1  # type: ignore[arg-type]
    rows = [value.movedim(channels, -1).flatten(0, -2) for value in (model(x), rounded(x))]
    error, weight = sums(*rows)
    # TensorRT's biases are half floats.
    tolerance = 2**-11 if backend == "tensorrt" else 1e-4
    assert torch.allclose(shift_of(q, site), (error / weight).float(), rtol=tolerance, atol=1e-6)


@torch.no_grad()
def test_a_layer_that_is_called_twice_has_one_shift() -> None:
    def twice() -> nn.Module:
        torch.manual_seed(0)
        return net("self.layer(2 * torch.relu(self.layer(x)))", layer=nn.Linear(8, 8))

    model = twice().eval()
    (x,) = data(1)
    q, rounded = calibrated(model, [x]), uncorrected(model, [x])
    y, z = model.layer(x), rounded.layer(x)
    error, weight = sums(y, z)
    other, more = sums(model.layer(2 * torch.relu(y)), rounded.layer(2 * torch.relu(z + (error / weight).float())))
    assert close(shift_of(q, "layer.forward.linear_0"), (error + other) / (weight + more))


@torch.no_grad()
def test_layers_of_one_weight_have_their_own_shifts() -> None:
    model = net_net().eval()
    model.first = nn.Linear(8, 8)
    model.second = nn.Linear(8, 8)
    model.second.weight = model.first.weight
    model.eval()
    q = calibrated(model)
    assert not torch.equal(shift_of(q, "first.forward.linear_0"), shift_of(q, "second.forward.linear_0"))


def tokens() -> nn.Module:
    """Token ids [B, S] to [B, S, 8]; the mask is not read."""
    torch.manual_seed(0)
    return net(
        "self.layer(self.table(input_ids))",
        "input_ids, attention_mask",
        table=nn.Embedding(50, 8),
        layer=nn.Linear(8, 8),
    )


def test_padding_is_left_out() -> None:
    ids, mask = torch.arange(2, 26).reshape(4, 6), torch.ones(4, 6, dtype=torch.long)
    mask[1:, 4:] = 0
    found = []
    for fill in (0, 49):
        batch = {"input_ids": torch.where(mask.bool(), ids, fill), "attention_mask": mask}
        found.append(shift_of(calibrated(tokens(), [batch]), "layer.forward.linear_0"))
    assert torch.equal(*found)


class Normalized(nn.Module):
    """Convolutions without a bias before a batch normalization, one of them called by keywords."""

    def __init__(self, zeros: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.second = nn.Parameter(torch.randn(4, 8, 3, 3) / 8)
        self.norm.running_mean.copy_(torch.randn(8))
        self.keywords = {}
        if zeros:
            self.first.bias = nn.Parameter(torch.zeros(8))
            self.bias = nn.Parameter(torch.zeros(4))
            self.keywords = {"bias": self.bias}

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.first(x)))
        return F.conv2d(y, weight=self.second, stride=2, **self.keywords)


def test_a_convolution_without_a_bias_is_given_one(tmp_path: Path) -> None:
    model, shape = Normalized().eval(), (4, 3, 12, 12)
    q = calibrated(model, data(shape=shape))
    notes = [(entry.kind, entry.bias_note) for entry in q.plan.values() if entry.quantized]
    assert set(notes) == {("conv", "bias corrected"), ("output", None)}
    (x,) = data(1, seed=3, shape=shape)
    frozen, zeros = q.quantize(model), Normalized(zeros=True).eval()
    with torch.no_grad():
        assert_same(q.calib(model)(x), model(x))
        found = frozen(x)
        # The same as where a bias of zeros holds the shift.
        assert torch.allclose(found, calibrated(zeros, data(shape=shape)).quantize(zeros)(x), atol=1e-6)
        assert not torch.allclose(found, uncorrected(model, data(shape=shape))(x), atol=1e-2)
    path = q.export(frozen, tmp_path / "model.onnx", x)
    nodes = [node.op_type for node in onnx.load(path).graph.node]
    assert not {"BatchNormalization", "Add"} & set(nodes)
    session = onnxruntime.InferenceSession(path)
    (given,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert torch.allclose(torch.from_numpy(given), found, atol=1e-4)


# -- where there is none -----------------------------------------------------------------------------------------------


class Kinds(nn.Module):
    """Products with a bias, without one, with a bias along another axis, and of two activations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bare = nn.Linear(8, 8, bias=False)
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, self.bare(x), self.weight)
        z = torch.addmm(self.bias, y, self.weight, beta=2)
        return torch.addmm(z, self.weight, z.T @ z)


def test_the_reason_is_said() -> None:
    q = calibrated(Kinds(), data(shape=(8, 8)), sites={"residual_add": False}, backend="openvino")
    notes = {path: entry.bias_note for path, entry in q.plan.items() if entry.quantized}
    assert notes.pop("forward.addmm_0") == "bias corrected"
    # A product of two activations has no bias: nothing is noted.
    assert notes.pop("forward.matmul_0") is None
    assert set(notes) == {"bare.forward.linear_0", "forward.addmm_1", "forward.addmm_2"}
    assert set(notes.values()) == {"bias not corrected: this call has no bias that can be changed"}
    reasons = {row.name: row.reason for row in q.coverage.quantized}
    note = "bias not corrected: this call has no bias that can be changed"
    assert reasons["bare.forward.linear_0"] == f"int8: input, weight; {note}"
    assert reasons["forward.addmm_0"] == "int8: lhs, rhs; bias corrected"


def test_it_is_left_out_where_the_output_is_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(self: OutputError, plan: Plan, kept: ReplayBatches, limit: float = math.inf) -> float:
        return float(any(entry.bias_shift is not None for entry in plan.values()))

    monkeypatch.setattr(OutputError, "of_all_ranks", of)
    q = calibrated(net_net())
    said = {entry.bias_note for entry in q.plan.values()}
    assert said == {"bias not corrected: the error of the model's output is smaller without"}
    assert all(entry.bias_shift is None for entry in q.plan.values())


def test_a_branch_that_no_kept_batch_takes_has_none() -> None:
    model, notes = (
        net("self.always(x) + (self.rarely(x) if len(x) == 7 else 0)", always=nn.Linear(8, 8), rarely=nn.Linear(8, 8)),
        {},
    )
    for seed in range(20):
        q = calibrated(model, [*data(6, seed), *data(1, seed, shape=(7, 8))])
        notes = {path: entry.bias_note for path, entry in q.plan.items() if "linear" in path}
        if notes["rarely.forward.linear_0"] != "bias corrected":
            break
    assert notes == {
        "always.forward.linear_0": "bias corrected",
        "rarely.forward.linear_0": "bias not corrected: no stored batch reaches it",
    }


def test_a_folder_keeps_no_batches(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = net_net()
    loaded = Quantizer.load(calibrated(model).save(tmp_path / "saved"))
    other = loaded.for_backend("openvino")
    other.quantize(model)
    assert {entry.bias_note for entry in other.plan.values()} == {
        "bias not corrected: no calibration batch is stored, as in a saved folder"
    }
    assert "biases are not corrected, because a saved folder has no batches to measure errors on" in caplog.text


def test_off_nothing_is_said() -> None:
    q = calibrated(net_net(), bias_correction=False)
    assert all(entry.bias_shift is None and entry.bias_note is None for entry in q.plan.values())
    assert "bias" not in q.coverage.text()


# -- what carries it ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_fallback_takes_it_away() -> None:
    model, x = net_net().eval(), data(1)[0]
    q = calibrated(model)
    amp = q.amp(model)
    amp(x)
    q.fallback(amp, num=1)
    back = {path: entry for path, entry in q.plan.items() if not entry.quantized}
    assert len(back) == 1
    assert all(entry.bias_shift is None and entry.bias_note is None for entry in back.values())
    q.fallback(amp, ratio=1.0)
    assert_same(q.quantize(model)(x), model(x))
    q.clear_fallback()
    assert all(entry.bias_shift is not None for entry in q.plan.values())


def three_linears() -> nn.Sequential:
    """A net of some channels with large weights, which are smoothed: [rows, 16] to [rows, 16]."""
    torch.manual_seed(9)
    layers = [nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16)]
    with torch.no_grad():
        for layer in layers[::2]:
            assert isinstance(layer, nn.Linear)
            layer.weight[:2] *= 10
    return nn.Sequential(*layers).eval()


@torch.no_grad()
def test_a_fallback_makes_the_output_better_as_the_rest_is_corrected_again() -> None:
    model, generator = three_linears(), torch.Generator().manual_seed(109)
    given = [torch.randn(8, 16, generator=generator) for _ in range(4)]
    q = Quantizer()
    q.calibrate(model, given, progress=False)
    amp = q.amp(model)
    for x in given:
        amp(x)
    whole = torch.cat(given)
    expected = model(whole)
    before = sqnr_db(q.quantize(model)(whole), expected)
    q.fallback(amp, num=1)
    # With the shifts that were measured with all groups quantized it came out 0.7 dB worse.
    assert sqnr_db(q.quantize(model)(whole), expected) > before + 3


@torch.no_grad()
def test_a_fallback_has_the_shifts_of_a_model_with_these_sites_in_float(tmp_path: Path) -> None:
    model, x = Mlp(8).eval(), data(1)[0]
    q = calibrated(model)
    first, *others = [path for path, entry in q.plan.items() if entry.bias_shift is not None]
    other = calibrated(model, exclude={"sites": [first]})
    amp = q.amp(model)
    amp(x)
    former = {path: shift_of(q, path) for path in others}
    q.fallback(amp, names=[first])
    assert others
    assert all(torch.equal(shift_of(q, path), shift_of(other, path)) for path in others)
    assert not all(torch.equal(shift_of(q, path), former[path]) for path in others)
    assert_same(q.quantize(model)(x), other.quantize(model)(x))
    assert_same(Quantizer.load(q.save(tmp_path / "saved")).quantize(model)(x), q.quantize(model)(x))
    assert str(Quantizer.load(tmp_path / "saved").coverage) == str(q.coverage)


@torch.no_grad()
def test_a_group_is_measured_as_it_is_frozen_with_all_others_in_float() -> None:
    model, x = Mlp(8).eval(), data(1)[0]
    q = calibrated(model)
    amp = q.amp(model, measure="output")
    amp(x)
    expected = model(x)
    groups = {entry.group: entry.error for entry in q.sensitivity}
    assert len(groups) > 1
    for group, error in groups.items():
        q.fallback(amp, names=[other for other in groups if other != group])
        difference = q.quantize(model)(x) - expected
        assert error == pytest.approx(float(difference.square().sum() / expected.square().sum()), rel=1e-4)


@torch.no_grad()
def test_a_search_scores_what_is_frozen() -> None:
    model, x = Mlp(8).eval(), data(1)[0]
    q = calibrated(model)
    amp = q.amp(model)
    amp(x)
    expected = model(x)

    def metric(tried: nn.Module) -> float:
        return -float((tried(x) - expected).square().sum())

    found = q.fallback(amp, max_drop=-metric(q.quantize(model)) * 0.9, metric=metric)
    assert len(found.groups) == 1
    score = metric(q.quantize(model))
    assert score in [entry.score for entry in found.evaluations if entry.groups == found.groups]


def test_what_cannot_hold_it_says_so() -> None:
    q = calibrated(net_net(), activations=COARSE)
    assert set(tripy_scales(q.plan).left.values()) == {"its bias is corrected, which tripy scales cannot represent"}


def test_scores_of_other_shifts_are_others() -> None:
    weights = Fingerprint.of(net_net())
    plans = [calibrated(net_net(), bias_correction=on).plan for on in (True, False)]
    assert len({fingerprint(plan, sqnr_db, weights) for plan in plans}) == 2


def test_training_keeps_it() -> None:
    model, x = net_net().eval(), data(1)[0]
    q = calibrated(model)
    proxy: Any = q.qat(model)
    with torch.no_grad():
        assert_same(proxy.eval()(x), q.quantize(model)(x))
    before = model.first.bias.detach().clone()
    optimizer = torch.optim.SGD(proxy.parameters(), lr=0.1)
    proxy.train()(x).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model.first.bias, before)
    with torch.no_grad():
        assert_same(proxy.eval()(x), q.quantize(model)(x))
    assert any(name.endswith("bias_shift") for name in proxy.state_dict())
    proxy.load_state_dict(proxy.state_dict())
    other: Any = calibrated(net_net(), data(seed=1)).qat(net_net(), copy=True)
    with pytest.raises(TrainingError, match=r"forward\.linear_0\.bias: shifted by"):
        other.load_state_dict(proxy.state_dict())


def test_in_place() -> None:
    with QATCalibrate(method="histogram", percentile=90.0, backend="onnxruntime", bias_correction=True) as qat:
        torch.manual_seed(0)
        model = Mlp(8).eval()
        qat.setup_model_qat(model)
        with torch.no_grad():
            for x in data():
                model(x)
    assert all("bias corrected" in row.reason for row in qat.coverage(model).quantized)
    with torch.no_grad():
        torch.manual_seed(0)
        same = Mlp(8).eval()
        expected = calibrated(same).quantize(same)(data(1)[0])
        assert torch.allclose(model(data(1)[0]), expected, atol=1e-5)


# -- files -------------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """More channels than torch folds by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.conv = nn.Linear(8, 8200), nn.Conv1d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(x).mean(-1, keepdim=True) + self.conv(x[..., None])[..., 0]


@pytest.mark.parametrize("model", [net_net(), Mlp(), Wide()], ids=["linears", "residual", "wide"])
def test_the_file_computes_the_same_with_one_constant(model: nn.Module, tmp_path: Path) -> None:
    shape = (24, 32) if isinstance(model, Mlp) else (24, 8)
    q = calibrated(model, data(shape=shape))
    (x,) = data(1, seed=3, shape=shape)
    frozen = q.quantize(model)
    path = q.export(frozen, tmp_path / "model.onnx", x)
    graph = onnx.load(path).graph
    held = {tensor.name for tensor in graph.initializer}
    assert not [node for node in graph.node if node.op_type == "Add" and set(node.input) <= held]
    with torch.no_grad():
        expected = frozen(x)
        assert not torch.allclose(expected, uncorrected(model, data(shape=shape))(x), atol=1e-3)
    literal = onnxruntime.SessionOptions()
    literal.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    for options in (literal, onnxruntime.SessionOptions()):
        session = onnxruntime.InferenceSession(path, options)
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        apart = (torch.from_numpy(found) - expected).abs()
        # An integer kernel rounds the bias, so that a result between two codes may get the other one.
        results = [operand for entry in q.plan.values() if entry.kind == "output" for operand in entry.operands]
        steps = [] if options is literal else [float(operand.scale) for operand in results if operand.quantized]
        assert float(apart.max()) < max(steps, default=0) + 1e-4
        assert int((apart > 1e-4).sum()) <= len(steps)


def test_a_half_target_holds_the_shift(tmp_path: Path) -> None:
    model, x = net_net().eval(), data(1)[0]
    q = calibrated(model, backend="openvino", fallback_dtype="float16")
    for path in q.plan:
        shift = shift_of(q, path)
        assert torch.equal(shift, shift.half().float())
    with torch.no_grad():
        assert torch.allclose(q.simulate(model)(x), q.quantize(model)(x), atol=0.02)
    graph = onnx.load(q.export(q.quantize(model), tmp_path / "model.onnx", x)).graph
    added = [node for node in graph.node if node.op_type in ("Add", "Gemm")]
    halves = {tensor.name for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT16}
    assert len(added) == 2
    assert all(set(node.input) & halves for node in added)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("first.forward.linear_0", torch.full((16,), math.nan), "bias_shift: expected finite numbers"),
        ("first.forward.linear_0", torch.zeros(4, 4), r"bias_shift: expected a tensor of float32 \[C\]"),
        ("first.forward.linear_0", torch.zeros(16).half(), r"bias_shift: expected a tensor of float32 \[C\]"),
        ("other", torch.zeros(16), "belongs to no site or operand"),
    ],
)
def test_a_damaged_folder_is_refused(name: str, value: Tensor, said: str, tmp_path: Path) -> None:
    from helpers import forget_checksums
    from safetensors.torch import load_file, save_file

    folder = calibrated(net_net()).save(tmp_path / "saved")
    forget_checksums(folder)
    tensors = {**load_file(folder / "ranges.safetensors"), f"{name}/bias_shift": value}
    save_file(tensors, folder / "ranges.safetensors")
    with pytest.raises(QuantizerError, match=said):
        Quantizer.load(folder)


def test_functional_calls_without_a_bias_have_none() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            for bias in (self.bias, None):
                x = F.linear(torch.relu(x), self.weight, bias)
            return x

    q = calibrated(Sometimes())
    assert [entry.bias_note for entry in q.plan.values()] == [
        "bias not corrected: this call has no bias that can be changed"
    ]
