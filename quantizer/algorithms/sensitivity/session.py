"""The implementation of ``Quantizer.amp`` and ``Quantizer.fallback``: a measuring proxy, and the choice of groups.

The rankings of groups and layers are results that display themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from quantizer.algorithms.fallback import fallback_record
from quantizer.algorithms.sensitivity import (
    Fallback,
    GroupSensitivity,
    Loss,
    Measurement,
    Metric,
    Tell,
    by_name,
    by_rank,
    fingerprint,
    groups_of,
    operands_of,
    per_cost,
    search,
)
from quantizer.algorithms.sensitivity.latency_costs import LatencyCosts, by_speed
from quantizer.errors import SensitivityError
from quantizer.plan.apply import FrozenTries, apply_plan, store_weights, watch, with_passes
from quantizer.plan.coverage import Coverage
from quantizer.plan.site_plan import Plan, with_fallback
from quantizer.proxy.build import build_proxy, sites_of
from quantizer.proxy.model_sharing import OwnBuffers
from quantizer.utils.display import Rows, Shown
from quantizer.utils.distributed import all_gather_bytes, get_rank
from quantizer.utils.files import Store
from quantizer.utils.fingerprint import Fingerprint
from quantizer.utils.records import Evaluation, GroupRow, GroupTime, LayerRow, group_rows, layer_rows

if TYPE_CHECKING:
    from quantizer.report.notebook import Picture

Costs = str | Mapping[str, float] | None


class SensitivitySession:
    """The AMP proxy of a plan, which measures the plan's groups, and the choice among them.

    Attributes:
        proxy: the AMP proxy, which returns float outputs and measures.
        measured_plan: the plan of calibration.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        measure: str,
        granularity: str,
        loss: Loss | None,
        metric: Metric | None,
        *,
        alone: Plan | None = None,
        tries: Callable[[], Callable[[Mapping[str, str]], Plan]] | None = None,
    ) -> None:
        """
        Args:
            model: the model.
            plan: the plan of calibration.
            measure, granularity, loss, metric: as in ``Quantizer.amp``.
            alone: the plan with biases corrected for one quantized group at a time, as groups are measured; None:
                ``plan``.
            tries: returns, for one search, a function from the groups in float to the plan to freeze; None: ``plan``
                without these groups."""
        alone = plan if alone is None else alone
        self.proxy = build_proxy(model, eager_attention=True).eval()
        OwnBuffers(self.proxy, model)
        with_passes(self.proxy, alone)
        apply_plan(self.proxy, alone)
        store_weights(self.proxy, alone)
        # The proxy shares the model's float weights, but its integers belong to the current weights.
        watch(self.proxy, "amp", lambda parameter: True)
        self._model = model
        self.measured_plan = plan
        self._loss = loss
        self._begin = tries or (lambda: partial(with_fallback, plan))
        self._measurement = Measurement(
            self.proxy, groups_of(sites_of(self.proxy), plan, granularity), measure, loss, metric
        )

    @property
    def measure(self) -> str:
        """The name of the measure; ``loss`` for the gradients of the user's loss."""
        return self._measurement.measure if self._loss is None else "loss"

    @property
    def by_output(self) -> list[GroupSensitivity]:
        """The groups by their effect on the model's output, highest first; empty without such a measure.

        All processes must read it.
        """
        measured = self.measure in ("gradient", "output") and self._measurement.batches_of_all()
        return self.ranking() if measured else []

    def ranking(self) -> list[GroupSensitivity]:
        """Return all groups, highest error first."""
        return self._measurement.ranking()

    def fallback(
        self,
        *,
        num: int | None,
        ratio: float | None,
        names: Sequence[str] | None,
        max_drop: float | None,
        metric: Metric | None,
        max_evaluations: int,
        min_groups: int,
        costs: Costs,
        min_speedup: float | None,
        latency_costs: LatencyCosts | None,
        cache: str | os.PathLike[str] | None,
        tell: Tell | None,
    ) -> Fallback:
        """Return the groups that fall back to float; arguments as in ``Quantizer.fallback``."""
        _require_one(num=num, ratio=ratio, names=names, max_drop=max_drop, min_speedup=min_speedup)
        slower = {} if latency_costs is None else latency_costs.slower()
        if names is not None:
            return replace(by_name(operands_of(self.measured_plan), names), slower=slower)
        ranking = [entry for entry in self.ranking() if not slower.keys() >= set(entry.parts)]
        if latency_costs is not None and isinstance(costs, Mapping):
            raise SensitivityError("fallback() takes costs= or latency_costs=, not both")
        if min_speedup is not None:
            if latency_costs is None:
                raise SensitivityError(
                    "fallback(min_speedup=...) needs latency_costs=, the measured times of the groups"
                )
            return replace(by_speed(ranking, latency_costs, min_speedup), slower=slower)
        if max_drop is None:
            # The displayed ranking; latency costs reorder it only for max_drop and min_speedup.
            chosen = by_rank([entry for entry, _ in per_cost(ranking, costs)], num=num, ratio=ratio)
            return replace(chosen, slower=slower)
        if metric is None:
            raise SensitivityError(
                "fallback(max_drop=...) needs metric=, a function that takes a model and returns a score"
            )
        if latency_costs is not None and costs is None:
            costs = latency_costs.gains({entry.group: entry.parts for entry in ranking})
        candidates = per_cost(ranking, costs)
        searched = self._searched(candidates, slower, max_drop, metric, max_evaluations, min_groups, cache, tell)
        return replace(searched, slower=slower)

    def _searched(
        self,
        candidates: list[tuple[GroupSensitivity, float]],
        slower: Mapping[str, str],
        max_drop: float,
        metric: Metric,
        max_evaluations: int,
        min_groups: int,
        cache: str | os.PathLike[str] | None,
        tell: Tell | None,
    ) -> Fallback:
        score_of = self._scores(metric, cache)

        def score(groups: tuple[str, ...] | None) -> float:
            return score_of(None if groups is None else (*groups, *slower))

        return search(
            candidates,
            score(None),
            score,
            max_drop=max_drop,
            higher_is_better=metric.higher_is_better,
            max_evaluations=max_evaluations,
            min_groups=min_groups,
            tell=tell,
        )

    def _scores(
        self, metric: Metric, cache: str | os.PathLike[str] | None
    ) -> Callable[[tuple[str, ...] | None], float]:
        search = fingerprint(self.measured_plan, metric.function, Fingerprint.of(self._model))
        scores = Store(cache if get_rank() == 0 else None, SensitivityError).under(search)
        tries, planned = FrozenTries(self._model), self._begin()

        def score(groups: tuple[str, ...] | None) -> float:
            def take() -> float:
                if groups is None:
                    # A copy in eval mode: in train mode the user's model would apply dropout and update statistics.
                    proxy = build_proxy(self._model, eager_attention=False).eval()
                    OwnBuffers(proxy, self._model)
                    return metric.score(proxy, "the float model")
                plan = planned(dict.fromkeys(groups, "kept in float"))
                return metric.score(tries.of(plan), f"the model with {len(groups)} groups kept in float")

            # One process reads the folder for all, so either all processes compute a score or none.
            key = [groups is None, *sorted(groups or ())]
            known = _of_first_process(scores.find(key))
            if known is None:
                known = _of_first_process(scores.get(key, take))
            assert known is not None
            return known

        return score


def unranked(plan: Plan, choice: Mapping[str, Any], latency_costs: LatencyCosts | None) -> Fallback:
    """Return the groups that fall back by name or latency cost, without a ranking.

    Args:
        plan: the plan of calibration.
        choice: ``num``, ``ratio``, ``names``, ``max_drop`` and ``min_speedup``, as in ``Quantizer.fallback``.
        latency_costs: the latency cost of each group; None if not measured.
    """
    given = [name for name, value in choice.items() if value is not None]
    if given or latency_costs is None:
        _require_one(**choice)
    slower = {} if latency_costs is None else latency_costs.slower()
    if not given:
        return Fallback(groups=(), asked="latency_costs", slower=slower)
    if given != ["names"]:
        raise SensitivityError(
            f"fallback({given[0]}=...) needs the proxy that amp() returned, after data ran through it, because it "
            "chooses by sensitivity; only names= needs none"
        )
    return replace(by_name(operands_of(plan), choice["names"]), slower=slower)


def _require_one(**arguments: object) -> None:
    names = [name for name, value in arguments.items() if value is not None]
    if len(names) != 1:
        shown = ", ".join(f"{name}={value}" for name, value in arguments.items())
        raise SensitivityError(f"fallback() takes one of {', '.join(arguments)}; got {shown}")


def _of_first_process(score: float | None) -> float | None:
    received = all_gather_bytes(b"" if score is None else score.hex().encode())[0].decode()
    return float.fromhex(received) if received else None


class Search(Rows[Evaluation]):
    """The scores of a search, in order; a notebook shows the picture above the table.

    Attributes:
        fallback: the chosen fallback as a record of a report.
    """

    look = "search"

    def __init__(self, chosen: Fallback) -> None:
        self.fallback = fallback_record(chosen)
        super().__init__(self.fallback.evaluations)

    def plot(self) -> Picture:
        """Return a plot of drop against cost, with the Pareto front, the budget and the chosen fallback."""
        return self._picture("search")


class Sensitivity(Rows[GroupSensitivity]):
    """The groups, ranked by the error of quantizing one group alone; groups in float are marked."""

    look = "sensitivity"

    def __init__(self, ranking: Sequence[GroupSensitivity], fallback: Fallback | None, measure: str) -> None:
        in_float = set(fallback.reasons()) if fallback is not None else set()
        super().__init__(
            [replace(entry, fallback=in_float.issuperset(entry.parts or (entry.group,))) for entry in ranking]
        )
        self.measure = measure
        self._fallback = fallback

    @property
    def search(self) -> Search:
        """The scores that ``fallback(max_drop=...)`` measured, as a table, with a picture in a notebook."""
        if self._fallback is None or not self._fallback.evaluations:
            reason = (
                "nothing falls back" if self._fallback is None else f"fallback({self._fallback.asked}) does not search"
            )
            raise SensitivityError(f"no search was run: {reason}; call fallback(amp, max_drop=...)")
        return Search(self._fallback)

    def plot(self, limit: int = 30) -> Picture:
        """Return horizontal bars of the ``limit`` groups with the highest errors; ``.save(path)`` writes SVG."""
        return self._picture("bars", limit=limit)

    def heatmap(self) -> Picture:
        """Return a heat map of the errors by block and kind of site; ``.save(path)`` writes SVG."""
        return self._picture("heatmap")

    def pareto(self) -> Picture:
        """Return a plot of all scores of a search, drop against cost; ``.save(path)`` writes SVG."""
        return self.search.plot()


class FallbackCosts(Rows[GroupRow]):
    """The groups with the error that keeping each in float removes, and the latency that it costs."""

    look = "groups"

    def __init__(self, rows: Sequence[GroupRow], measure: str | None) -> None:
        super().__init__(rows)
        self.measure = measure


class Layers(Rows[LayerRow]):
    """One line for each layer that ran: its formats, range, SQNR, sensitivity, share of the work, and times.

    Attributes:
        fallback_costs: the gain and the latency cost of keeping each group in float; empty if neither is known.
        measure: the measure of the errors; None: none were measured.
        where: where the times were measured; None: they were not measured.
    """

    look = "layers"

    def __init__(
        self, coverage: Coverage, sensitivity: Sensitivity | None = None, latency_costs: LatencyCosts | None = None
    ) -> None:
        self._coverage, self._sensitivity = coverage, sensitivity
        self.measure = None if sensitivity is None else sensitivity.measure
        self.where = None if latency_costs is None else latency_costs.where
        ranking = () if sensitivity is None else sensitivity.rows
        measured = () if latency_costs is None else latency_costs.groups.items()
        times = [GroupTime(group=name, low_us=latency.low_us, float_us=latency.float_us) for name, latency in measured]
        super().__init__(layer_rows(coverage.rows, coverage.not_quantized.rows, ranking, times))
        self.fallback_costs = FallbackCosts(group_rows(coverage.rows, ranking, times), self.measure)

    def timed(self, latency_costs: LatencyCosts) -> Layers:
        """Return the same layers with the times that ``measure_latency_costs`` returned."""
        return Layers(self._coverage, self._sensitivity, latency_costs)

    def below(self) -> list[Shown | str]:
        """Return the table of the groups, if there is one."""
        return [self.fallback_costs] if len(self.fallback_costs) else []
