"""The word error rate, counted row by row.

Shapes: N rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

import numpy as np
import numpy.typing as npt


def word_errors(said: Iterable[str], right: Iterable[str]) -> npt.NDArray[np.float64]:
    """Return the words of each row that are wrong, missing or too many, and the words that are right for it [N x 2]."""
    rate = import_module("torchmetrics.functional.text").word_error_rate
    found = []
    for text, words in zip(said, right, strict=True):
        count = len(words.split())
        found.append((round(float(rate(text, words)) * count), count))
    return np.array(found, dtype=np.float64)


def error_rate(sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the rates [...] of sums [... x 2] of these counts."""
    return np.asarray(sums[..., 0] / sums[..., 1])
