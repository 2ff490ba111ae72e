"""Rough plans, with which it is seen which engine can be the fastest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quantizer import Quantizer
from quantizer.engines import build_engine, load_engine
from quantizer.engines.for_this_cpu import Variant
from quantizer.errors import EngineError
from quantizer.pipeline import fastest_engine
from quantizer.plan.site_plan import Plan

ROWS = torch.randn(12, 16, generator=torch.Generator().manual_seed(0))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)).eval()


def calibrated(model: nn.Module, **settings: Any) -> Quantizer:
    quantizer = Quantizer(backend="openvino", **settings)
    quantizer.calibrate(model, [ROWS])
    return quantizer


def scales(quantizer: Quantizer) -> dict[str, list[float]]:
    return {name: scale.flatten().tolist() for name, scale in quantizer.scales().items()}


@pytest.mark.parametrize(
    "settings", [{}, {"preset": "accurate"}, {"activations": {"smoothquant_alpha": 0.5}}, {"preset": "plain"}], ids=str
)
def test_it_is_the_plan_of_largest_values(settings: dict[str, Any]) -> None:
    model = net()
    first = calibrated(model, **settings)
    before: Plan = dict(first.plan)
    calls: list[nn.Module] = []
    rough = fastest_engine.rough_quantizer(first, "onnxruntime")
    with nn.modules.module.register_module_forward_pre_hook(lambda module, _: calls.append(module)):
        rough.quantize(model)
    assert not calls
    assert rough.config.backend == "onnxruntime"
    plain = Quantizer(
        backend="onnxruntime",
        activations={"calibrator": "max", "smoothquant_alpha": None, "zero_point": first.config.activations.zero_point},
        weights={"rounding": "nearest"},
        bias_correction=False,
    )
    plain.calibrate(model, [ROWS])
    assert scales(rough) == scales(plain)
    assert dict(first.plan) == before


@pytest.mark.parametrize(
    ("backend", "settings", "planned", "least"),
    [
        ("onnxruntime", {}, [], 1.1),
        ("torch", {}, ["openvino"], 1.1),
        ("torch", {}, ["openvino", "onnxruntime"], None),
        ("torch-avx2", {}, ["onnxruntime"], 1.1),
        ("torch", {"preset": "plain"}, [], None),
        ("torch", {"preset": "plain", "bias_correction": True}, ["onnxruntime"], 1.1),
        ("onnxruntime", {"preset": "plain", "bias_correction": True}, [], 1.1),
        ("openvino", {}, ["onnxruntime"], 1.5),
        ("openvino-avx2", {}, ["onnxruntime-avx2"], 1.5),
        ("openvino", {"preset": "plain"}, [], None),
    ],
)
def test_where_it_tells_how_fast_a_good_plan_is(
    backend: str, settings: dict[str, Any], planned: list[str], least: float | None
) -> None:
    assert fastest_engine.least_ratio(Quantizer(backend="openvino", **settings).config, backend, planned) == least


def test_what_fell_back_is_quantized() -> None:
    model = net()
    first = calibrated(model)
    proxy = first.amp(model)
    proxy(ROWS)
    first.fallback(proxy, num=1)
    rough = fastest_engine.rough_quantizer(first, "onnxruntime")
    rough.quantize(model)
    assert rough.coverage.share == 1
    assert first.coverage.share < 1


@pytest.mark.usefixtures("exact_byte_products")
def test_an_engine_is_built_from_it(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="install enginequant[onnxruntime]")
    pytest.importorskip("onnxscript", reason="install enginequant[onnx]")
    model = net()

    def build(onnx: Path, path: Path) -> Any:
        return load_engine("onnxruntime", build_engine("onnxruntime", onnx, path).path)

    engine = fastest_engine.rough_engine(
        calibrated(model), "onnxruntime", model, ROWS, tmp_path / "of.a.backend-rough", build
    )
    result = next(iter(engine(ROWS.numpy()).values()))
    assert torch.nn.functional.cosine_similarity(torch.tensor(result), model(ROWS)).min() > 0.99
    assert {path.name for path in tmp_path.iterdir()} == {"of.a.backend-rough.onnx", "of.a.backend-rough.engine"}


@pytest.mark.parametrize(
    ("taken", "why"),
    [
        ([2.4], "1.20x the time of quick"),
        ([2.3], None),
        ([0.5], None),
        ([6.0, 1.0], "1.22x the time of quick"),
        ([1.0, 4.0], None),
    ],
)
def test_the_fastest_of_the_others_counts(taken: list[float], why: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    left = list(taken)

    def given(calls: Mapping[str, Any], **_: Any) -> dict[str, list[float]]:
        assert set(calls) == {"quick", "slow", "this"}
        return {"quick": [2.0], "slow": [9.0], "this": [left.pop(0)]}

    monkeypatch.setattr(fastest_engine, "interleaved_latency", given)
    monkeypatch.setattr(fastest_engine, "engine_inputs", lambda engine, batch: batch)
    engine: Any = dict
    rivals = {"quick": engine, "slow": engine}
    found = fastest_engine.too_slow("this", engine, rivals, [{}] * len(taken), 1.2, "max calibration")
    assert found == (None if why is None else f"with max calibration it takes {why}")
    assert not left


@pytest.mark.parametrize(
    ("seconds", "why"),
    [(0.05, "it takes 2.50x the time of quick"), (0.035, None), (0.005, None)],
    ids=["far behind", "near", "too short to be worth it"],
)
def test_a_float_engine_that_is_far_behind_another_is_not_compared(
    seconds: float, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"quick": 0.02 if seconds > 0.01 else 0.001, "slow": 0.1, "this": seconds}
    monkeypatch.setattr(
        fastest_engine, "interleaved_latency", lambda calls, **_: {name: [times[name]] for name in calls}
    )
    monkeypatch.setattr(fastest_engine, "engine_inputs", lambda engine, batch: batch)
    engine: Any = dict
    assert fastest_engine.far_behind("this", engine, {"quick": engine, "slow": engine}, {}) == why


class _Timed:
    """An engine that takes some time at any size."""

    def __init__(self, milliseconds: float) -> None:
        self.milliseconds = milliseconds

    def __call__(self, inputs: Any) -> dict[str, Any]:
        """Compute nothing."""
        return {}


@pytest.mark.parametrize(
    ("borrowed", "rough", "why"),
    [
        (1.4, None, "with the file of openvino int8 it takes 1.40x the time of openvino int8"),
        (1.2, 1.2, "with max calibration it takes 1.20x the time of openvino int8"),
        (1.2, 1.0, None),
        (None, 1.2, "with max calibration it takes 1.20x the time of openvino int8"),
        (None, None, None),
    ],
)
def test_a_backend_first_runs_the_file_of_another_one(
    borrowed: float | None, rough: float | None, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def engine(form: str, milliseconds: float | None) -> Any:
        def make(*_: Any) -> Any:
            made.append(form)
            if milliseconds is None:
                raise EngineError("it does not build")
            return _Timed(milliseconds)

        return make

    def given(calls: Mapping[str, Any], **_: Any) -> dict[str, list[float]]:
        return {name: [call.func.milliseconds] for name, call in calls.items()}

    monkeypatch.setattr(fastest_engine, "interleaved_latency", given)
    monkeypatch.setattr(fastest_engine, "engine_inputs", lambda engine, batch: batch)
    trials = fastest_engine.RoughTrials(engine("borrowed", borrowed), engine("rough", rough), [{}])
    variant = Variant(backend="onnxruntime", dtype="int8")
    rivals: Any = {"openvino int8": _Timed(1.0)}
    for _ in range(2):
        assert trials.too_slow(variant, calibrated(net()), rivals, ["openvino"]) == why
    # Both are made once, and a rough plan only if the first trial does not decide.
    assert made == (["borrowed"] if borrowed == 1.4 else ["borrowed", "rough"])


def test_a_file_with_dynamic_ranges_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastest_engine, "too_slow", lambda *_, what, **__: what)
    trials = fastest_engine.RoughTrials(
        lambda *_: pytest.fail("a file with dynamic ranges was tried"), lambda *_: _Timed(1.0), [{}]
    )
    rivals: Any = {"openvino int8 dynamic": _Timed(1.0)}
    variant = Variant(backend="onnxruntime", dtype="int8")
    assert trials.too_slow(variant, calibrated(net()), rivals, ["openvino"]) == "max calibration"
