"""The choice to leave attention in float where rounding it costs more than everything else together.

The weights of a softmax over many tokens are small, and one of them near 1 sets the range of all: of a few hundred
tokens most then round to 0. No range mends that, and no factor can be moved elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from quantizer.calibration.output_error import OutputError
from quantizer.observe.statistics import Seen
from quantizer.plan.site_plan import Plan
from quantizer.reasons import ReasonCode

_GAIN_DB = 1.0
"""The gain in the output's SQNR from which on attention stays in float, after a search.

docs/explain/calibration.md shows the measurement behind both figures.
"""

_GAIN_UNSEARCHED_DB = 6.0
"""The same where nothing was searched: with ranges as they come, a smaller gain is often none on other rows."""


def leave_costly_attention(
    error: OutputError, observation: Seen, decided: Callable[[], Plan], *, searched: bool
) -> bool:
    """Set ``left`` of the products of all attentions if the output gains much where these are in float.

    Return whether they were set.

    Args:
        error: that of the calibrated proxy.
        observation: the statistics, with kept batches.
        decided: a function that returns the plan for the current records.
        searched: whether the ranges were chosen by the output.
    """
    assert observation.kept is not None
    plan = decided()
    groups = {
        operand.group
        for path, entry in plan.items()
        for operand in entry.operands
        if entry.quantized and entry.kind == "matmul" and observation.records[path].operands[operand.name].softmax
    }
    products = [path for path, entry in plan.items() if any(operand.group in groups for operand in entry.operands)]
    if not products or observation.kept.everywhere < 2:
        return False
    few = observation.kept.few()
    rounded = error.of_all_ranks(plan, few)
    for path in products:
        observation.records[path].left = ReasonCode.COSTLY_ATTENTION.text(cost="?")
    left = error.of_all_ranks(decided(), few)
    cost = 10 * math.log10(rounded / left) if rounded and left else 0.0
    is_costly = cost >= (_GAIN_DB if searched else _GAIN_UNSEARCHED_DB)
    for path in products:
        observation.records[path].left = ReasonCode.COSTLY_ATTENTION.text(cost=f"{cost:.1f}") if is_costly else None
    return is_costly
