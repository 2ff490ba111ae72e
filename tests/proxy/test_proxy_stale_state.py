"""Nothing is kept past the change of what it describes, and what fails half-way leaves what was there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ConvNet, Mlp
from torch import Tensor, nn
from toy_nets import linear, net

from quantizer import Quantizer
from quantizer.errors import ConfigError, ProxyError
from quantizer.plan.apply import is_frozen_by

X = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))


def _sqnr(output: Tensor, expected: Tensor) -> float:
    output, expected = output.detach().double(), expected.detach().double()
    return float(10 * torch.log10(expected.square().sum() / (output - expected).square().sum()))


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)).eval()


# -- weights that are picked at run time ---------------------------------------------------------------------------


def test_a_weight_that_is_repeated_over_a_batch_is_the_frozen_one() -> None:
    torch.manual_seed(0)
    weights = nn.Parameter(torch.randn(3, 32, 32) / 6)
    model = net("torch.bmm(x, self.weights[1].expand(len(x), 32, 32))", weights=weights).eval()
    q = Quantizer(preset="plain", backend="openvino", activations={"calibrator": "max"})
    q.calibrate(model, [torch.randn(4, 8, 32)])
    frozen, x = q.quantize(model), torch.randn(2, 8, 32)
    assert _sqnr(frozen(x), model(x)) > 30


@pytest.mark.parametrize("picked", [{"which": 2}, {"rows": 20}, {"other": 1}], ids=str)
def test_a_weight_that_was_not_frozen_is_not_computed_with(picked: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = net(
        "F.linear(F.linear(x, self.stacked[which][:rows]), self.listed[other][:, :rows])",
        "x, which=0, rows=32, other=0",
        stacked=nn.Parameter(torch.randn(4, 32, 32) / 6),
        listed=nn.ParameterList([torch.randn(32, 32) / 6 for _ in range(3)]),
    ).eval()
    q = Quantizer(preset="plain", backend="openvino", activations={"calibrator": "max"})
    q.calibrate(model, [X])
    frozen = q.quantize(model)
    assert _sqnr(frozen(X), model(X)) > 30
    with pytest.raises(ProxyError, match=r"is not the frozen one, .*: the model selects it at run time"):
        frozen(X, **picked)
    # Whoever casts or traces it computes with what was frozen, as ever.
    assert _sqnr(frozen.double()(X.double()), model(X)) > 30


def test_another_parameter_in_the_same_memory_is_not_the_frozen_one() -> None:
    torch.manual_seed(0)
    memory = torch.randn(2, 32, 32) / 6
    model = net(
        "F.linear(x, self.second if second else self.first) + self.first.sum() + self.second.sum()",
        "x, second=True",
        first=nn.Parameter(memory[0]),
        second=nn.Parameter(memory[1]),
    ).eval()
    q = Quantizer(preset="plain", backend="openvino", activations={"calibrator": "max"})
    q.calibrate(model, [X])
    frozen = q.quantize(model)
    assert _sqnr(frozen(X), model(X)) > 30
    with pytest.raises(ProxyError, match=r"is not the frozen one, .*: the model selects it at run time"):
        frozen(X, second=False)


def test_a_cast_that_fails_leaves_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _net()
    q = Quantizer(preset="plain", backend="openvino", formats=[{"activations": "float", "weights": "int8"}])
    q.calibrate(model, [X])
    frozen = q.quantize(model)
    expected = frozen(X)

    def refuse(value: Tensor) -> Tensor:
        raise RuntimeError("no such device")

    with pytest.raises(RuntimeError, match="no such device"):
        frozen._apply(refuse)
    assert torch.equal(frozen(X), expected)
    assert {t.dtype for name, t in frozen.state_dict().items() if name.endswith(".stored")} == {torch.int8}


# -- searches ------------------------------------------------------------------------------------------------------


def test_scores_of_a_search_belong_to_the_weights(tmp_path: Path) -> None:
    model = _net()
    calls = 0

    def metric(candidate: nn.Module) -> float:
        nonlocal calls
        calls += 1
        return -float((candidate(X) - 1).square().mean().detach())

    def search() -> None:
        q = Quantizer(preset="plain", backend="openvino")
        q.calibrate(model, [X])
        measuring = q.amp(model)
        measuring(X)
        q.fallback(measuring, max_drop=1e-6, metric=metric, cache=tmp_path / "scores")

    search()
    before = calls
    search()
    assert calls == before
    with torch.no_grad():
        # No scale of a weight changes with its sign.
        model[2].weight.neg_()
        model[2].bias.add_(1)
    search()
    assert calls > before


def test_a_search_scores_the_float_model_in_eval_mode_and_leaves_its_statistics() -> None:
    model = ConvNet().train()
    x = torch.randn(4, 3, 16, 16)
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [x])
    measuring = q.amp(model)
    measuring(x)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scores = []

    def metric(candidate: nn.Module) -> float:
        with torch.no_grad():
            scores.append(float(candidate(x).sum()))
        return -abs(scores[-1])

    q.fallback(measuring, max_drop=0.5, metric=metric)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    with torch.no_grad():
        assert scores[0] == float(q.proxy(model).eval()(x).sum())


def _joins() -> nn.Module:
    """Reads one tensor by two linears where ``both``, and by one otherwise."""
    return net("self.first(x) + self.second(x if both else x * 2)", "x, both=True", first=linear(), second=linear())


def test_what_fell_back_stays_float_when_groups_join() -> None:
    torch.manual_seed(0)
    model = _joins().eval()
    q = Quantizer(preset="plain", backend="openvino", activations={"calibrator": "max"})
    q.calibrate(model, [{"x": X, "both": False}])
    measuring = q.amp(model)
    measuring(X, both=False)
    (group,) = [
        operand.group
        for operand in q.plan["first.forward.linear_0"].operands
        if operand.name == "input" and operand.group is not None
    ]
    q.fallback(measuring, names=[group])
    assert not q.plan["first.forward.linear_0"].quantized
    q.calibrate(model, [{"x": X}], resume=True)
    assert not q.plan["first.forward.linear_0"].quantized
    assert q.chosen_fallback is not None
    assert set(q.chosen_fallback.groups) <= {o.group for entry in q.plan.values() for o in entry.operands}
    # What was measured before names groups of before, which are found again.
    q.clear_fallback()
    assert q.plan["first.forward.linear_0"].quantized
    q.fallback(measuring, names=[group])
    assert not q.plan["first.forward.linear_0"].quantized


@pytest.mark.parametrize("changed", ["lhs", "rhs", "scale", "nothing"])
def test_a_frozen_model_is_told_from_one_of_another_plan(changed: str) -> None:
    model = Mlp().eval()
    q = Quantizer(preset="plain", backend="openvino", sites={"residual_add": True})
    q.calibrate(model, [X])
    frozen, plan = q.quantize(model), dict(q.plan)
    entry = plan["forward.add_0"]
    assert entry.quantized
    operands = [
        replace(operand, quantized=False)
        if operand.name == changed
        else replace(operand, scale=operand.scale * 2)
        if changed == "scale" and operand.scale is not None
        else operand
        for operand in entry.operands
    ]
    plan["forward.add_0"] = replace(entry, operands=tuple(operands))
    assert is_frozen_by(frozen, plan) == (changed == "nothing")


# -- trainings -----------------------------------------------------------------------------------------------------


def _train(proxy: nn.Module) -> None:
    optimizer = torch.optim.SGD(proxy.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        (proxy(X) - 1).square().mean().backward()
        optimizer.step()


def test_scales_from_elsewhere_leave_the_copy_that_was_trained() -> None:
    model = _net()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [X])
    proxy = q.qat(model, copy=True)
    _train(proxy)
    with torch.no_grad():
        expected = proxy.eval()(X)
        q.load_scales({})
        assert torch.equal(q.quantize(model)(X), expected)
        scales = q.scales()
        q.load_scales({"0.forward.linear_0.input": scales["0.forward.linear_0.input"] * 2})
        assert _sqnr(q.quantize(model)(X), expected) > 25


def test_a_folder_knows_that_its_scales_are_of_a_trained_copy(tmp_path: Path) -> None:
    model = _net()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [X])
    _train(q.qat(model, copy=True))
    trained: Any = q._session.trained(model)
    expected = q.quantize(model)(X)
    q.save(tmp_path / "q")
    assert torch.equal(Quantizer.load(tmp_path / "q").quantize(trained)(X), expected)
    with pytest.warns(UserWarning, match="4 of 4 parameters changed since the calibration"):
        Quantizer.load(tmp_path / "q").quantize(model)


class _Averages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 16)
        self.register_buffer("mean", torch.zeros(32))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return self.linear(x - self.mean)


@pytest.mark.parametrize("own", [False, True])
def test_a_buffer_that_training_replaces_is_the_models_too(own: bool) -> None:
    torch.manual_seed(0)
    model = _Averages().eval()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [X + 3])
    proxy = q.qat(model, copy=own)
    proxy.train()
    for _ in range(5):
        proxy(X + 3).square().mean().backward()
    trained: Any = q._session.trained(model)
    assert torch.equal(trained.mean, proxy.mean)  # type: ignore[arg-type]
    assert float(trained.mean.mean()) > 2
    with torch.no_grad():
        assert torch.equal(q.quantize(model)(X + 3), proxy.eval()(X + 3))


def test_a_training_that_cannot_begin_leaves_the_former_one() -> None:
    model = _net()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [X])
    proxy = q.qat(model, scales="learned")
    with pytest.raises(ConfigError, match="matches no quantized site"):
        q.qat(model, scales={"nowhere.**": "learned"})
    assert q._session.trainable is not None
    assert q._session.trainable.proxy is proxy


def test_a_calibration_that_cannot_begin_leaves_what_fell_back() -> None:
    model = _net()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [X])
    measuring = q.amp(model)
    measuring(X)
    q.fallback(measuring, num=1)
    model.register_module("site_forward_linear_0", nn.Identity())
    model[0].site_forward_linear_0 = 3
    with pytest.raises(ProxyError, match="the name of a site; rename the attribute"):
        q.calib(model)
    assert q.chosen_fallback is not None


# -- what belongs to another target, or to the user ----------------------------------------------------------------


def test_a_model_that_was_quantized_for_another_target_is_not_exported(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    model = _net()
    with torch.no_grad():
        model[2].weight[3] *= 1e-5
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [X])
    frozen = q.quantize(model)
    with pytest.raises(ProxyError, match=r"was quantized for another backend than tensorrt: scales of .* float16"):
        Quantizer(preset="plain", backend="tensorrt").export(frozen, tmp_path / "model.onnx", X)
    assert not (tmp_path / "model.onnx").exists()
    Quantizer(preset="plain", backend="openvino").export(frozen, tmp_path / "model.onnx", X)


@pytest.mark.parametrize("backend", ["openvino", "onnxruntime"])
def test_a_zero_point_is_one_of_the_steps(backend: str) -> None:
    # All values below zero: 0.0 is the last step, and a scale that was rounded down would put it one further.
    for seed in range(40):
        low = -torch.rand((), generator=torch.Generator().manual_seed(seed)).item() - 0.1
        q = Quantizer(
            preset="plain",
            backend=backend,
            fallback_dtype="bfloat16",
            activations={"calibrator": "max"},
            formats=[{"activations": "uint8"}],
        )
        model = nn.Sequential(nn.Linear(32, 16)).eval()
        q.calibrate(model, [torch.full((4, 32), low)])
        operand = next(o for o in q.plan["0.forward.linear_0"].operands if o.name == "input")
        assert operand.zero_point is not None
        assert 0 <= operand.zero_point <= 255
        q.quantize(model)
