"""The coverage of a plain convolutional net: what counts is what ran."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.common.records import Site
from quantizer.plan.coverage import Coverage
from quantizer.runs.plan_records import site_records


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
    assert title.endswith("; print .all for 6 sites that never ran")
    assert "never ran in calibration" not in text
    assert "stem.0._conv_forward.conv2d_0" not in text
    assert len(coverage.shown) == 5
    assert len(coverage) == 11


def test_all_shows_the_rest() -> None:
    coverage = _calibrated().coverage
    whole = coverage.all
    assert isinstance(whole, Coverage)
    assert "print .all" not in whole.title()
    assert whole.text().count("never ran in calibration") == 6
    assert "stem.0._conv_forward.conv2d_0" in whole.text()
    assert len(whole.shown) == len(whole) == len(coverage)
    assert "never ran" in whole._repr_html_()
    assert whole.escaped is coverage.escaped
    # The first object is as it was.
    assert len(coverage.shown) == 5


def test_a_branch_that_never_ran_does_not_count_where_a_rule_decides_either() -> None:
    coverage = _calibrated(sites={"residual_add": False}, exclude={"names": ["stem"]}).coverage
    assert coverage.by_kind() == {"conv": (2, 3), "linear": (1, 1), "residual_add": (0, 1)}
    reasons = {row.name: row.reason for row in coverage}
    assert reasons["stem.0._conv_forward.conv2d_1"] == "excluded by rule"
    assert reasons["stem.0._conv_forward.conv2d_0"] == "never ran in calibration"


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
    assert q.coverage.title().endswith("; print .all for 1 addition that joins no branches")


def test_the_title_counts_tables_that_stay_float() -> None:
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 8)).eval(), [torch.arange(8)])
    assert q.coverage.title().endswith(
        "; print .all for 1 addition that joins no branches and 1 table that stays float"
    )
    assert "a table of 128 numbers" in q.coverage.all.text()


def test_a_place_is_a_file_and_a_line() -> None:
    coverage = _calibrated().coverage
    places = {row.name: row.place for row in coverage}
    assert places["block.forward.add_0"].startswith("test_coverage_view.py:")
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


@pytest.mark.promise("so what it computes stays in float; to quantize it, call it in the code of a module")
def test_a_function_that_is_passed_on_says_what_to_do() -> None:
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(PassesOn().eval(), [torch.randn(4, 8)])
    row = next(row for row in q.coverage if row.kind == "matmul")
    assert row.reason == (
        "attend() is passed on as a value here instead of being called, so what it computes stays in float; to "
        "quantize it, call it in the code of a module"
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
    assert len(records) == 11
