"""An algorithm from outside the package: the one of the guide."""

from __future__ import annotations

from pathlib import Path

import pytest
from outside import run_outside, write_guide_module

PRELUDE = """
import pytest
import torch

from quantizer import Quantizer

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16)).eval()
data = [torch.randn(256, 16) for _ in range(4)]

def calibrated(calibrator="max"):
    q = Quantizer(preset="plain", backend="openvino", activations={"calibrator": calibrator})
    q.calibrate(net, data)
    return q

def ranges(q):
    return [entry.operands[0].largest_amax for entry in q.plan.values()]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the guide's module lies."""
    write_guide_module(tmp_path, "add-an-algorithm.md", "common_clipping")
    return tmp_path


def test_its_choice_is_planned_saved_and_loaded(folder: Path) -> None:
    run_outside(
        folder,
        PRELUDE
        + """
before = ranges(calibrated())
import common_clipping

q = calibrated()
(factor,) = {round(new / old, 6) for new, old in zip(ranges(q), before, strict=True)}
assert factor in common_clipping.FACTORS[1:], factor
assert all(operand.estimate == f"{factor:g} of max" for entry in q.plan.values() for operand in entry.operands[:1])

def error(model):
    return sum(float((model(x) - net(x)).square().sum() / net(x).square().sum()) for x in data)

# The factor with the least error, by quantizers that are given each range.
chosen = error(q.quantize(net))
errors = {}
for other in common_clipping.FACTORS:
    common_clipping.algorithms._entries["common-clipping"] = common_clipping.Algorithm(
        wanted=lambda settings: True,
        run=lambda plan, work: common_clipping.clip(
            {record.range for site in work.observed.records.values() for record in site.operands.values()} - {None},
            other,
        )
        or work.plan(),
    )
    errors[other] = error(calibrated().quantize(net))
assert errors[factor] == chosen == min(errors.values()), errors
q.save("saved")
""",
    )
    run_outside(
        folder,
        PRELUDE
        + """
again = Quantizer.load("saved")
assert [operand.estimate for entry in again.plan.values() for operand in entry.operands[:1]] == 2 * [
    again.plan["0.forward.linear_0"].operands[0].estimate
]
assert again.plan["0.forward.linear_0"].operands[0].estimate.endswith(" of max")
""",
    )


def test_only_where_it_is_wanted(folder: Path) -> None:
    run_outside(
        folder,
        PRELUDE
        + """
before = ranges(calibrated("mse"))
import common_clipping

assert ranges(calibrated("mse")) == before
""",
    )


def test_its_errors_name_it(folder: Path) -> None:
    run_outside(
        folder,
        PRELUDE
        + """
from quantizer.algorithms.algorithm import Algorithm, algorithms
from quantizer.errors import CalibrationError

late = calibrated()
import common_clipping

with pytest.raises(ValueError, match="algorithm 'common-clipping' is registered twice"):
    algorithms.add("common-clipping")(Algorithm(wanted=lambda settings: True, run=common_clipping.choose))
with pytest.raises(ValueError, match="algorithm 'other' is an object of function, which has no wanted, run"):
    algorithms.add("other")(common_clipping.choose)
with pytest.raises(ValueError, match="algorithm 'other' is the class Algorithm; expected an object"):
    algorithms.add("other")(Algorithm)
with pytest.raises(CalibrationError, match="no batches were stored for the algorithms; add .* before calibration"):
    late.plan

def fails(plan, work):
    raise KeyError("boom")

algorithms.add("failing")(Algorithm(wanted=lambda settings: True, run=fails))
with pytest.raises(KeyError, match="boom") as caught:
    calibrated().plan
assert caught.value.__notes__ == ["in algorithm 'failing'"]

algorithms._entries["failing"] = Algorithm(wanted=lambda settings: True, run=lambda plan, work: None)
with pytest.raises(CalibrationError, match="algorithm 'failing': run.. returned None; expected a plan"):
    calibrated().plan
""",
    )
