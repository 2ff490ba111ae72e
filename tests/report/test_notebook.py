"""Results in a terminal and a notebook: coverage, ranges, layers, pictures, and the width of their tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrated import make_calibrated
from helpers import Mlp
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.algorithms.sensitivity.latency_costs import GroupLatency, LatencyCosts
from quantizer.errors import CalibrationError, QuantizerError
from quantizer.pipeline.make_record import site_records
from quantizer.plan.coverage import Coverage, Ranges
from quantizer.plan.site_plan import OperandPlan, SitePlan
from quantizer.report.notebook import Picture
from quantizer.utils.records import Site


class Block(nn.Module):
    """A residual block as torchvision writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.second_norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(y)) + x)


class Net(nn.Module):
    """A stem, a block and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.block = Block()
        self.classifier = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.classifier(self.block(self.stem(x)).mean((2, 3)))
        return found


def _calibrated(**config: object) -> Quantizer:
    torch.manual_seed(0)
    q = Quantizer(preset="plain", backend="openvino", **config)  # type: ignore[arg-type]
    q.calibrate(Net().eval(), [torch.randn(4, 3, 8, 8) for _ in range(2)])
    return q


def test_only_what_ran_is_counted_and_shown() -> None:
    coverage = _calibrated().coverage
    assert coverage.by_kind() == {"conv": (3, 3), "linear": (1, 1), "residual_add": (1, 1)}
    title, text = coverage.title(), coverage.text()
    assert title.startswith("sites quantized: conv 3 of 3, linear 1 of 1, residual_add 1 of 1; 100.0% of ")
    # The other branch of each nn.Conv2d, and the counter of each nn.BatchNorm2d.
    assert title.endswith("; print .all for 6 sites in other branches of torch's code")
    assert "never ran in calibration" not in text
    assert "stem.0._conv_forward.conv2d_0" not in text
    assert len(coverage.shown) == 5
    assert len(coverage) == 11


def test_all_shows_the_rest() -> None:
    coverage = _calibrated().coverage
    whole = coverage.all
    assert isinstance(whole, Coverage)
    assert "print .all" not in whole.title()
    assert whole._repr_html_().count("that this module does not take") == 6
    assert "stem.0._conv_forward.conv2d_0" in whole.text()
    assert len(whole.shown) == len(whole) == len(coverage)
    assert whole.not_quantized is coverage.not_quantized
    # The first object is as it was.
    assert len(coverage.shown) == 5


def test_a_branch_that_never_ran_does_not_count_where_a_rule_decides_either() -> None:
    coverage = _calibrated(sites={"residual_add": False}, exclude={"names": ["stem"]}).coverage
    assert coverage.by_kind() == {"conv": (2, 3), "linear": (1, 1), "residual_add": (0, 1)}
    reasons = {row.name: row.reason for row in coverage}
    assert reasons["stem.0._conv_forward.conv2d_1"] == "excluded by rule"
    assert reasons["stem.0._conv_forward.conv2d_0"].startswith("a branch in the code of torch")


def test_counters_are_no_residual_adds_before_calibration_either() -> None:
    found = Quantizer(preset="plain", backend="openvino").inspect(Net().eval())
    assert found.by_kind()["residual_add"] == (0, 1)
    assert "BatchNorm2d" not in {row.host_type for row in found if not row.quiet}
    assert "1.forward.add_0" not in found.text()


class Counts(nn.Module):
    """A net that counts its calls, in eval mode too."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls.add(1)
        return self.linear(x) + self.other(x)


def test_a_counter_that_runs_is_no_residual_add() -> None:
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(Counts().eval(), [torch.randn(4, 8)])
    assert q.coverage.by_kind()["residual_add"][1] == 1
    assert q.coverage.title().endswith("; print .all for 1 addition that is no residual add")


def test_the_title_counts_tables_that_stay_float() -> None:
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 8)).eval(), [torch.arange(8)])
    assert q.coverage.title().endswith(
        "; print .all for 1 addition that is no residual add and 1 table that is not quantized"
    )
    assert "its embedding table has 128 elements" in q.coverage.all.text()


def test_a_place_is_a_file_and_a_line() -> None:
    coverage = _calibrated().coverage
    places = {row.name: row.place for row in coverage}
    assert places["block.forward.add_0"].startswith("test_notebook.py:")
    assert f" {places['classifier.forward.linear_0']} " in coverage.text()
    assert Site(name="x", kind="source", host_type="X", file="", line=0, quantized=False, reason="none").place == ""


def attend(x: Tensor) -> Tensor:
    return x @ x.T


def applied(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x)


class PassesOn(nn.Module):
    """A net whose product is in a function that it hands to another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return applied(attend, self.linear(x))


def test_a_function_that_is_passed_on_says_what_to_do() -> None:
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(PassesOn().eval(), [torch.randn(4, 8)])
    row = next(row for row in q.coverage if row.kind == "matmul")
    assert row.reason == (
        "attend() is passed on as a value here instead of being called, so it is not quantized; to quantize "
        "it, call it in the code of a module"
    )
    assert not row.quantized
    assert "attend() is passed on" in " ".join(q.coverage.text().split())


def test_an_offset_in_an_embedding_is_not_shown() -> None:
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8)).eval()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [torch.randint(16, (2, 4))])
    row = next(row for row in q.coverage if row.kind == "residual_add")
    assert row.reason.startswith("embedding() is passed on as a value here instead of being called")
    assert row.quiet
    assert "passed on" not in q.coverage.text()


def test_a_report_counts_what_ran_too() -> None:
    records = site_records(_calibrated().coverage)
    assert sum(site.ran for site in records) == 5
    assert len(records) == 5


def _mlp(**options: Any) -> Quantizer:
    torch.manual_seed(0)
    return make_calibrated(Mlp().eval(), [torch.randn(64, 32) for _ in range(2)], **{"backend": "tensorrt", **options})


def _line(text: str, site: str, operand: str) -> list[str]:
    """The words of an operand's line, below the line of its site."""
    lines = text.splitlines()
    below = lines[lines.index(site) + 1 :]
    return next(line.split() for line in below if line.split()[:1] == [operand])


def test_formats_and_granularities() -> None:
    q = _mlp(formats=[{"names": ["down"], "activations": "float", "weights": "int4", "block_size": 16}])
    rows = {row.name: row for row in q.ranges}
    assert rows["up.forward.linear_0.input"].format == "int8"
    assert rows["up.forward.linear_0.input"].granularity == "tensor"
    assert rows["up.forward.linear_0.weight"].granularity == "64 channels"
    assert rows["down.forward.linear_0.weight"].format == "int4 /16"
    assert rows["down.forward.linear_0.weight"].granularity == "128 blocks"
    text = str(q.ranges)
    assert _line(text, "down.forward.linear_0", "weight")[1:5] == ["int4", "/16", "128", "blocks"]
    assert _line(text, "down.forward.linear_0", "input")[1:3] == ["float", "-"]


def test_a_zero_point_is_shown() -> None:
    torch.manual_seed(0)
    q = Quantizer(
        preset="plain", backend="onnxruntime", dtype="int8", formats=[{"activations": "uint8", "weights": "int8"}]
    )
    q.calibrate(Mlp().eval(), [torch.rand(64, 32) + 1])
    (row,) = (row for row in q.ranges if row.name == "up.forward.linear_0.input")
    assert row.format == "uint8 zp 0"


@pytest.mark.parametrize(
    ("activations", "shown"),
    [({"calibrator": "auto"}, True), ({"calibrator": "percentile", "percentile": [99, 99.9]}, True), ({}, False)],
    ids=["auto", "percentiles", "one"],
)
def test_the_estimate_is_shown_where_there_was_a_choice(activations: dict[str, Any], shown: bool) -> None:
    q = _mlp(activations=activations)
    rows = {row.name: row for row in q.ranges}
    chosen = rows["up.forward.linear_0.input"].estimate
    assert (chosen is not None) is shown
    assert ("estimate" in str(q.ranges)) is shown
    assert (">estimate<" in q.ranges._repr_html_()) is shown
    if chosen is not None:
        assert str(q.ranges).count(chosen) >= 1
        assert rows["up.forward.linear_0.weight"].estimate is None


def test_a_loaded_quantizer_shows_the_same_table(tmp_path: Path) -> None:
    q = _mlp(activations={"calibrator": "auto"})
    q.save(tmp_path / "saved")
    assert str(Quantizer.load(tmp_path / "saved").ranges) == str(q.ranges)


def test_long_names_leave_room_for_every_column() -> None:
    operands = tuple(
        OperandPlan(
            name=name,
            role="activation",
            quantized=True,
            amax=torch.tensor([123.456]),
            scale=torch.tensor([0.000123456]),
            zero_point=128,
            dtype="uint8",
            minimum=-123456.789,
            maximum=-0.000123456,
            sqnr_db=-12.34,
            clipped=0.000123,
            estimate="percentile 99.999",
        )
        for name in ("softmax", "value")
    )
    plan = {
        name: SitePlan(
            name=name, operation="matmul", kind="matmul", host_type="A", file="a.py", line=1, quantized=True, reason="",
            operands=operands,
        )
        for name in (f"{'layer.' * 16}{number}.matmul_0" for number in range(30))
    }  # fmt: skip
    lines = str(Ranges(plan)).splitlines()
    assert lines[0].startswith("60 ranges, 60 in use")
    assert all(len(line) <= 120 for line in lines)
    # 40 operands of 20 sites, and no line of them broken.
    assert sum(line.startswith("layer.") for line in lines) == 20
    assert [line.split()[0] for line in lines if line.startswith("  ")] == ["operand", *["softmax", "value"] * 20]
    assert all(line.endswith("percentile 99.999") for line in lines if line.startswith("  value"))
    assert lines[-1].startswith("Rows not shown: 20; print .text() for all rows")


def test_no_ranges() -> None:
    assert str(Ranges({})).startswith("0 ranges, 0 in use")


DATA = [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


@pytest.fixture
def measurable() -> tuple[Quantizer, Net]:
    torch.manual_seed(0)
    net = Net().eval()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(net, DATA)
    return q, net


def test_one_line_for_each_layer(measurable: tuple[Quantizer, Net]) -> None:
    layers = measurable[0].layers
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
    assert not len(layers.fallback_costs)


def test_sensitivity_and_times_when_they_were_measured(measurable: tuple[Quantizer, Net]) -> None:
    q, net = measurable
    amp = q.amp(net)
    assert {row.error for row in q.layers} == {None}
    for batch in DATA:
        amp(batch)
    assert all(row.error is not None for row in q.layers)
    names = {operand.group for site in q.plan.values() for operand in site.operands if operand.group}
    groups = {name: GroupLatency(group=name, low_us=10.0, float_us=25.0) for name in names}
    timed = q.layers.timed(
        LatencyCosts(groups=groups, low_us=60.0, float_us=150.0, where="openvino, 8 x 128, 1 thread")
    )
    assert timed.title() == "5 of 5 layers quantized; times: openvino, 8 x 128, 1 thread"
    assert {row.low_us for row in timed} == {10.0, 20.0}
    assert {row.cost_us for row in timed.fallback_costs} == {15.0}
    text, page = timed.text(), timed._repr_html_()
    assert "gain and cost of keeping each group in float" in text
    assert page.count("<table>") == 2
    q.fallback(amp, num=1)
    assert [row.in_float for row in q.layers.fallback_costs].count(True) == 1
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


@pytest.fixture(scope="module")
def quantizer() -> Quantizer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)).eval()
    made = Quantizer(backend="openvino")
    made.calibrate(model, torch.rand(16, 3, 8, 8), progress=False)
    return made


@pytest.mark.parametrize(("columns", "widest"), [(80, 80), (100, 100), (300, 120)])
def test_tables_are_as_wide_as_the_terminal(
    quantizer: Quantizer, columns: int, widest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    for view in (quantizer.coverage, quantizer.layers):
        lines = repr(view).splitlines()
        assert max(map(len, lines)) <= widest
        assert not any("…" in line for line in lines)
    assert "not smoothed" not in repr(quantizer.ranges) or ": the output" not in repr(quantizer.ranges)


def test_what_has_no_room_is_not_cut(quantizer: Quantizer, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = repr(quantizer.ranges)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((30, 20)))
    monkeypatch.delenv("COLUMNS", raising=False)
    assert repr(quantizer.ranges) == wide
    assert max(map(len, wide.splitlines())) <= 120


def test_a_picture_is_written_as_a_whole(tmp_path: Path) -> None:
    Picture("<svg></svg>").save(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text() == "<svg></svg>"
    with pytest.raises(QuantizerError, match="does not exist; create it first"):
        Picture("<svg></svg>").save(tmp_path / "none" / "a.svg")
    assert [path.name for path in tmp_path.iterdir()] == ["a.svg"]
