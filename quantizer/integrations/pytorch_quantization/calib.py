"""The calibrators behind a ``TensorQuantizer``, under the toolkit's names."""

from __future__ import annotations

import torch
from torch import Tensor

from quantizer.errors import CalibrationError
from quantizer.observe.calibrators import PercentileCalibrator

_METHODS = ("percentile", "mse", "entropy")


class HistogramCalibrator:
    """One range for a tensor, from a streaming histogram of |x|."""

    def __init__(self) -> None:
        self._histogram = PercentileCalibrator()

    def collect(self, x: Tensor) -> None:
        """Add the values of x [*] to the histogram."""
        self._histogram.observe(x)

    def compute_amax(self, method: str = "percentile", *, percentile: float = 99.99) -> Tensor | None:
        """Return the range []; None without collected values."""
        if method not in _METHODS:
            raise CalibrationError(f"load_calib_amax({method!r}): expected one of {', '.join(_METHODS)}")
        if not self._histogram.count:
            return None
        options = {"percentile": percentile} if method == "percentile" else {}
        return torch.tensor(self._histogram.seen_as(method, **options).amax(), dtype=torch.float32)


class MaxCalibrator:
    """The largest magnitude of a tensor, or of each entry along an axis."""

    def __init__(self, axis: int | None) -> None:
        self._axis = axis
        self._amax: Tensor | None = None

    def collect(self, x: Tensor) -> None:
        """Update the maximum with the values of x [*]."""
        if x.numel() == 0:
            return
        amax = amax_of(x, self._axis)
        if not bool(torch.isfinite(amax).all()):
            raise CalibrationError(f"NaN or an infinite value in an operand of shape {tuple(x.shape)}")
        self._amax = amax if self._amax is None else torch.maximum(self._amax, amax)

    def compute_amax(self) -> Tensor | None:
        """Return the range [] or [C]; None without collected values."""
        return self._amax


def amax_of(x: Tensor, axis: int | None) -> Tensor:
    """Return the largest magnitude of x [*]: [] or, along ``axis``, [C]."""
    magnitudes = x.detach().float().abs()
    if axis is None:
        return magnitudes.amax()
    return magnitudes.amax(dim=[other for other in range(x.dim()) if other != axis % x.dim()])
