"""A model whose passes write into its buffers: it stays what it was, and proxies give what it would have given."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Mlp, assert_same
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.proxy.model_sharing import OwnBuffers
from quantizer.proxy.restored_state import untouched


class Counts(nn.Module):
    """What it gives depends on how often it ran, by buffers, a tensor and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.last = nn.Linear(32, 32)
        self.register_buffer("cnt", torch.zeros(()))
        self.register_buffer("memory", torch.zeros(32), persistent=False)
        self.register_buffer("tail", self.memory[16:], persistent=False)
        self.steps = torch.zeros(3)
        self.number = 0
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        self.cnt += 1
        self.number += 1
        self.steps.add_(1)
        h = self.first(x)
        self.memory.mul_(0.5).add_(h.detach().mean(0))
        self.tail.add_(1)
        found: Tensor = self.last(self.norm(h).relu() + self.memory) * self.cnt + self.steps.sum() + self.number
        return found


def state(model: nn.Module) -> list[Any]:
    modules = list(model.modules())
    values = [dict(module.named_buffers(recurse=False)) for module in modules]
    return copy.deepcopy([dict(model.state_dict()), values, [vars(module).get("number") for module in modules]])


def data(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, 32, generator=generator) for _ in range(count)]


def measured(q: Quantizer, model: nn.Module, kind: str) -> nn.Module:
    if kind in ("gradient", "local", "output"):
        return q.amp(model, measure=kind)
    return {"calib": q.calib, "quantize": q.quantize}[kind](model)


@pytest.mark.parametrize("kind", ["calib", "gradient", "local", "output"])
def test_outputs_are_those_of_the_model_in_the_same_sequence(kind: str) -> None:
    model = Counts().eval()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, data())
    before = state(model)
    twin = copy.deepcopy(model)
    proxy = measured(q, model, kind)
    with torch.no_grad():
        for x in data():
            assert_same(proxy(x), twin(x))
    assert_same(state(model), before)
    assert_same(model.steps, torch.zeros(3))


@pytest.mark.parametrize("options", [{"calibrator": "auto"}, {"calibrator": "percentile", "percentile": [99, 99.9]}])
@pytest.mark.parametrize("smooth", [None, "auto"])
def test_choosing_ranges_leaves_no_trace(options: dict[str, Any], smooth: str | None) -> None:
    model = Counts().eval()
    before = state(model)
    twin = copy.deepcopy(model)
    q = Quantizer(preset="plain", backend="openvino", activations={**options, "smoothquant_alpha": smooth})
    proxy = q.calib(model)
    with torch.no_grad():
        for x in data():
            assert_same(proxy(x), twin(x))
            # It runs the kept batches again.
            assert str(q.ranges)
    assert_same(state(model), before)


@pytest.mark.parametrize("kind", ["frozen", "metric", "search"])
def test_the_model_stays_what_it_was(kind: str) -> None:
    model = Counts().eval()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, data())
    before = state(model)

    def score(candidate: nn.Module) -> float:
        with torch.no_grad():
            return float(candidate(data()[0]).sum())

    if kind == "frozen":
        frozen = q.quantize(model)
        with torch.no_grad():
            assert not torch.equal(frozen(data()[0]), frozen(data()[0]))
    elif kind == "metric":
        amp = q.amp(model, measure="metric", metric=score)
        assert str(q.sensitivity)
        assert float(amp.cnt) == 0
    else:
        amp = q.amp(model)
        amp(data()[0])
        q.fallback(amp, max_drop=0.1, metric=score)
    assert_same(state(model), before)


def test_a_proxy_that_goes_on_follows_the_model() -> None:
    """Between two parts of a calibration the model may be trained, and then its running statistics are others."""
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32))
    q = Quantizer(preset="plain", backend="openvino")
    with torch.no_grad():
        q.calibrate(model.eval(), data())
        model.train()(data()[0] * 5)
        model[1].register_buffer("running_var", model[1].running_var * 2)
        proxy = q.calib(model, resume=True)
        assert_same(proxy(data()[0]), model.eval()(data()[0]))


def test_what_shares_memory_goes_on_to_share_it() -> None:
    model = Counts().eval()
    twin = copy.deepcopy(model)
    memory, tail = model.memory, model.tail
    assert isinstance(memory, Tensor)
    assert isinstance(tail, Tensor)
    OwnBuffers(twin, model)
    proxy: Any = Quantizer(preset="plain").calib(model)
    assert proxy.tail.untyped_storage().data_ptr() == proxy.memory.untyped_storage().data_ptr()
    assert proxy.memory.untyped_storage().data_ptr() != memory.untyped_storage().data_ptr()


def test_a_measuring_proxy_is_called_by_threads() -> None:
    model = Mlp().eval()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [torch.randn(8, 32)])
    batches = [torch.randn(8, 32) for _ in range(12)]
    alone = q.amp(model)
    for x in batches:
        alone(x)
    expected = {row.group: row.error for row in q.sensitivity}
    proxy = q.amp(model)
    with torch.no_grad():
        outputs = [model(x) for x in batches]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(proxy, batches))
    assert all(torch.equal(mine, other) for mine, other in zip(found, outputs, strict=True))
    assert {row.group: row.error for row in q.sensitivity} == pytest.approx(expected)


def test_a_copy_of_a_measuring_proxy_measures_nothing() -> None:
    model, x = Mlp().eval(), torch.randn(8, 32)
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [x])
    proxy = q.amp(model)
    proxy(x)
    expected = str(q.sensitivity)
    for twin in (copy.deepcopy(proxy), pickle.loads(pickle.dumps(proxy))):
        assert_same(twin(x * 3), model(x * 3))
    assert str(q.sensitivity) == expected


class Anchors(nn.Module):
    """Computes anchors once for each shape of its input, as the heads of some detectors do."""

    shape: tuple[int, ...] | None = None
    anchors = torch.empty(0)

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 32)
        self.counted = (torch.zeros(1),)
        self.counts = False

    def forward(self, x: Tensor) -> Tensor:
        if self.shape != x.shape:
            self.anchors, self.shape = torch.arange(x.shape[-1]) + 0.5, x.shape
        if self.counts:
            self.counted[0].add_(1)
        found: Tensor = self.head(x) + self.anchors
        return found


def test_the_shape_of_a_cached_tensor_is_restored_with_it(tmp_path: Path) -> None:
    model = Anchors().eval()
    expected = copy.deepcopy(model)(data()[0])
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, data())
    q.export(q.quantize(model), tmp_path / "net.onnx", data()[0])
    assert "shape" not in vars(model)
    model.counts = True
    with torch.no_grad(), untouched(model):
        model(data()[0])
    assert "shape" not in vars(model)
    assert_same(model.counted[0], torch.zeros(1))
    with torch.no_grad():
        assert_same(model(data()[0]), expected)
