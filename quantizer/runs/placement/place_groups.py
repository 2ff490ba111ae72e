"""The stage that prices the groups of a plan by measured time, and finds those that low precision makes slower."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from quantizer.common.data.sizes import DataSizes
from quantizer.quantizer import Quantizer
from quantizer.report.text import counted
from quantizer.runs.placement.price_groups import EngineFiles, TimeCache, Timing, is_faster, price_groups
from quantizer.sensitivity.prices import Prices

_WORTH_A_TRIAL = 1.01
"""The gain that the prices of the slower groups have to promise, half of what it has to be when it is measured."""


@dataclass(frozen=True, kw_only=True)
class GroupPlacer:
    """Prices the groups of a quantizer's plan in the engines of its backend.

    Attributes:
        model: the float model.
        example: one batch, to export with.
        timing: how engines are timed.
        cache: times that were measured before.
        build: builds an engine of the backend from an ONNX file.
        folder: where engines may lie while they are timed.
        opset: the ONNX opset; None: the target's.
        axes: the open axes of the inputs; None: by the example.
        say: called with what was found, in words.
    """

    model: nn.Module
    example: Any
    timing: Timing
    cache: TimeCache
    build: Callable[[Path, Path], Any]
    folder: Path
    opset: int | None = None
    axes: DataSizes | None = None
    say: Callable[[str], None] = lambda words: None

    def prices(self, quantizer: Quantizer, quantized: nn.Module, low: EngineFiles, plain: EngineFiles) -> Prices | None:
        """Return the prices of all groups of a plan; those by which a group is slower hold for the plan as a whole.

        None: the library tells no times of layers.

        Gains of single groups do not add up exactly. So an engine without the slower groups is built and timed beside
        the other: if it is not faster, no group counts as slower; nor if all of them together would gain too little.
        """
        prices = price_groups(quantizer.plan, quantized, low, plain, self.timing, self.cache)
        if prices is None or not prices.slower():
            return prices
        number = len(prices.slower())
        what = f"{counted(number, 'group')} {'is' if number == 1 else 'are'} slower in {quantizer.config.dtype}"
        if prices.low_us < _WORTH_A_TRIAL * prices.time_us(prices.slower()):
            faster, then = False, f", but too little to put {'it' if number == 1 else 'them'} back"
        else:
            faster = self.cache.faster(low.onnx, plain.onnx, self.timing, partial(self._faster, quantizer, prices, low))
            then = ", put back" if faster else ", but the engine is not faster without them"
        self.say(f"{what} than in float{then}")
        return prices if faster else replace(prices, least_loss_us=math.inf)

    def _faster(self, quantizer: Quantizer, prices: Prices, low: EngineFiles) -> bool:
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            placed = EngineFiles(onnx=Path(scratch) / "placed.onnx", engine=Path(scratch) / "placed.engine")
            quantizer.fallback(None, prices=prices)
            try:
                quantized = quantizer.quantize(self.model)
                quantizer.export(quantized, placed.onnx, self.example, opset=self.opset, dynamic_axes=self.axes)
            finally:
                quantizer.clear_fallback()
            self.build(placed.onnx, placed.engine)
            return is_faster(placed, low, self.timing)
