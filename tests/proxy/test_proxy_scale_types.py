"""The float type of scales: float32 in a proxy whatever the model's is, and what the target's holds in a file."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.algorithms.qat import parameter_groups
from quantizer.errors import CalibrationError
from quantizer.numerics.rounding import held_scale, is_normal

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _net(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)).eval()
    with torch.no_grad():
        # Channels with weights far below the others: a pruned one, and one in front of a normalization.
        model[0].weight[3] *= 1e-3
        model[2].weight[5] *= 1e-3
        model[2].weight[6] *= 1e-2
    return model.to(dtype)


X = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))


def _sqnr(output: Tensor, expected: Tensor) -> float:
    output, expected = output.detach().double(), expected.detach().double()
    return float(10 * torch.log10(expected.square().sum() / (output - expected).square().sum()))


# -- in a proxy ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["openvino", "tensorrt"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_no_channel_is_lost_whatever_the_type_of_the_model(dtype: torch.dtype, backend: str) -> None:
    model = _net(dtype)
    q = Quantizer(preset="plain", backend=backend)
    q.calibrate(model, [X.to(dtype)])
    frozen: Any = q.quantize(model)
    for layer, row in ((0, 3), (2, 5), (2, 6), (2, 7)):
        assert _sqnr(frozen[layer].weight[row], model[layer].weight[row]) > 33
    scales = {name: value for name, value in frozen.state_dict().items() if name.endswith(".scale")}
    assert len(scales) == 4
    assert all(value.dtype == torch.float32 for value in scales.values())
    planned = {scale.flatten()[0].item() for scale in q.scales().values()}
    assert {value.flatten()[0].item() for value in scales.values()} == planned


@pytest.mark.parametrize("options", [{}, {"activations": {"smoothquant_alpha": 0.5}}], ids=["plain", "smoothed"])
@pytest.mark.parametrize(("dtype", "backend"), list(itertools.product(TYPES, ["openvino", "tensorrt"])))
def test_training_rounds_as_the_frozen_model_does(dtype: torch.dtype, backend: str, options: dict[str, Any]) -> None:
    model, x = _net(dtype), X.to(dtype)
    q = Quantizer(preset="plain", backend=backend, **options)
    q.calibrate(model, [x])
    with torch.no_grad():
        expected = q.quantize(model)(x)
        assert expected.dtype == dtype
        assert torch.equal(q.qat(model).eval()(x), expected)


@pytest.mark.parametrize("scales", ["learned", "average"])
@pytest.mark.parametrize("backend", ["openvino", "tensorrt"])
def test_scales_that_move_are_those_of_the_file_all_along(backend: str, scales: Any) -> None:
    from quantizer.algorithms.qat import Schedule

    model = _net()
    q = Quantizer(preset="plain", backend=backend, activations={"calibrator": "percentile", "percentile": 99.0})
    q.calibrate(model, [X])
    proxy = q.qat(model, scales=scales)
    schedule = Schedule(proxy, steps=10)
    optimizer = torch.optim.Adam(parameter_groups(proxy, 1e-3))
    for step in range(5):
        optimizer.zero_grad()
        proxy(3 * X).square().mean().backward()
        optimizer.step()
        schedule.at(step + 1)
    with torch.no_grad():
        expected = proxy.eval()(X)
        assert torch.equal(q.quantize(model)(X), expected)


def test_half_leaves_the_scales_of_a_frozen_model() -> None:
    model = _net()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [X])
    frozen: Any = q.quantize(model)
    before = {name: value for name, value in frozen.state_dict().items() if name.endswith(".scale")}
    frozen.half()
    after = {name: value for name, value in frozen.state_dict().items() if name.endswith(".scale")}
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert frozen[2].weight.dtype == torch.float16
    assert frozen(X.half()).dtype == torch.float16
    assert _sqnr(frozen[2].weight[6], model[2].weight[6]) > 33
    assert frozen.double()(X.double()).dtype == torch.float64


# -- weights seen through views ------------------------------------------------------------------------------------


class _Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(96, 64) / 8)
        self.packed = nn.Parameter(torch.randn(3 * 64, 96) / 8)

    def forward(self, x: Tensor) -> Any:
        x = x @ self.weight.t()
        query, _, value = self.packed.chunk(3)
        return torch.matmul(x, query.mT) + nn.functional.linear(x, value)


@pytest.mark.parametrize("rows", [1, 7, 64, 300])
def test_weights_seen_through_views_are_multiplied_alike(rows: int) -> None:
    torch.manual_seed(0)
    model, x = _Transposed().eval(), torch.randn(rows, 64)
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [x])
    with torch.no_grad():
        expected = q.quantize(model)(x)
        assert torch.equal(q.qat(model).eval()(x), expected)


def test_a_closure_over_the_former_forward_trains_the_copy() -> None:
    model = _net()
    former = model.forward
    model.forward = lambda x: former(x) * 2
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [X])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    proxy = q.qat(model, copy=True)
    optimizer = torch.optim.SGD(proxy.parameters(), lr=0.1)
    proxy(X).square().mean().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(q.quantize(model)(X), proxy.eval()(X))


# -- as the target holds them --------------------------------------------------------------------------------------


def test_scales_below_the_normal_numbers_of_half_are_rounded_up() -> None:
    least = 2.0**-24
    scale = torch.tensor([1e-9, least, 1.5 * least, 100.2 * least, 6.0e-5, 6.2e-5, 0.01, 1.0])
    held = held_scale(scale, torch.float16)
    assert torch.equal(held.half().float(), held)
    assert held[:4].tolist() == [least, least, 2 * least, 101 * least]
    assert bool((held[:5] >= scale[:5]).all())
    assert torch.equal(held[5:], scale[5:].half().float())
    assert is_normal(held, torch.float16).tolist() == [False] * 5 + [True] * 3
    assert torch.equal(held_scale(scale, torch.float32), scale)


def test_channels_with_small_scales_are_named_and_kept_in_the_file(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    model = _net()
    q = Quantizer(preset="plain", backend="tensorrt")
    q.calibrate(model, [X])
    (row,) = [row for row in q.coverage.rows if row.name == "0.forward.linear_0"]
    assert "weight: 1 of 64 scales are below float16's smallest normal number" in row.reason
    path = q.export(q.quantize(model), tmp_path / "model.onnx", X)
    half = onnx.TensorProto.FLOAT16
    assert any(tensor.data_type == half for tensor in onnx.load(path).graph.initializer)
    session = onnxruntime.InferenceSession(path)
    (output,) = session.run(None, {session.get_inputs()[0].name: X.half().numpy()})
    with torch.no_grad():
        expected = model(X) - model[2].bias
        found = torch.from_numpy(output).float() - model[2].bias
    # In float16 itself, a sum of such values and a bias would lose most of them.
    assert _sqnr(found[:, 7], expected[:, 7]) > 25
    assert _sqnr(q.simulate(model)(X), model(X)) > 30


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_an_activation_whose_scale_half_does_not_hold_stays_float(dtype: str) -> None:
    model = nn.Sequential(nn.Linear(64, 32)).eval()
    q = Quantizer(preset="plain", backend="tensorrt", dtype=dtype, activations={"calibrator": "max"})
    q.calibrate(model, [X * 1e-4])
    entry = q.plan["0.forward.linear_0"]
    if dtype == "int8":
        assert not entry.quantized
        assert "needs a scale below 6.1e-05, the smallest normal number of float16" in entry.reason
    else:
        # FP8 steps are relative: half as many below the largest value cost it nothing.
        assert entry.quantized
        assert _sqnr(q.quantize(model)(X * 1e-4), model(X * 1e-4)) > 25
    on_cpu = q.for_backend("openvino") if dtype == "int8" else None
    assert on_cpu is None or on_cpu.plan["0.forward.linear_0"].quantized


def test_scales_from_elsewhere_that_half_does_not_hold_are_refused() -> None:
    model = _net()
    q = Quantizer(preset="plain", backend="tensorrt")
    q.calibrate(model, [X])
    with pytest.raises(
        CalibrationError, match=r"1e-05 is below 6\.1e-05, the smallest normal number of torch\.float16"
    ):
        q.load_scales({"0.forward.linear_0.input": torch.tensor(1e-5)})


# -- what only a wrong line would break ----------------------------------------------------------------------------


def test_loading_its_own_scales_keeps_zero_points() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)).eval()
    q = Quantizer(
        preset="plain", backend="openvino", formats=[{"activations": "uint8"}], activations={"calibrator": "max"}
    )
    q.calibrate(model, [X])
    points = [o.zero_point for entry in q.plan.values() for o in entry.operands]
    assert any(point not in (None, 0) for point in points)
    expected = q.quantize(model)(X)
    q.load_scales(q.scales())
    assert [o.zero_point for entry in q.plan.values() for o in entry.operands] == points
    assert torch.equal(q.quantize(model)(X), expected)
