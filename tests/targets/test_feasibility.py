"""What is told of an engine's options, with the place that a caller spells."""

from __future__ import annotations

import pytest

from quantizer.plan.targets import profile
from quantizer.plan.targets.base import engine_problems


def test_each_problem_names_its_setting() -> None:
    found = list(
        engine_problems([profile("openvino")], capabilities=["sm89"], precision="nonsense", strip_weights=True)
    )
    assert [problem.place for problem in found] == ["compute_capability", "inference_precision", "strip_weights"]
    assert found[1].text == profile("openvino").precision_reason("nonsense")


def test_each_capability_is_looked_at_for_each_target() -> None:
    targets = [profile("openvino"), profile("onnxruntime")]
    texts = [problem.text for problem in engine_problems(targets, capabilities=["sm80", "sm89"])]
    assert [text.split()[0] for text in texts] == ["openvino", "onnxruntime"] * 2
    assert ["'sm80'" in text for text in texts] == [True, True, False, False]


@pytest.mark.parametrize(("names", "count"), [(("onnxruntime",), 1), (("openvino", "onnxruntime"), 0), ((), 0)])
def test_one_target_that_can_be_told_a_precision_is_enough(names: tuple[str, ...], count: int) -> None:
    assert len(list(engine_problems([profile(name) for name in names], precision="bfloat16"))) == count
