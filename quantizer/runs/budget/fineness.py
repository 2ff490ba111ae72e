"""Fineness of a budget: tuning rows cannot tell every drop, as one row is a step of the score and chance moves it.

Legend: n the rows that are scored, p the share of them whose answer quantization changes. A score that is the share of
right answers moves in steps of 1 / n. Of the answers that change, as many become right as wrong if nothing is lost, and
the score still moves: its standard deviation is the root of p / n.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

_CHANGED = 0.01
"""p before anything ran: an assumption, of which the message tells. The demo's INT8 changes 1.5% of the answers."""

_NORMAL_95 = 1.96


def budget_warnings(asked: float, rows: int, metric: str, option: str) -> Iterator[str]:
    """Yield why a budget is finer than what its rows can tell, in a sentence; nothing if they can."""
    if metric != "accuracy" or asked <= 0 or rows <= 0:
        return
    step, noise = 1 / rows, _NORMAL_95 * math.sqrt(_CHANGED / rows)
    if asked < step:
        yield (
            f"{option}: {asked:g} is finer than one of the {rows} tuning rows that the search sees, which is "
            f"{step:.4f} of the accuracy: nothing but a drop of 0 meets it; give {math.ceil(1 / asked)} or more, or "
            "allow more"
        )
    elif asked < noise:
        yield (
            f"{option}: {asked:g} is within the noise of the {rows} tuning rows that the search sees: where 1 answer "
            f"in 100 changes, chance alone moves the accuracy by {noise:.4f} (95%)"
        )
