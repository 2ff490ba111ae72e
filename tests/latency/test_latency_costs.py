"""Times of groups from times of layers, and the plans that follow from them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quantizer import Quantizer, measure_latency_costs
from quantizer.algorithms.sensitivity import GroupSensitivity
from quantizer.algorithms.sensitivity.latency_costs import (
    GroupLatency,
    LatencyCosts,
    by_speed,
    frontier,
    latency_costs_from_layers,
)
from quantizer.engines import InputSizes
from quantizer.engines.inspection import NOWHERE, place_times
from quantizer.errors import EngineError, SensitivityError
from quantizer.pipeline import time_groups as time_groups_of
from quantizer.plan.reasons import ReasonCode
from quantizer.utils.records import Inspection, Layer

# -- the time of places --------------------------------------------------------------------------------------------


def _layer(name: str, time_us: float, *, reads: str = "", nodes: tuple[str, ...] = ()) -> tuple[Layer, str]:
    return Layer(name=name, type="", time_us=time_us, nodes=nodes), reads


def _times(*layers: tuple[Layer, str], products: dict[str, str] | None = None) -> dict[str, float]:
    """The times of places a.first and a.second of layers that read each other by name."""
    made = [
        replace(layer, readers=tuple(other.name for other, reads in layers if reads == layer.name))
        for layer, _ in layers
    ]
    seen = Inspection(backend="openvino", verified=True, note="", layers=tuple(made))
    found = place_times(seen, ["a.first", "a.second"], products or {})
    assert sum(found.values()) == sum(layer.time_us or 0 for layer, _ in layers)
    return {place: time for place, time in found.items() if time}


def test_layers_belong_to_the_module_of_their_name() -> None:
    found = _times(
        _layer("a.first/MatMul", 1),
        _layer("a.second.site_forward_linear_0._input_quantizer/QuantizeLinear", 2),
        _layer("a.second.site_forward_linear_0/MatMul/DequantizationMultiply", 4),
        _layer("Multiply_17", 8, nodes=("Multiply_17", "a.first/Add")),
    )
    assert found == {"a.first": 9, "a.second": 6}


def test_a_layer_without_a_name_belongs_to_what_it_reads() -> None:
    found = _times(
        _layer("Reorder_1", 1, reads="input"),
        _layer("a.first/MatMul", 2, reads="Reorder_1"),
        _layer("Reorder_2", 4, reads="a.first/MatMul"),
        _layer("Reorder_3", 8, reads="Reorder_2"),
        _layer("a.second/MatMul", 16, reads="Reorder_3"),
        _layer("lonely", 32),
    )
    assert found == {"a.first": 15, "a.second": 16, NOWHERE: 32}


def test_a_layer_that_is_called_after_its_activation() -> None:
    layers = (_layer("a/Clip", 1), _layer("output", 2))
    assert _times(*layers) == {NOWHERE: 3}
    assert _times(*layers, products={"a/Clip": "a.first/Conv", "output": "a.second/Gemm"}) == {
        "a.first": 1,
        "a.second": 2,
    }


@pytest.mark.parametrize(("seconds", "doubtful", "measurements"), [(4, True, 2), (6, True, 1), (4, False, 1)])
def test_layers_of_slow_engines_are_timed_in_fewer_runs(
    seconds: float, doubtful: bool, measurements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    clock = iter([0, seconds])
    monkeypatch.setattr(time_groups_of.time, "perf_counter", lambda: next(clock))

    def inspected(*_: Any, **asked: Any) -> Inspection:
        runs.append(asked["runs"])
        layer, _ = _layer("a/MatMul", 3.0)
        return Inspection(backend="openvino", verified=True, note="", layers=(layer,))

    monkeypatch.setattr(time_groups_of, "inspect_engine", inspected)
    monkeypatch.setattr(time_groups_of, "product_names", lambda _: {})
    files = time_groups_of.EngineFiles(onnx=Path("model.onnx"), engine=Path("model.engine"))
    timing = time_groups_of.Timing(backend="openvino", sizes=InputSizes(32, 1), threads=1)
    engines = dict.fromkeys(("fast", "slow", "slower"), files)
    latencies = {"fast": 5e3, "slow": 0.15e6, "slower": 9e6}
    found = timing.of_places(engines, ["a"], latencies, lambda _: doubtful)
    assert runs == measurements * [10, 6, 3]
    assert {name: times["a"] for name, times in found.items()} == dict.fromkeys(engines, 3.0)


def test_the_product_behind_a_name(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="reading a graph needs enginequant[onnx]")
    from quantizer.engines.onnx_graph import product_names

    text = """
    <ir_version: 10, opset_import: ["" : 20]>
    g (float[2, 4] x) => (float[2, 3] y) <float[4, 3] w = {1,2,3,4,5,6,7,8,9,10,11,12}, float[3] b = {1, 2, 3}>
    {
      m = MatMul (x, w)
      n = Add (m, b)
      r = Relu (n)
      s = Add (r, n)
      y = Relu (s)
    }
    """
    model = onnx.parser.parse_model(text)
    for node, name in zip(model.graph.node, ("a/MatMul", "a/Add", "act/Relu", "sum/Add", "out/Relu"), strict=True):
        node.name = name
    onnx.save(model, tmp_path / "m.onnx")
    # A sum of two computed values is a layer of its own.
    nodes = ("a/MatMul", "a/Add", "act/Relu", "m", "n", "r")
    assert product_names(tmp_path / "m.onnx") == dict.fromkeys(nodes, "a/MatMul")


# -- latency costs -----------------------------------------------------------------------------------------------------


def _costs(**groups: tuple[float, float]) -> LatencyCosts:
    """Latency costs of groups from their times in low precision and in float, with 100 us that are the same in both."""
    measured = {name: GroupLatency(group=name, low_us=low, float_us=plain) for name, (low, plain) in groups.items()}
    return LatencyCosts(
        groups=measured,
        low_us=100 + sum(low for low, _ in groups.values()),
        float_us=100 + sum(plain for _, plain in groups.values()),
        where="openvino, 8 x 128, 1 thread",
    )


def _ranking(**errors: float) -> list[GroupSensitivity]:
    names = sorted(errors, key=lambda name: -errors[name])
    return [
        GroupSensitivity(rank=rank, group=name, kind="linear", error=errors[name], sites=(name,), parts=(name,))
        for rank, name in enumerate(names, start=1)
    ]


def test_predictions_add_gains_up() -> None:
    latency_costs = _costs(a=(100, 400), b=(50, 150))
    assert latency_costs.time_us([]) == 250
    assert latency_costs.time_us(["a"]) == 550
    assert latency_costs.time_us(["b", "a", "a"]) == latency_costs.float_us == 650
    assert latency_costs.speedup(["b"]) == 650 / 350
    with pytest.raises(SensitivityError, match="'c' has no latency cost; the groups that have are a, b"):
        latency_costs.time_us(["c"])


def test_a_gain_near_0_counts_as_a_tenth_of_the_mean() -> None:
    latency_costs = _costs(a=(100, 400), b=(50, 51), c=(60, 50), d=(10, 119))
    assert latency_costs.gains({name: [name] for name in "abcd"}) == {"a": 300, "b": 10.25, "c": 10.25, "d": 109}
    assert latency_costs.gains({"ab": ["a", "b"], "c": ["c"]}) == {"ab": 301, "c": 15.05}
    assert _costs(a=(60, 50)).gains({"a": ["a"]}) == {"a": 0}
    assert latency_costs.gains({}) == {}


def test_slower_groups_are_those_that_lose_more_than_noise() -> None:
    latency_costs = _costs(a=(100, 60), b=(100, 80), c=(60, 100), unseen=(90, 0))
    assert list(latency_costs.slower()) == ["a"]
    reason = latency_costs.slower()["a"]
    assert reason == "slower in low precision than in float: 100 us, float 60, openvino, 8 x 128, 1 thread"
    assert ReasonCode.of(reason) is ReasonCode.SLOWER
    assert replace(latency_costs, least_loss_us=math.inf).slower() == {}


def test_the_most_accurate_plan_that_is_fast_enough() -> None:
    # What they cost in accuracy for a microsecond: b most, then c, then a.
    latency_costs, ranking = _costs(a=(100, 400), b=(50, 150), c=(50, 250)), _ranking(a=0.1, b=0.4, c=0.6)
    # 900 us in float: 450 leave 150 us to spend, which b takes 100 of; c would take 200.
    found = by_speed(ranking, latency_costs, 2.0)
    assert (found.groups, found.ranks, found.met) == (("b",), (2,), True)
    assert found.speedup == 900 / 400
    assert by_speed(ranking, latency_costs, 1.0).groups == ("c", "b", "a")
    slow = by_speed(ranking, latency_costs, 4.0)
    assert (slow.groups, slow.met, slow.speedup) == ((), False, 3.0)
    with pytest.raises(SensitivityError, match=r"min_speedup=0: expected a number above 0"):
        by_speed(ranking, latency_costs, 0)


def test_groups_that_gain_nothing_fall_back_for_nothing() -> None:
    latency_costs = _costs(a=(100, 400), even=(100, 95))
    assert by_speed(_ranking(a=0.5, even=0.1), latency_costs, 1.7).groups == ("even",)


def test_the_frontier_goes_from_fast_to_accurate() -> None:
    points = frontier(_ranking(a=0.1, b=0.4), _costs(a=(100, 400), b=(50, 150)))
    assert [(point.back, point.time_us, round(point.error, 6)) for point in points] == [
        (0, 250, 0.5),
        (1, 350, 0.1),
        (2, 650, 0),
    ]


# -- a quantizer ---------------------------------------------------------------------------------------------------


class Two(nn.Module):
    """Two linears in a row: [rows, 32] to [rows, 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(torch.relu(self.first(x)))


@pytest.fixture
def calibrated() -> tuple[Quantizer, nn.Module]:
    torch.manual_seed(0)
    q, model = Quantizer(preset="plain", backend="openvino"), Two().eval()
    q.calibrate(model, [torch.randn(8, 32)])
    return q, model


_FIRST, _SECOND = "first.forward.linear_0", "second.forward.linear_0"


def _scaled_costs(q: Quantizer, **times: tuple[float, float]) -> LatencyCosts:
    """Latency costs of the two linears, scaled to engines of 200 and 400 us."""
    hosts = {name: name.partition(".")[0] for name in q.plan}
    low, plain = ({place: entry[which] for place, entry in times.items()} for which in (0, 1))
    return latency_costs_from_layers(q.plan, hosts, low, plain, low_us=200, float_us=400, where="here")


def test_times_are_scaled_to_the_engine(calibrated: tuple[Quantizer, nn.Module]) -> None:
    q, _ = calibrated
    latency_costs = _scaled_costs(q, first=(30, 300), second=(10, 100))
    assert set(latency_costs.groups) == {_FIRST, _SECOND}
    assert latency_costs.groups[_FIRST] == GroupLatency(group=_FIRST, low_us=150, float_us=300)
    assert latency_costs.groups[_SECOND] == GroupLatency(group=_SECOND, low_us=50, float_us=100)


def test_a_table_of_an_embedding_is_not_for_speed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(2**13, 32), nn.Linear(32, 32)).eval()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [torch.arange(40).reshape(4, 10)])
    latency_costs = _scaled_costs(q, **{"0": (30, 3), "1": (300, 30)})
    assert {name: latency.is_table for name, latency in latency_costs.groups.items()} == {
        "0.forward.embedding_0": True,
        "1.forward.linear_0": False,
    }
    # Whatever was measured counts as a loss.
    assert list(replace(latency_costs, least_loss_us=-math.inf).slower()) == ["1.forward.linear_0"]


def test_slower_groups_are_float_and_say_why(calibrated: tuple[Quantizer, nn.Module]) -> None:
    q, model = calibrated
    latency_costs = _scaled_costs(q, first=(150, 100), second=(50, 300))
    found = q.fallback(None, latency_costs=latency_costs)
    assert (found.groups, list(found.slower)) == ((), [_FIRST])
    assert [name for name, site in q.plan.items() if site.quantized] == [_SECOND]
    assert q.plan[_FIRST].reason.startswith("slower in low precision than in float: 150 us, float 100")
    x = torch.randn(3, 32)
    with torch.no_grad():
        expected = model.second(torch.relu(model.first(x)))
        assert 20 < _db(q.quantize(model)(x), expected) < 60
    q.clear_fallback()
    assert q.plan[_FIRST].quantized


def test_a_fallback_for_accuracy_has_the_slower_groups_too(
    calibrated: tuple[Quantizer, nn.Module], tmp_path: Path
) -> None:
    q, model = calibrated
    latency_costs = _scaled_costs(q, first=(150, 100), second=(50, 300))
    amp = q.amp(model)
    amp(torch.randn(8, 32))
    scores: list[int] = []

    def metric(candidate: nn.Module) -> float:
        scores.append(1)
        return 1.0

    found = q.fallback(amp, max_drop=0.1, metric=metric, latency_costs=latency_costs)
    assert (found.groups, list(found.slower), len(scores)) == ((), [_FIRST], 2)
    assert list(q.fallback(amp, min_speedup=1.2, latency_costs=latency_costs).reasons()) == [_FIRST]
    assert q.fallback(amp, num=1, latency_costs=latency_costs).groups == (_SECOND,)
    saved = Quantizer.load(q.save(tmp_path / "saved"))
    assert [name for name, site in saved.plan.items() if site.quantized] == []
    # The times are those of one backend.
    assert q.for_backend("onnxruntime").plan[_FIRST].quantized
    for wrong, message in (
        ({"min_speedup": 2.0}, r"fallback\(min_speedup=...\) needs latency_costs="),
        ({"num": 1, "latency_costs": latency_costs, "costs": {_FIRST: 1.0}}, r"takes costs= or latency_costs="),
    ):
        with pytest.raises(SensitivityError, match=message):
            q.fallback(amp, **wrong)


def test_a_number_of_groups_falls_back_as_the_ranking_shows_them(calibrated: tuple[Quantizer, nn.Module]) -> None:
    """However little the first of them wins in time."""
    q, model = calibrated
    amp = q.amp(model)
    amp(torch.randn(8, 32))
    first, second = (row.group for row in q.sensitivity.rows)
    gains = {first: (90, 300), second: (90, 90)}
    latency_costs = _scaled_costs(q, first=gains[_FIRST], second=gains[_SECOND])
    assert q.fallback(amp, num=1, latency_costs=latency_costs).groups == (first,)
    assert q.fallback(amp, ratio=0.5, latency_costs=latency_costs).groups == (first,)


def test_times_of_engines_that_cannot_be_measured(
    calibrated: tuple[Quantizer, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, model = calibrated
    amp = q.amp(model)
    amp(torch.randn(8, 32))
    q.fallback(amp, num=1)
    with pytest.raises(EngineError, match=r"some are kept in float: call clear_fallback\(\) first"):
        measure_latency_costs(q, model, torch.randn(8, 32))
    monkeypatch.setattr("quantizer.pipeline.time_groups.runs_here", lambda name: False)
    with pytest.raises(
        EngineError, match=r"need a GPU, but this machine has none; call it on a machine with a GPU, or .*num="
    ):
        measure_latency_costs(q, model, torch.randn(8, 32))


def _db(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(10 * torch.log10(expected.square().sum() / (found - expected).square().sum()))
