"""The curves of a training, on the page and as pictures."""

from __future__ import annotations

import dataclasses
import math
from xml.etree import ElementTree

import pytest

pytest.importorskip("jinja2", reason="needs enginequant[report]")

from report_samples import sample_record, sample_training

from quantizer.report import html_from_record
from quantizer.report.charts.plots import loss_svg, score_svg

SVG = "{http://www.w3.org/2000/svg}"


def test_the_page_shows_the_training() -> None:
    page = html_from_record(sample_record())
    assert "48 of 60 steps, stopped: no better score in 1 evaluations; kept is what there was after 36 steps" in page
    assert '<a href="#training">Training</a>' in page
    assert "Training" not in html_from_record(dataclasses.replace(sample_record(), training=None)).partition("<pre>")[0]


def test_the_scores_stand_beside_float_and_ptq() -> None:
    picture = ElementTree.fromstring(score_svg(sample_training()))
    words = "".join(picture.itertext())
    for part in ("float: 0.8739", "PTQ: 0.8394", "kept: 0.8721 after 36 steps", "accuracy"):
        assert part in words
    marks = [circle for circle in picture.iter(f"{SVG}circle") if circle.get("r") == "4.5"]
    heights = [float(circle.get("cy", "nan")) for circle in marks]
    assert len(marks) == 5
    assert heights.index(min(heights)) == 3
    assert heights.index(max(heights)) == 0
    assert picture.get("aria-label", "").startswith("accuracy on the tuning rows over the training: 0.8394 before it")


def test_a_long_curve_is_drawn_as_means() -> None:
    training = dataclasses.replace(sample_training(), planned=4000, losses=tuple(1 / (1 + s) for s in range(4000)))
    picture = ElementTree.fromstring(loss_svg(training))
    lines = [line for line in picture.iter(f"{SVG}line") if line.get("stroke-linecap") == "round"]
    assert len(lines) == 199
    assert "from 0.1799" in picture.get("aria-label", "")
    assert math.isclose(sum(1 / (1 + s) for s in range(20)) / 20, 0.1799, abs_tol=1e-4)


def test_a_training_that_made_no_step() -> None:
    training = dataclasses.replace(sample_training(), losses=(), scores=sample_training().scores[:1])
    assert "No step was made." in loss_svg(training)
    ElementTree.fromstring(score_svg(training))


@pytest.mark.parametrize("losses", [(1e308, -1e308), (math.inf, 1.0), (math.nan, 1.0)])
def test_losses_beyond_all_measure_are_drawn(losses: tuple[float, ...]) -> None:
    ElementTree.fromstring(loss_svg(dataclasses.replace(sample_training(), losses=losses)))
