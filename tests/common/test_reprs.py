"""What public objects say of themselves in one line."""

from __future__ import annotations

from pathlib import Path

import torch
from helpers import Mlp

from quantizer import Quantizer
from quantizer.algorithms.sensitivity import Fallback
from quantizer.algorithms.sensitivity.latency_costs import GroupLatency, LatencyCosts
from quantizer.engines import BuildResult


def test_a_quantizer_says_where_it_stands(tmp_path: Path) -> None:
    q, model, x = Quantizer(preset="plain", backend="openvino"), Mlp().eval(), torch.randn(8, 32)
    assert repr(q) == "Quantizer(backend='openvino', not calibrated)"
    q.calib(model)
    assert repr(q) == "Quantizer(backend='openvino', not calibrated)"
    q.calibrate(model, [x, x])
    assert repr(q) == "Quantizer(backend='openvino', calibrated on 16 samples, 3 sites)"
    assert repr(q.for_backend("tensorrt")) == "Quantizer(backend='tensorrt', calibrated on 16 samples, 3 sites)"
    q.save(tmp_path / "q")
    loaded = Quantizer.load(tmp_path / "q")
    assert repr(loaded) == "Quantizer(backend='openvino', calibrated, 3 sites)"
    loaded.calibrate(model, [x], resume=True)
    assert repr(loaded) == "Quantizer(backend='openvino', calibrated on 24 samples, 3 sites)"
    q.load_scales(q.scales())
    assert repr(q) == "Quantizer(backend='openvino', scales loaded, 3 sites)"
    q.calibrate(model, [x])
    amp = q.amp(model)
    amp(x)
    q.fallback(amp, num=1)
    assert repr(q) == "Quantizer(backend='openvino', calibrated on 8 samples, 3 sites, 1 group in float)"
    assert repr(q.chosen_fallback) == "Fallback(num=1: 1 group in float)"


def test_results_say_what_they_hold() -> None:
    built = BuildResult(Path("m.engine"), 3 * 2**20, 1.25, ("it is emulated",))
    assert repr(built) == "BuildResult('m.engine', 3.0 MiB, in 1.2 s, warning: it is emulated)"
    missed = Fallback(groups=("a", "b"), asked="min_speedup=3", slower={"c": ""}, min_speedup=3.0, speedup=2.0)
    assert repr(missed) == "Fallback(min_speedup=3: 2 groups in float, 1 more that would be slower, not met)"
    latency = GroupLatency(group="a", low_us=1.0, float_us=2.0)
    latency_costs = LatencyCosts(groups={"a": latency}, low_us=1500.0, float_us=4200.0, where="tensorrt at 8 x 128")
    times = "1.50 ms in low precision, 4.20 ms in float"
    assert repr(latency_costs) == f"LatencyCosts(1 groups, {times}, tensorrt at 8 x 128)"
