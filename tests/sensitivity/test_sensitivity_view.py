"""``q.sensitivity``: the ranking and the search as tables and pictures, with words that are true of the measure."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from helpers import Mlp
from torch import nn

from quantizer import Quantizer
from quantizer.algorithms.sensitivity import Evaluation, Fallback, GroupSensitivity
from quantizer.algorithms.sensitivity.session import Sensitivity
from quantizer.errors import SensitivityError

SVG = "{http://www.w3.org/2000/svg}"
RANKING = [
    GroupSensitivity(
        rank=1,
        group="layer.1.forward.add_0.lhs",
        kind="residual_add",
        error=0.25,
        sites=("layer.1.forward.add_0",),
        block="layer.1",
        position=1,
        parts=("layer.1.forward.add_0.lhs",),
        activations=1,
    ),
    GroupSensitivity(
        rank=2,
        group="layer.0.{a,b}.forward.linear_0",
        kind="linear",
        error=1.25e-5,
        sites=("layer.0.a.forward.linear_0", "layer.0.b.forward.linear_0"),
        block="layer.0",
        position=0,
        parts=("layer.0.{a,b}.forward.linear_0",),
        activations=2,
        multiply_adds=1_000_341_504,
    ),
]
SEARCH = Fallback(
    groups=("layer.1.forward.add_0.lhs",),
    asked="max_drop=0.01",
    ranks=(1,),
    evaluations=(
        Evaluation(groups=(), score=0.5, drop=0.4, cost=0.0),
        Evaluation(groups=("layer.1.forward.add_0.lhs",), score=0.895, drop=0.005, cost=1.0),
    ),
    float_score=0.9,
    max_drop=0.01,
)


class Stack(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mlp(), Mlp()])
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _measured(**options: Any) -> tuple[Quantizer, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, x = Stack().eval(), torch.randn(16, 32)
    quantizer = Quantizer(preset="plain", backend="openvino", sites={"residual_add": True})
    quantizer.calibrate(model, [x])
    amp = quantizer.amp(model, **options)
    amp(x)
    return quantizer, amp, x


def test_the_ranking_as_text() -> None:
    assert Sensitivity(RANKING, SEARCH, "local").text() == "\n".join(
        [
            "2 groups, one quantized at a time, by relative error at the outputs of its sites",
            "                                                    relative",
            "                                                       error",
            "                                                          at                         kept",
            "                                                         its               multiply  in",
            "rank  group                           kind             sites  activations      adds  float",
            "─" * 90,
            "   1  layer.1.forward.add_0.lhs       residual_add     0.250            1         0  yes",
            "   2  layer.0.{a,b}.forward.linear_0  linear        1.25e-05            2    1.00 G",
        ]
    )


def test_no_word_of_the_ranking_is_cut_in_a_terminal() -> None:
    name = "encoder.layer.5.attention.self.eager_attention_forward.{matmul_0,matmul_1}"
    entry = GroupSensitivity(rank=1, group=name, kind="residual_add", error=1.74e-4, sites=(name,), multiply_adds=10**9)
    for measure in ("gradient", "loss", "output", "local", "metric"):
        text = Sensitivity([entry], None, measure).text()
        assert max(map(len, text.splitlines())) <= 120
        words = (
            "residual_add",
            "eager_attention_forward. ",
            "{matmul_0,matmul_1}",
            "activations",
            "multiply",
            "1.00 G",
        )
        assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(
    ("measure", "column"),
    [
        ("gradient", "estimated divergence"),
        ("loss", "estimated effect on the loss"),
        ("output", "divergence of the output"),
        ("local", "relative error at its sites"),
        ("metric", "drop of the metric"),
    ],
)
def test_the_column_is_true_of_the_measure(measure: str, column: str) -> None:
    options: dict[str, Any] = {"measure": measure}
    if measure == "loss":
        options = {"loss": lambda output: output.square().mean()}
    if measure == "metric":
        options["metric"] = lambda model: float(model(torch.ones(1, 32)).sum().detach())
    quantizer, _, _ = _measured(**options)
    view = quantizer.sensitivity
    assert view.measure == measure
    assert f">{column}</th>" in view._repr_html_()
    for picture in (view.plot(), view.heatmap()):
        assert f"{column[0].upper()}{column[1:]}, one group quantized at a time</text>" in picture.svg


def test_blocks_are_those_of_the_modules_in_the_model_s_order() -> None:
    quantizer, amp, _ = _measured()
    rows = sorted(quantizer.sensitivity, key=lambda row: row.position)
    assert [row.position for row in rows] == list(range(len(rows)))
    assert list(dict.fromkeys(row.block for row in rows)) == ["layers.0", "layers.1", "head"]
    assert {row.group for row in rows if row.block == "head"} == {"head.forward.linear_0"}
    linear = next(row for row in rows if row.group == "head.forward.linear_0")
    assert (linear.activations, linear.multiply_adds) == (1, 16 * 32 * 4)
    quantizer.fallback(amp, names=["layers.0.forward.add_0.lhs"])
    root = ElementTree.fromstring(quantizer.sensitivity.heatmap().svg)
    titles = [title.text or "" for title in root.iter(f"{SVG}title")]
    marked = [title.partition(":")[0] for title in titles if "kept in float" in title]
    assert marked == ["layers.0, residual_add lhs"]


def test_the_root_is_a_block() -> None:
    model, x = Mlp().eval(), torch.randn(8, 32)
    quantizer = Quantizer(preset="plain", backend="openvino", sites={"residual_add": True})
    quantizer.calibrate(model, [x])
    quantizer.amp(model)(x)
    blocks = {row.group: row.block for row in quantizer.sensitivity}
    assert blocks["forward.add_0.lhs"] == "(the model)"
    assert blocks["up.forward.linear_0"] == "up"


def test_a_search_as_a_table_and_a_picture(tmp_path: Path) -> None:
    view = Sensitivity(RANKING, SEARCH, "gradient")
    assert view.search.text().splitlines() == [
        "2 evaluations; the float model scores 0.9000; a drop of 0.01 is allowed; with 1 group",
        "kept in float it scores 0.8950; met: max_drop 0.01; drop of the plan on the tuning",
        "samples 0.0050",
        "evaluation  groups in float  cost   score     drop  in budget  Pareto-optimal  chosen",
        "─" * 85,
        "         1                0     0  0.5000    0.400  no         yes",
        "         2                1     1  0.8950  0.00500  yes        yes             yes",
    ]
    assert view.search._repr_html_().startswith("<svg")
    assert "<table>" in view.search._repr_html_()
    view.pareto().save(str(tmp_path / "front.svg"))
    assert ElementTree.parse(tmp_path / "front.svg").getroot().attrib["aria-label"] == (
        "Drop of the metric against the cost of groups in float: 2 evaluations, 2 of them Pareto-optimal; "
        "the budget is a drop of 0.0100"
    )


def test_without_a_search_there_is_no_front() -> None:
    quantizer, amp, _ = _measured()
    with pytest.raises(SensitivityError, match=r"no search was run: nothing falls back; call fallback\(amp, max_drop="):
        quantizer.sensitivity.pareto()
    quantizer.fallback(amp, num=1)
    with pytest.raises(SensitivityError, match=r"no search was run: fallback\(num=1\) does not search"):
        _ = quantizer.sensitivity.search


def test_the_front_of_a_search_of_a_quantizer() -> None:
    quantizer, amp, x = _measured()
    with torch.no_grad():
        expected = quantizer.proxy(quantizer._session._model())(x)  # type: ignore[misc]

    def score(model: nn.Module) -> float:
        return -float((model(x) - expected).square().mean())

    found = quantizer.fallback(amp, max_drop=1e-5, metric=score)
    search = quantizer.sensitivity.search
    assert (search.fallback.max_drop, search.fallback.float_score) == (1e-5, 0.0)
    assert [row.drop for row in search] == [entry.drop for entry in found.evaluations]
    assert sum(row.pareto_optimal for row in search) == len(found.pareto_front())
    for row in search:
        assert row.chosen == (set(row.groups) == set(found.groups))
