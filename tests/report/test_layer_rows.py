"""One line for each layer, and for each group that may fall back: from sites, products, errors and times."""

from __future__ import annotations

import dataclasses
from typing import Any

from report_samples import bare_record, sample_record

from quantizer.report.page import html_from_record
from quantizer.report.tables import layers_table
from quantizer.utils.records import (
    Diagnosis,
    GroupSensitivity,
    GroupTime,
    Operand,
    Site,
    UnquantizedProduct,
    group_rows,
    layer_rows,
)


def _operand(name: str, group: str, role: str = "activation", **changes: Any) -> Operand:
    values: dict[str, Any] = {"quantized": True, "dtype": "uint8", "amax": 2.0, "sqnr_db": 30.0}
    return Operand(name=name, role=role, group=group, **{**values, **changes})


def _weight(group: str) -> Operand:
    return _operand("weight", group, "weight", dtype="int4", block_size=128, amax=9.0, sqnr_db=None)


def _site(name: str, kind: str, *operands: Operand, multiply_adds: int = 0, **changes: Any) -> Site:
    values: dict[str, Any] = {"host_type": "Linear", "file": "linear.py", "line": 1, "reason": "int8"}
    quantized = any(operand.quantized for operand in operands)
    known = {"quantized": quantized, "operands": operands, "multiply_adds": multiply_adds}
    return Site(name=name, kind=kind, **{**values, **known, **changes})


QUERY = _site("layer.0.query.forward.linear_0", "linear", _operand("input", "qk"), _weight("qk"), multiply_adds=30)
KEY = _site("layer.0.key.forward.linear_0", "linear", _operand("input", "qk"), _weight("qk"), multiply_adds=10)
ADD = _site(
    "layer.0.forward.add_1",
    "residual_add",
    _operand("lhs", "add.lhs", amax=3.0, sqnr_db=25.0),
    _operand("rhs", "add.rhs", dtype="int8", amax=5.0, sqnr_db=40.0),
)
NEVER = _site("layer.0.forward.linear_9", "linear", reason="never ran in calibration")
QUIET = _site("layer.0.forward.add_0", "residual_add", reason="the add broadcasts an operand")
OUTSIDE = UnquantizedProduct(
    path="lstm", operation="lstm", multiply_adds=60, share=0.6, reason="inside a compiled recurrent layer"
)
SITES = (QUERY, KEY, ADD, NEVER, QUIET)
RANKING = (
    GroupSensitivity(group="qk", kind="linear", error=0.5, rank=1),
    GroupSensitivity(group="adds", kind="residual_add", parts=("add.lhs", "add.rhs"), error=0.25, rank=2),
)
TIMES = (
    GroupTime(group="qk", low_us=40.0, float_us=80.0),
    GroupTime(group="add.lhs", low_us=6.0, float_us=2.0),
    GroupTime(group="add.rhs", low_us=3.0, float_us=2.0),
)


def test_a_line_for_each_layer_that_ran() -> None:
    rows = layer_rows(SITES, [OUTSIDE], RANKING, TIMES)
    assert [(row.layer, row.operation) for row in rows] == [
        ("layer.0.query", "linear"),
        ("layer.0.key", "linear"),
        ("layer.0", "add"),
        ("lstm", "lstm"),
    ]
    query, _, add, lstm = rows
    assert (query.activations, query.weights, query.amax, query.sqnr_db) == ("uint8", "int4 /128", 2.0, 30.0)
    # The largest range and the lowest SQNR of its activations.
    assert (add.activations, add.weights, add.amax, add.sqnr_db) == ("uint8, int8", None, 5.0, 25.0)
    assert (lstm.activations, lstm.weights, lstm.low_us) == ("float", None, None)
    assert [row.share for row in rows] == [0.3, 0.1, 0.0, 0.6]


def test_errors_are_of_the_group_and_times_are_split_by_work() -> None:
    query, key, add, lstm = layer_rows(SITES, [OUTSIDE], RANKING, TIMES)
    assert [row.error for row in (query, key, add, lstm)] == [0.5, 0.5, 0.25, None]
    assert (query.low_us, query.float_us) == (30.0, 60.0)
    assert (key.low_us, key.float_us) == (10.0, 20.0)
    assert (add.low_us, add.float_us) == (9.0, 4.0)
    # No time is lost, and none is made.
    assert sum(row.low_us or 0 for row in (query, key, add)) == sum(entry.low_us for entry in TIMES)


def test_several_of_one_kind_keep_their_numbers() -> None:
    twice = [_site(f"attention.attend.matmul_{at}", "matmul", _operand("lhs", "a")) for at in range(2)]
    rows = layer_rows([*twice, _site("forward.linear_0", "linear", _operand("input", "b"))])
    assert [(row.layer, row.operation) for row in rows] == [
        ("attention.attend", "matmul_0"),
        ("attention.attend", "matmul_1"),
        ("", "linear"),
    ]
    assert {row.share for row in rows} == {None}


def test_columns_without_a_value_are_left_out() -> None:
    titles = [column.title for column in layers_table(layer_rows(SITES), None).columns]
    assert titles == ["layer", "operation", "activations", "weights", "amax", "SQNR, dB", "share of multiply-adds"]
    whole = [column.title for column in layers_table(layer_rows(SITES, (), RANKING, TIMES), "gradient").columns]
    assert whole == [*titles[:6], "estimated divergence", titles[6], "quantized, us", "float, us"]
    assert layers_table((), None).columns == []


def test_what_groups_would_give_back_and_cost() -> None:
    rows = group_rows(SITES, RANKING, TIMES, [Diagnosis(group="qk", sqnr_db=12.5)])
    assert [row.group for row in rows] == ["qk", "adds"]
    first, second = rows
    assert (first.error, first.sqnr_alone_db, first.cost_us, first.in_float) == (0.5, 12.5, 40.0, False)
    # A coarse group has the times of its parts; here float is faster.
    assert (second.low_us, second.float_us, second.cost_us, second.sqnr_alone_db) == (9.0, 4.0, -5.0, None)


def test_a_group_in_float_says_so() -> None:
    floated = dataclasses.replace(KEY, quantized=False, operands=(_operand("input", "qk", quantized=False),))
    assert group_rows([floated], RANKING[:1])[0].in_float
    assert not group_rows([floated, QUERY], RANKING[:1])[0].in_float


def test_groups_with_times_alone_come_cheapest_first() -> None:
    rows = group_rows(SITES, (), TIMES)
    assert [(row.group, row.cost_us) for row in rows] == [("add.lhs", -4.0), ("add.rhs", -1.0), ("qk", 40.0)]
    assert group_rows(SITES) == ()


def test_the_page_has_the_layers_and_the_groups() -> None:
    record = dataclasses.replace(
        sample_record(), coverage=SITES, not_quantized=(OUTSIDE,), sensitivity=RANKING, measure="gradient", diagnoses=()
    )
    assert record.latency_fallback is not None
    latency_fallback = dataclasses.replace(record.latency_fallback, groups=TIMES)
    page = html_from_record(dataclasses.replace(record, latency_fallback=latency_fallback))
    section = page[page.index('<section id="layers">') : page.index('<section id="coverage">')]
    layers, _, groups = section.partition("Gain and cost of keeping groups in float")
    assert '<td class="qz-mono">layer.<wbr>0.<wbr>query</td>' in layers
    assert "linear_9" not in layers
    for title in ("Layer", "Activations", "SQNR, dB", "Estimated divergence", "Quantized, µs", "Float, µs"):
        assert f">{title}</th>" in layers
    assert ">Latency cost, µs</th>" in groups
    assert '<td class="qz-num" data-sort="40.0">40</td>' in groups
    # Both can be sorted and filtered, and are there without a script.
    assert section.count('<div class="sortable"><div class="qz-table"') == 2
    assert '<a href="#layers">Layers</a>' in page


def test_the_page_counts_what_ran() -> None:
    page = html_from_record(bare_record(coverage=SITES))
    assert "All 4 sites that ran</summary>" in page
    assert "1 site that never ran in calibration, and is not counted" in page
    tile = page[page.index("Multiply-adds in low precision") :][:120]
    assert "3 of 4 sites" in tile
    assert "run in low precision, in 3 of 4 sites" in page
    assert "never ran" not in page[: page.index("1 site that never ran")]
