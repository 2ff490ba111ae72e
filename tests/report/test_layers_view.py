"""``q.layers``: one line for each layer in a terminal and a notebook, with what amp and engines measured."""

from __future__ import annotations

import pytest
import torch
from test_coverage_view import Net

from quantizer import Quantizer
from quantizer.errors import CalibrationError
from quantizer.sensitivity.prices import GroupPrice, Prices

DATA = [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


@pytest.fixture
def calibrated() -> tuple[Quantizer, Net]:
    torch.manual_seed(0)
    net = Net().eval()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(net, DATA)
    return q, net


def test_one_line_for_each_layer(calibrated: tuple[Quantizer, Net]) -> None:
    layers = calibrated[0].layers
    assert [(row.layer, row.operation) for row in layers] == [
        ("stem.0", "conv2d"),
        ("block.first", "conv2d"),
        ("block.second", "conv2d"),
        ("block", "add"),
        ("classifier", "linear"),
    ]
    assert sum(row.share or 0 for row in layers) == pytest.approx(1)
    assert all(row.sqnr_db is not None and row.amax is not None for row in layers)
    lines = layers.text().splitlines()
    assert lines[0] == "5 of 5 layers quantized"
    assert sum("conv2d" in line for line in lines) == 3
    assert "what if" not in layers.text()
    assert "<table>" in layers._repr_html_()
    assert not len(layers.put_back)


def test_sensitivity_and_times_when_they_were_measured(calibrated: tuple[Quantizer, Net]) -> None:
    q, net = calibrated
    amp = q.amp(net)
    assert {row.error for row in q.layers} == {None}
    for batch in DATA:
        amp(batch)
    assert all(row.error is not None for row in q.layers)
    names = {operand.group for site in q.plan.values() for operand in site.operands if operand.group}
    groups = {name: GroupPrice(group=name, low_us=10.0, float_us=25.0) for name in names}
    timed = q.layers.timed(Prices(groups=groups, low_us=60.0, float_us=150.0, where="openvino, 8 x 128, 1 thread"))
    assert timed.title() == "5 of 5 layers quantized; times: openvino, 8 x 128, 1 thread"
    assert {row.low_us for row in timed} == {10.0, 20.0}
    assert {row.cost_us for row in timed.put_back} == {15.0}
    text, page = timed.text(), timed._repr_html_()
    assert "what if these go back to float, each alone" in text
    assert page.count("<table>") == 2
    q.fallback(amp, num=1)
    assert [row.back for row in q.layers.put_back].count(True) == 1
    assert q.layers.title().startswith(("4 of 5", "5 of 5"))


def test_long_names_lose_their_middle_and_are_not_broken() -> None:
    deep = torch.nn.Sequential()
    inner: torch.nn.Module = deep
    for name in ("a_module_with_a_long_name", "another_one_around_its_child", "the_innermost_module_of_all"):
        name = f"{name}_in_this_net"
        child = torch.nn.Sequential()
        inner.add_module(name, child)
        inner = child
    inner.add_module("projection", torch.nn.Linear(8, 8))
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(deep.eval(), [torch.randn(2, 8)])
    (line,) = [line for line in q.layers.text().splitlines() if "linear" in line]
    shown = line.split()[0]
    assert len(line) <= 120
    assert shown.startswith("a_module_with_a_")
    assert shown.endswith("_net.projection")
    assert "…" in shown
    assert "the_innermost_module_of_all_in_this_net.projection" in q.layers._repr_html_()


def test_without_calibration_there_are_no_layers() -> None:
    with pytest.raises(CalibrationError, match="calibrate"):
        Quantizer(preset="plain", backend="openvino").layers.text()
