"""A forward that writes into its inputs, or into what it keeps: neither the user's data nor the model changes."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from toy_nets import linear, net

from quantizer import Quantizer
from quantizer.errors import CalibrationWarning


def _operators(x: Tensor) -> Tensor:
    x -= 120.0
    x /= 60.0
    return x


def _view(x: Tensor) -> Tensor:
    x.view(-1).sub_(120.0)
    x[:, 0].div_(60.0)
    x[:, 1:].div_(60.0)
    return x


def _data(x: Tensor) -> Tensor:
    x.data.sub_(120.0).div_(60.0)
    return x


def _numpy(x: Tensor) -> Tensor:
    array = x.numpy()
    array -= 120.0
    array /= 60.0
    return x


WRITES = {
    "operators": _operators,
    "methods": lambda x: x.sub_(120.0).div_(60.0),
    "view": _view,
    "detached": lambda x: x.detach().sub_(120.0).div_(60.0),
    "data": _data,
    "numpy": _numpy,
    "out": lambda x: torch.div(torch.sub(x, 120.0, out=x), 60.0, out=x),
}


class Writes(nn.Module):
    """A model that normalizes in place, and counts its calls in each kind of state."""

    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.write, self.body = write, nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
        self.calls, self.history, self.counts, self.nested = 0, [0], Counter(a=1), {"a": [[0]]}
        self.register_buffer("moved", torch.zeros(1))
        self.kept = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(self.calls)
        self.counts["a"] += 1
        self.nested["a"][0][0] += 1
        self.late = [1]
        self.moved = self.moved + 1
        return self.body(self.write(x))

    def state(self) -> list[Any]:
        return copy.deepcopy(
            [
                *(self.calls, self.history, self.counts, self.nested, hasattr(self, "late")),
                *(self.moved.tolist(), self.kept.tolist()),
            ]
        )


def _pixels(kind: str) -> list[Tensor]:
    whole = np.random.default_rng(0).uniform(0, 255, (32, 32)).astype(np.float32)
    if kind == "numpy":
        return [torch.from_numpy(part) for part in np.split(whole, 4)]
    return list(torch.from_numpy(whole).split(8))


def _calibrate(q: Quantizer, model: nn.Module, data: list[Tensor], folder: Path) -> None:
    q.calibrate(model, data, progress=False)
    assert q.plan


def _calibrate_in_a_loop(q: Quantizer, model: nn.Module, data: list[Tensor], folder: Path) -> None:
    proxy = q.calib(model)
    for x in data:
        proxy(x)
    assert q.plan


def _measure(measure: str) -> Callable[..., None]:
    def run(q: Quantizer, model: nn.Module, data: list[Tensor], folder: Path) -> None:
        _calibrate(q, model, data, folder)
        proxy = q.amp(model, measure=measure)
        for x in data[:2]:
            proxy(x)
        assert len(q.sensitivity) == 2

    return run


def _search(q: Quantizer, model: nn.Module, data: list[Tensor], folder: Path) -> None:
    def metric(net: nn.Module) -> float:
        return float(net(data[0]).mean())

    _calibrate(q, model, data, folder)
    proxy = q.amp(model, measure="metric", metric=metric)
    q.fallback(proxy, max_drop=0.5, metric=metric)


def _diagnose(q: Quantizer, model: nn.Module, data: list[Tensor], folder: Path) -> None:
    _calibrate(q, model, data, folder)
    assert len(q.diagnose(model, data[:2])) == 2


def _export(q: Quantizer, model: nn.Module, data: list[Tensor], folder: Path) -> None:
    _calibrate(q, model, data, folder)
    q.export(q.quantize(model), folder / "frozen.onnx", data[0])
    q.export(model, folder / "float.onnx", data[0])


STEPS = {
    "calibrate": _calibrate,
    "calib": _calibrate_in_a_loop,
    "gradient": _measure("gradient"),
    "local": _measure("local"),
    "output": _measure("output"),
    "search": _search,
    "diagnoses": _diagnose,
    "export": _export,
}


@pytest.mark.parametrize("kind", ["views", "numpy"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("way", ["operators", "data"])
def test_neither_data_nor_model_change(step: str, way: str, kind: str, tmp_path: Path) -> None:
    if (step, way) == ("export", "data"):
        pytest.skip("torch's exporter refuses a write through .data")
    torch.manual_seed(0)
    model, data = Writes(WRITES[way]).eval(), _pixels(kind)
    before, state = [x.clone() for x in data], model.state()
    STEPS[step](Quantizer(backend="openvino", preset="fast"), model, data, tmp_path)
    assert all(map(torch.equal, data, before))
    assert model.state() == state


@pytest.mark.parametrize("way", WRITES)
def test_ranges_are_those_of_data_that_was_written_once(way: str) -> None:
    torch.manual_seed(0)
    model, data = Writes(WRITES[way]).eval(), _pixels("views")
    before = [x.clone() for x in data]
    q = Quantizer(backend="openvino", preset="plain")
    for _ in range(2):
        q.calibrate(model, data, progress=False)
    assert all(map(torch.equal, data, before))
    (first,) = (operand for operand in q.plan["body.0.forward.linear_0"].operands if operand.name == "input")
    assert first.minimum == pytest.approx(float((torch.cat(before).min() - 120) / 60), rel=1e-5)


def test_a_write_is_told_once() -> None:
    q = Quantizer(backend="openvino", preset="plain")
    proxy = q.calib(Writes(WRITES["operators"]).eval())
    with pytest.warns(CalibrationWarning, match=r"Writes\.forward writes into its inputs \(argument 0\)") as told:
        proxy(_pixels("views")[0])
    proxy(_pixels("views")[1])
    assert len(told) == 1


def test_an_input_that_is_given_twice_stays_one() -> None:
    x = torch.randn(8, 32)
    q = Quantizer(backend="openvino", preset="plain")
    q.calibrate(net("self.a(x) + self.b(y)", "x, y", a=linear(), b=linear()).eval(), [(x, x)], progress=False)
    groups = {
        o.range_group for path in ("a", "b") for o in q.plan[f"{path}.forward.linear_0"].operands if o.name == "input"
    }
    assert len(groups) == 1


def test_what_a_caller_gives_to_be_filled_is_filled() -> None:
    class Cache:
        def __init__(self) -> None:
            self.states: list[Tensor] = []

    cache = Cache()
    proxy = Quantizer(backend="openvino", preset="plain").calib(
        net(
            "cache.states.append(self.linear(x)); return torch.stack(cache.states).sum(0)", "x, cache", linear=linear()
        ).eval()
    )
    for _ in range(3):
        proxy(torch.randn(4, 32), cache)
    assert len(cache.states) == 3
