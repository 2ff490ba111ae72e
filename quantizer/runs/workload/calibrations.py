"""The calibrations of one model on one set of rows, and their rankings, once for all runs that have them in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from quantizer.calibration.make_plan import sees_the_same
from quantizer.quantizer import Quantizer
from quantizer.settings import settings_of
from quantizer.tasks import Batch


class Calibrations:
    """The statistics of calibrations, for several quantizers of one model; the batches are the same for all.

    A quantizer with the settings of an earlier one gets its plan; one with other settings, such as another backend or
    percentile, gets the statistics, of which its plan is made as if it had seen the batches itself.

    Attributes:
        has_head: whether the head of the task was fitted, which needs the float model alone.
    """

    def __init__(self) -> None:
        # Only calibrated, so that no fallback of a run is in them.
        self._known: list[Quantizer] = []
        self._ranked: dict[int, tuple[str, nn.Module]] = {}
        self.has_head = False

    def calibrate(self, quantizer: Quantizer, model: nn.Module, batches: Sequence[Batch]) -> None:
        """Calibrate a quantizer, on the batches only if no earlier one has seen in them what it needs."""
        quantizer.inherit(self._same(quantizer, model, batches))

    def amp(self, quantizer: Quantizer, settings: str, measure: Callable[[Quantizer], nn.Module]) -> nn.Module:
        """Return the amp proxy of a quantizer, that of an earlier one if its configuration and settings are equal."""
        place = next((place for place, known in enumerate(self._known) if known.config == quantizer.config), None)
        if place is None:
            return measure(quantizer)
        if place not in self._ranked or self._ranked[place][0] != settings:
            self._ranked[place] = settings, measure(self._known[place])
        quantizer.inherit(self._known[place])
        return self._ranked[place][1]

    def _same(self, quantizer: Quantizer, model: nn.Module, batches: Sequence[Batch]) -> Quantizer:
        config = quantizer.config
        for known in self._known:
            if known.config == config:
                return known
        new = Quantizer(config)
        # The weight of a convolution has three axes or more.
        convolves = any(parameter.dim() > 2 for parameter in model.parameters())
        alike = (
            known
            for known in self._known
            if sees_the_same(settings_of(known.config), settings_of(config), convolves=convolves)
        )
        like = next(alike, None)
        if like is None:
            new.calibrate(model, batches)
        else:
            new.inherit(like)
        self._known.append(new)
        return new
