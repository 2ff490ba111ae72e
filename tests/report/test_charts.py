"""Rankings, scores of a search and training curves as pictures: well formed, escaped, and true to their values."""

from __future__ import annotations

import dataclasses
import itertools
import math
from xml.etree import ElementTree

import pytest
from report_samples import sample_record, sample_search, sample_training

from quantizer.report.charts.plots import loss_svg, pareto_svg, score_svg
from quantizer.report.charts.rankings import sensitivity_bars, sensitivity_heatmap
from quantizer.report.text import MISSING, amount, error, error_words
from quantizer.utils.records import Evaluation, FallbackRecord, GroupSensitivity

EVIL = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&"
SVG = "{http://www.w3.org/2000/svg}"


def row(block: str, kind: str, value: float, **changes: object) -> GroupSensitivity:
    """A group of one site in ``block``."""
    name = f"{block}.forward.{kind}_0"
    values: dict[str, object] = {"group": name, "kind": kind, "block": block, "sites": (name,), "error": value}
    return GroupSensitivity(**{**values, "rank": 1, **changes})  # type: ignore[arg-type]


def add(block: str, operand: str, value: float, **changes: object) -> GroupSensitivity:
    """An operand of a residual add in ``block``."""
    site = f"{block}.forward.add_0"
    return row(block, "residual_add", value, group=f"{site}.{operand}", sites=(site,), **changes)


def titles(root: ElementTree.Element) -> list[str]:
    """The tooltips, in order."""
    return [title.text or "" for title in root.iter(f"{SVG}title")]


def texts(root: ElementTree.Element, css: str) -> list[str]:
    """The lines of text with this class."""
    return ["".join(line.itertext()) for line in root.iter(f"{SVG}text") if css in line.attrib["class"].split()]


RANKING = [
    row("layer.0", "linear", 0.01, position=0),
    row("layer.0", "linear", 0.03, position=1, group="layer.0.down", sites=("layer.0.down",), fallback=True),
    add("layer.0", "lhs", 0.4, position=2, fallback=True),
    row("layer.1", "linear", 0.0, position=3),
    row("layer.1", "matmul", 0.004, position=4),
    add("layer.1", "rhs", 0.00004, position=5),
]


# -- bars ----------------------------------------------------------------------------------------------------------


def test_bars_are_ranked_well_formed_and_limited() -> None:
    rows = sample_record().sensitivity
    root = ElementTree.fromstring(sensitivity_bars(rows[::-1], measure="gradient", limit=5))
    bars = [title for title in titles(root) if title.startswith("encoder.layer.") and ": encoder" not in title]
    assert len(bars) == 5
    assert bars[0] == f"{rows[0].group} ({rows[0].kind}, float): 0.0767"
    assert "5 of 40 groups" in root.attrib["aria-label"]
    assert root.attrib["aria-label"].startswith("Divergence of the output (Kullback-Leibler of logits")


def test_bars_tell_kind_and_block_apart() -> None:
    root = ElementTree.fromstring(sensitivity_bars(RANKING, measure="local"))
    lane, bars = (child for child in root if child.tag == f"{SVG}svg" and child.attrib["width"].endswith("%"))
    marks = [mark.attrib for mark in lane if mark.attrib.get("class") != "qz-track"]
    # layer.0, layer.0, layer.0, layer.1, ..: by error; the colours are those of the kinds.
    assert [mark["x"] for mark in marks] == ["0.00%", "0.00%", "0.00%", "50.00%", "50.00%", "50.00%"]
    assert len({mark["fill"] for mark in marks}) == 3
    assert marks[1]["fill"] == marks[2]["fill"] == marks[5]["fill"]
    assert [span.text for span in bars.iter(f"{SVG}tspan")][:2] == ["layer.0", "layer.0"]
    assert "Relative error at its sites, one group quantized at a time" in texts(root, "qz-value")
    assert "Marks on the left: block, from layer.0 to layer.1" in texts(root, "qz-wide")
    assert texts(bars, "qz-wide")[:2] == ["layer.0.forward.add_0.lhs", "residual_add, float  0.400"]


def test_one_block_needs_no_lane() -> None:
    root = ElementTree.fromstring(sensitivity_bars(RANKING[:3], measure=None))
    assert not any("Marks" in line for line in texts(root, "qz-value"))
    assert "Error, one group quantized at a time" in texts(root, "qz-value")


# -- the heat map --------------------------------------------------------------------------------------------------


def test_a_heat_map_sums_by_block_and_kind() -> None:
    root = ElementTree.fromstring(sensitivity_heatmap(RANKING, measure="output"))
    assert [title for title in titles(root) if ":" in title] == [
        "layer.0, linear: 0.0400, 1 of 2 kept in float\nlayer.0.forward.linear_0: 0.0100\nlayer.0.down: 0.0300, float",
        "layer.0, residual_add lhs: 0.400, 1 of 1 kept in float\nlayer.0.forward.add_0.lhs: 0.400, float",
        "layer.1, linear: 0\nlayer.1.forward.linear_0: 0",
        "layer.1, matmul: 0.00400\nlayer.1.forward.matmul_0: 0.00400",
        "layer.1, residual_add rhs: 4.00e-05\nlayer.1.forward.add_0.rhs: 4.00e-05",
    ]
    cells = [box.attrib for box in root.iter(f"{SVG}rect") if box.attrib.get("fill") == "#d55e00"]
    strengths = [float(cell["fill-opacity"]) for cell in cells]
    # 0.04, 0.4, 0, 0.004, 4e-5: 0.4 and three decades below it are the ends of the scale; then its five swatches.
    assert strengths[:5] == pytest.approx([0.06 + 0.74 * 2 / 3, 0.8, 0.0, 0.06 + 0.74 / 3, 0.06], abs=0.001)
    assert strengths[5:] == pytest.approx([0.06, 0.245, 0.43, 0.615, 0.8], abs=0.001)
    assert [(cell.get("stroke-dasharray"), cell.get("stroke")) for cell in cells[:3]] == [
        ("4 3", "currentColor"),
        (None, "currentColor"),
        (None, None),
    ]
    lines = texts(root, "qz-value")
    assert "Divergence of the output, one group quantized at a time" in lines
    for words in ("kept in float", "some kept in float", "≤ 0.000400", "99%", "<1%"):
        assert words in lines
    assert "largest layer.0, residual_add lhs, 0.400" in root.attrib["aria-label"]


def test_columns_and_blocks_have_one_order() -> None:
    expected = sensitivity_heatmap(RANKING, measure=None)
    bars = sensitivity_bars(RANKING, measure=None)
    for rows in itertools.islice(itertools.permutations(RANKING), 0, None, 97):
        assert sensitivity_heatmap(rows, measure=None) == expected
        assert sensitivity_bars(rows, measure=None) == bars
    root = ElementTree.fromstring(expected)
    assert texts(root, "qz-narrow")[:7] == ["linear", "matmul", "resid.", "lhs", "resid.", "rhs", "layer.0"]


def test_shares_are_of_what_is_finite() -> None:
    rows = [*RANKING, row("layer.2", "conv", math.inf, position=6), row("layer.3", "matmul", -0.1, position=7)]
    lines = texts(ElementTree.fromstring(sensitivity_heatmap(rows, measure=None)), "qz-value")
    at = lines.index("share")
    assert lines[at + 1 : at + 5] == ["99%", "<1%", MISSING, "0%"]
    # Below, by kind: conv, linear, matmul, the two operands of the adds.
    assert lines[at + 5 : at + 11] == ["share", MISSING, "9%", "<1%", "90%", "<1%"]


def test_groups_of_several_kinds_have_a_column() -> None:
    rows = [row(name, "linear, matmul", 0.1, group=name, position=at) for at, name in enumerate(("a.0", "a.1"))]
    root = ElementTree.fromstring(sensitivity_heatmap(rows, measure="gradient"))
    assert titles(root)[0] == "several kinds"
    assert "a.0, several kinds: 0.100\na.0: 0.100" in titles(root)


def test_long_names_that_end_alike_are_told_apart() -> None:
    rows = [
        row(f"{name}.transformer.layers.0", "linear", 0.1, position=at) for at, name in enumerate(("text", "vision"))
    ]
    root = ElementTree.fromstring(sensitivity_heatmap(rows, measure="gradient"))
    assert texts(root, "qz-narrow")[1:][:2] == ["text.…ers.0", "visio…ers.0"]


# -- both ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", [sensitivity_bars, sensitivity_heatmap], ids=["bars", "heat map"])
@pytest.mark.parametrize(
    "errors",
    [[], [0.0], [math.nan, 0.5], [math.inf, 0.5], [math.inf, -math.inf], [-1.0], [1e300, 1e-300], [math.nan]],
    ids=str,
)
def test_odd_errors_and_names(draw: object, errors: list[float]) -> None:
    rows = [row(EVIL, EVIL, value, group=f"{EVIL}{n}", sites=(EVIL,), position=n) for n, value in enumerate(errors)]
    for rows_drawn in (rows, [dataclasses.replace(entry, fallback=True) for entry in rows]):
        svg = draw(rows_drawn, measure=EVIL)  # type: ignore[operator]
        root = ElementTree.fromstring(svg)
        places = [value for part in root.iter(f"{SVG}rect") for name, value in part.attrib.items() if name != "class"]
        assert not any(word in value for value in places for word in ("nan", "inf"))
        assert root.find(f".//{SVG}script") is None
        assert root.find(f".//{SVG}img") is None
    if not errors:
        assert texts(root, "qz-name") == ["Sensitivity was not measured."]


@pytest.mark.parametrize("measure", ["gradient", "loss", "output", "local", "metric"])
def test_each_measure_has_words_of_its_own(measure: str) -> None:
    others = {error_words(name) for name in ("gradient", "loss", "output", "local", "metric", None) if name != measure}
    assert error_words(measure) not in others
    assert error_words(measure).heading.startswith(error_words(measure).phrase[0].upper())


# -- the front of a search -----------------------------------------------------------------------------------------


def test_the_front_of_a_search() -> None:
    root = ElementTree.fromstring(pareto_svg(sample_search()))
    assert titles(root) == [
        "2 groups kept in float, cost 2: score 0.8500, drop 0.0173",
        "0 groups kept in float, cost 0: score 0.8000, drop 0.0673, Pareto-optimal",
        "3 groups kept in float, cost 3: score 0.8690, drop -0.00170, Pareto-optimal",
        "2 groups kept in float, cost 2: score 0.8650, drop 0.00230, Pareto-optimal, chosen",
    ]
    circles = [circle.attrib for circle in root.iter(f"{SVG}circle") if circle.attrib["cx"].endswith("%")]
    assert [circle["cx"] for circle in circles] == ["70.33%", "17.00%", "97.00%", "70.33%", "70.33%"]
    heights = [float(circle["cy"]) for circle in circles]
    assert heights[1] < heights[0] < heights[3] == heights[4] < heights[2]
    budget = next(
        line for line in root.iter(f"{SVG}line") if line.attrib["x1"] == "17%" and "stroke-dasharray" in line.attrib
    )
    assert heights[0] < float(budget.attrib["y1"]) < heights[3]
    front = [line.attrib for line in root.iter(f"{SVG}line") if line.attrib["x1"].count(".")]
    assert [(line["x1"], line["x2"]) for line in front] == [("17.00%", "70.33%"), ("70.33%", "97.00%")]
    lines = texts(root, "qz-value")
    for words in ("budget: drop 0.00500", "chosen", "drop", "0.00500", "cost of groups in float"):
        assert words in lines
    assert [line for line in lines if line in ("0", "1", "2", "3")].count("3") == 1
    assert pareto_svg(sample_search()) == pareto_svg(sample_search())


@pytest.mark.parametrize("drops", [[0.0], [-1.0, -2.0], [1e-12, 1e6], [math.nan, 0.1], [math.inf, 0.1]], ids=str)
@pytest.mark.parametrize("budget", [0.0, 0.01, None])
def test_odd_searches(drops: list[float], budget: float | None) -> None:
    found = tuple(
        Evaluation(groups=(EVIL,), score=-drop, drop=drop, cost=0.7 * n, pareto_optimal=True)
        for n, drop in enumerate(drops)
    )
    root = ElementTree.fromstring(
        pareto_svg(FallbackRecord(groups=(EVIL,), reason=EVIL, evaluations=found, max_drop=budget))
    )
    heights = [float(circle.attrib["cy"]) for circle in root.iter(f"{SVG}circle")]
    assert all(0 <= height <= 220 for height in heights)
    assert "chosen" not in texts(root, "qz-value")


def test_no_search_is_a_sentence() -> None:
    none = Evaluation(groups=(), score=math.nan, drop=math.nan, cost=0.0)
    for found in ((), (none,)):
        root = ElementTree.fromstring(pareto_svg(FallbackRecord(groups=(), reason="num=0", evaluations=found)))
        assert texts(root, "qz-name") == ["There was no search."]


# -- numbers -------------------------------------------------------------------------------------------------------


def test_numbers_of_a_picture() -> None:
    values = (0.0, 0.041, 1.74e-5, -2e-6, 12.5, math.nan)
    assert [error(value) for value in values] == ["0", "0.0410", "1.74e-05", "-2.00e-06", "12.5", "not a number"]
    assert [amount(value) for value in (0.0, 34.0, 17_375_232, 1e9, 2.5e12, 0.25)] == [
        *("0", "34", "17.4 M", "1.00 G", "2.50 T", "0.250")
    ]


# -- the training ------------------------------------------------------------------------------------------------------


def test_the_scores_stand_beside_float_and_ptq() -> None:
    picture = ElementTree.fromstring(score_svg(sample_training()))
    words = "".join(picture.itertext())
    for part in ("float: 0.8739", "PTQ: 0.8394", "restored: 0.8721 after 36 steps", "accuracy"):
        assert part in words
    marks = [circle for circle in picture.iter(f"{SVG}circle") if circle.get("r") == "4.5"]
    heights = [float(circle.get("cy", "nan")) for circle in marks]
    assert len(marks) == 5
    assert heights.index(min(heights)) == 3
    assert heights.index(max(heights)) == 0
    assert picture.get("aria-label", "").startswith("accuracy on the tuning samples over the training: 0.8394 before")


def test_a_long_curve_is_drawn_as_means() -> None:
    training = dataclasses.replace(
        sample_training(), planned_steps=4000, losses=tuple(1 / (1 + s) for s in range(4000))
    )
    picture = ElementTree.fromstring(loss_svg(training))
    lines = [line for line in picture.iter(f"{SVG}line") if line.get("stroke-linecap") == "round"]
    assert len(lines) == 199
    assert "from 0.1799" in picture.get("aria-label", "")
    assert math.isclose(sum(1 / (1 + s) for s in range(20)) / 20, 0.1799, abs_tol=1e-4)


def test_a_training_that_made_no_step() -> None:
    training = dataclasses.replace(sample_training(), losses=(), scores=sample_training().scores[:1])
    assert "There was no training step." in loss_svg(training)
    ElementTree.fromstring(score_svg(training))


@pytest.mark.parametrize("losses", [(1e308, -1e308), (math.inf, 1.0), (math.nan, 1.0)])
def test_losses_beyond_all_measure_are_drawn(losses: tuple[float, ...]) -> None:
    ElementTree.fromstring(loss_svg(dataclasses.replace(sample_training(), losses=losses)))
