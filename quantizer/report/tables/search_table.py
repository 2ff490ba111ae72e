"""The scores of a search as the cells of a table, for a terminal, a notebook and the page."""

from __future__ import annotations

from typing import Any

from quantizer.report.record import Fallback
from quantizer.report.search.budget_record import BudgetOutcome
from quantizer.report.tables import text
from quantizer.report.tables.tables import Column

EVALUATION_COLUMNS = (
    Column(title="evaluation"),
    Column(title="groups put back", numeric=True),
    Column(title="cost", numeric=True, show=text.amount),
    Column(title="score", numeric=True),
    Column(title="drop", numeric=True, show=text.error),
    Column(title="in budget"),
    Column(title="front"),
    Column(title=""),
)


def budget_line(outcome: BudgetOutcome) -> str:
    """Return whether a budget is met, in a line: what was asked, and the drops that were measured."""
    words = [f"asked {text.error(outcome.asked)}", f"drop in tuning {text.drop(outcome.tuning)}"]
    if outcome.evaluation is not None:
        low, high = outcome.interval or (None, None)
        span = "" if low is None or high is None else f" (95%: {text.drop(low)} to {text.drop(high)})"
        words.append(f"in evaluation of the {outcome.which} {text.drop(outcome.evaluation)}{span}")
    return f"{'; '.join(words)}: {outcome.verdict}"


def evaluation_cells(fallback: Fallback) -> list[list[Any]]:
    """Return the cells of one row for each evaluation, in order."""
    return [
        [
            number,
            len(entry.groups),
            entry.cost,
            entry.score,
            entry.drop,
            None if fallback.max_drop is None else entry.drop <= fallback.max_drop,
            "front" if entry.front else "",
            "chosen" if entry.chosen else "",
        ]
        for number, entry in enumerate(fallback.evaluations, start=1)
    ]


def evaluation_caption(fallback: Fallback) -> str:
    """Return the budget and the result of the search, in a line."""
    words = [text.counted(len(fallback.evaluations), "evaluation")]
    if fallback.float_score is not None:
        words.append(f"the float model scores {text.plain(fallback.float_score)}")
    if fallback.max_drop is not None:
        words.append(f"a drop of {text.error(fallback.max_drop)} is allowed")
    found = next((entry for entry in fallback.evaluations if entry.chosen), None)
    if found is not None:
        words.append(f"with {text.counted(len(found.groups), 'group')} put back it scores {text.plain(found.score)}")
    else:
        words.append(f"put back: all, {text.counted(len(fallback.groups), 'group')}")
    words += [
        ("" if entry.rows is None else f"on {text.counted(entry.rows, 'row')} that the search did not see, ")
        + f"the engine with {text.counted(entry.groups, 'group')} put back drops by {text.error(entry.drop)}"
        for entry in fallback.checks
    ]
    if fallback.outcome is not None:
        words.append(budget_line(fallback.outcome))
    if fallback.checks and fallback.max_drop is not None and fallback.checks[-1].drop > fallback.max_drop:
        words.append("the budget is not met on the engine, and this is the best plan found")
    return "; ".join(words)
