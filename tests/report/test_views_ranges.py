"""``q.ranges`` as a table: every operand with its format, readable in a terminal of 120 columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from calibrated import make_calibrated
from helpers import Mlp

from quantizer import Quantizer
from quantizer.plan.coverage import Ranges
from quantizer.plan.site_plan import OperandPlan, SitePlan


def _calibrated(**options: Any) -> Quantizer:
    torch.manual_seed(0)
    return make_calibrated(Mlp().eval(), [torch.randn(64, 32) for _ in range(2)], **{"backend": "tensorrt", **options})


def _line(text: str, site: str, operand: str) -> list[str]:
    """The words of an operand's line, below the line of its site."""
    lines = text.splitlines()
    below = lines[lines.index(site) + 1 :]
    return next(line.split() for line in below if line.split()[:1] == [operand])


def test_formats_and_granularities() -> None:
    q = _calibrated(formats=[{"names": ["down"], "activations": "float", "weights": "int4", "block_size": 16}])
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
    q = _calibrated(activations=activations)
    rows = {row.name: row for row in q.ranges}
    chosen = rows["up.forward.linear_0.input"].estimate
    assert (chosen is not None) is shown
    assert ("estimate" in str(q.ranges)) is shown
    assert (">estimate<" in q.ranges._repr_html_()) is shown
    if chosen is not None:
        assert str(q.ranges).count(chosen) >= 1
        assert rows["up.forward.linear_0.weight"].estimate is None


def test_a_loaded_quantizer_shows_the_same_table(tmp_path: Path) -> None:
    q = _calibrated(activations={"calibrator": "auto"})
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
    assert lines[0].startswith("60 ranges, 60 of them used")
    assert all(len(line) <= 120 for line in lines)
    # 40 operands of 20 sites, and no line of them broken.
    assert sum(line.startswith("layer.") for line in lines) == 20
    assert [line.split()[0] for line in lines if line.startswith("  ")] == ["operand", *["softmax", "value"] * 20]
    assert all(line.endswith("percentile 99.999") for line in lines if line.startswith("  value"))
    assert lines[-1].startswith("Rows not shown: 20; print .text() to see all")


def test_no_ranges() -> None:
    assert str(Ranges({})).startswith("0 ranges, 0 of them used")
