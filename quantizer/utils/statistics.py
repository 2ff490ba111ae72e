"""Statistics of scores."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def paired_interval(first: NDArray[Any], second: NDArray[Any]) -> tuple[float, float]:
    """Return the 95% interval of ``second - first``, the scores of two models on the same resamples [R]."""
    low, high = np.quantile(second - first, [0.025, 0.975])
    return float(low), float(high)
