"""The calibrations of one model on one set of rows, each made once for all runs whose settings have it in common."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from quantizer.calibration.settings import sees_the_same
from quantizer.quantizer import Quantizer
from quantizer.tasks import Batch

__all__ = ["Calibrations"]


class Calibrations:
    """The statistics of calibrations, for several quantizers of one model; the batches are the same for all.

    A quantizer with the settings of an earlier one gets its plan; one with other settings, such as another backend or
    percentile, gets the statistics, of which its plan is made as if it had seen the batches itself.
    """

    def __init__(self) -> None:
        # Only calibrated, so that no fallback of a run is in them.
        self._known: list[Quantizer] = []

    def calibrate(self, quantizer: Quantizer, model: nn.Module, batches: Sequence[Batch]) -> None:
        """Calibrate a quantizer, on the batches only if no earlier one has seen in them what it needs.

        Raises:
            CalibrationError: see ``Quantizer.calibrate``.
        """
        quantizer.inherit(self._same(quantizer, model, batches))

    def _same(self, quantizer: Quantizer, model: nn.Module, batches: Sequence[Batch]) -> Quantizer:
        config = quantizer.config
        for known in self._known:
            if known.config == config:
                return known
        new = Quantizer(config)
        like = next((known for known in self._known if sees_the_same(known.config, config)), None)
        if like is None:
            new.calibrate(model, batches)
        else:
            new.inherit(like)
        self._known.append(new)
        return new
