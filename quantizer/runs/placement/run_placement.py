"""The placement of a run: the prices of its groups, and the speed that its engine has to reach."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn

from quantizer.config import RunConfig
from quantizer.quantizer import Quantizer
from quantizer.report.record import Placement
from quantizer.runs.graphs import Graphs
from quantizer.runs.placement.place_groups import GroupPlacer
from quantizer.runs.placement.price_groups import TimeCache
from quantizer.runs.placement.speed_goal import SpeedGoal
from quantizer.runs.plan_records import placement_record
from quantizer.runs.ranks.process_group import from_first_rank
from quantizer.runs.run_context import RunContext
from quantizer.runs.run_engines import RunEngines
from quantizer.sensitivity.prices import Prices


class RunPlacement:
    """The prices and the speed of a run's plan.

    Attributes:
        prices: the times of the groups; None: no engine runs here, or it tells no times.
    """

    def __init__(self, context: RunContext, config: RunConfig, folder: Path, graphs: Graphs) -> None:
        self.prices: Prices | None = None
        self._context = context
        self._config = config
        self._folder = folder
        self._graphs = graphs
        self._times = TimeCache(context.resume.times)
        self._goal = SpeedGoal(None if config.fallback is None else config.fallback.min_speedup, context.timer)

    def price(self, quantizer: Quantizer, engines: RunEngines) -> None:
        """Price the groups of the plan where its engine runs, and put back those that low precision makes slower."""
        if not engines.runs_here or self._graphs.several:
            return
        self.prices = from_first_rank(lambda: self._priced(quantizer, engines), Prices | None)
        if self.prices is not None and self.prices.slower():
            quantizer.fallback(None, prices=self.prices)

    def _priced(self, quantizer: Quantizer, engines: RunEngines) -> Prices | None:
        """Return the prices of the groups; None: they could not be timed."""
        with self._context.timer("quantize"):
            quantized = quantizer.quantize(self._context.model)
        engines.build(quantizer, quantized)
        low, plain = engines.files("engine"), engines.files("float")
        placer = GroupPlacer(
            model=self._context.model,
            example=self._context.feed.example(),
            timing=engines.timing,
            cache=self._times,
            build=engines.build_file,
            folder=self._folder,
            opset=self._config.export.opset,
            axes=self._context.feed.sizes,
            say=self._context.timer.tell,
        )
        with self._context.timer("time the groups"):
            return placer.prices(quantizer, quantized, low, plain)

    def is_fast_enough(self, quantizer: Quantizer, proxy: nn.Module | None, engines: RunEngines) -> bool:
        """Return whether the engine reaches the speed that was asked for; if not, choose groups to quantize again."""
        chosen = quantizer.chosen_fallback
        groups = 0 if chosen is None else len(chosen.groups)
        wanted = from_first_rank(lambda: self._goal.next_speedup(engines, groups), float | None)
        if wanted is not None:
            quantizer.fallback(proxy, min_speedup=wanted, prices=self.prices)
        return wanted is None

    def record(self, quantizer: Quantizer) -> Placement | None:
        """Return the record; None if no engine was timed."""
        if self.prices is None:
            return None
        ranking = quantizer.sensitivity.rows if self._config.amp is not None else ()
        made = placement_record(self.prices, ranking, quantizer.chosen_fallback)
        return replace(made, min_speedup=self._goal.asked, checks=tuple(self._goal.checks))
