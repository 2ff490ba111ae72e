"""Calibrator ``auto``: choose the candidate range of each operand that minimizes the error of its site's output.

Stored batches run through the proxy again. Every site tries all candidates on its real operands, one operand at a time;
``SiteCall`` defines the error. Operands that read one tensor share a range, so their errors are added.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quantizer.algorithms.algorithm import Algorithm, Work
from quantizer.algorithms.replay import SiteCall, visit_calls
from quantizer.numerics.formats import QType, qtype
from quantizer.observe.calibrators import estimates
from quantizer.observe.range_group import OperandRecord, RangeGroup
from quantizer.plan.apply import apply_factor
from quantizer.plan.decide_operands import judged_as
from quantizer.plan.site_plan import OperandPlan, Plan
from quantizer.plan.weight_scales import scale_of
from quantizer.proxy.site import Site
from quantizer.utils.distributed import all_reduce_sum, exact_sums


def _trials(plan: Plan, work: Work) -> Iterator[Trial]:
    """Yield the activations that have a scale: quantized ones, and float ones that a better range may quantize."""
    for site in work.proxy.planned(plan):
        for operand in plan[site.path].operands:
            record = work.observed.records[site.path].operands[operand.name]
            group, dtype = record.range, judged_as(qtype(operand.dtype))
            fixed = dtype.is_float and record.softmax
            if group is not None and operand.scale is not None and not fixed:
                yield Trial(
                    site=site,
                    operand=operand.name,
                    record=record,
                    group=group,
                    dtype=dtype,
                    scale=partial(scale_of, dtype=dtype, scale_dtype=work.planned.scale_dtype),
                    planned=plan[site.path].operands,
                )


_SHARES = tuple(0.9**step for step in range(1, 17))
"""Shares of the largest value, as further candidates: down to 0.19, in steps that change the error little."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """An operand whose range is to be chosen.

    Attributes:
        site: the site of the operand.
        operand: the operand's name.
        record: the record of the operand.
        group: the operands that share its range.
        dtype: the format in which candidates are tried.
        scale: a function from amax to the scale in the target's float type.
        planned: the plan of all operands of the site.
    """

    site: Site
    operand: str
    record: OperandRecord
    group: RangeGroup
    dtype: QType
    scale: Callable[[Tensor], Tensor]
    planned: tuple[OperandPlan, ...]

    def of_call(self, number: int | None) -> RangeGroup:
        return self.group.of_tensor(self.record.tensor_of(number))


def choose_ranges(plan: Plan, work: Work) -> Plan:
    """Choose for each activation the candidate range with the smallest error of its sites, over all ranks.

    If errors are equal, the larger range is chosen.
    """
    by_site: dict[str, list[Trial]] = defaultdict(list)
    errors: dict[RangeGroup, dict[tuple[float, str], list[float]]] = {}
    for trial in _trials(plan, work):
        by_site[trial.site.path].append(trial)
        for group in trial.group.ranges:
            if group not in errors:
                errors[group] = {candidate: [] for candidate in _candidates(group, trial.dtype)}

    def visit(call: SiteCall) -> None:
        if call.expected is None:
            return
        for trial in by_site[call.site.path]:
            with _smoothed(trial):
                quantizer = trial.site.quantizer_of(trial.operand)
                # Calls without a range of their own use the common range.
                for group in {trial.group, trial.of_call(call.number)}:
                    for amax, name in errors[group]:
                        scale = trial.scale(torch.tensor(amax, dtype=torch.float32))
                        quantizer.set_scale(scale, trial.dtype.name, None)
                        errors[group][amax, name].append(call.error())

    sites = [trials[0].site for trials in by_site.values()]
    visit_calls(work.proxy.module, sites, work.kept.few(), visit, "choosing ranges")
    totals = iter(exact_sums([calls for of_group in errors.values() for calls in of_group.values()]))
    reached = iter(all_reduce_sum(len(next(iter(of_group.values()))) for of_group in errors.values()))
    for group, candidates in errors.items():
        of_group = {candidate: next(totals) for candidate in candidates}
        if next(reached) == 0:
            # No stored batch reaches the site: the calibrator's estimate, or an earlier choice, stays.
            continue
        group.chosen = min(of_group, key=lambda candidate: (of_group[candidate], -candidate[0]))
    return work.plan()


@contextmanager
def _smoothed(trial: Trial) -> Iterator[None]:
    """Apply the plan's SmoothQuant factors to the site's operands without quantization; undo it afterwards."""
    quantizers = [(trial.site.quantizer_of(planned.name), planned) for planned in trial.planned]
    try:
        for quantizer, planned in quantizers:
            apply_factor(quantizer, planned)
        yield
    finally:
        for quantizer, _ in quantizers:
            quantizer.reset()


def _candidates(group: RangeGroup, dtype: QType) -> list[tuple[float, str]]:
    candidates: dict[float, str] = {}
    for name, amax in estimates(group.calibrator, dtype):
        candidates.setdefault(amax, name)
    for share in _SHARES:
        candidates.setdefault(group.calibrator.largest * share, f"{share:.2f} of max")
    return list(candidates.items())


ALGORITHM = Algorithm(
    wanted=lambda settings: settings.calibrator == "auto",
    run=choose_ranges,
    needs_batches=lambda settings: True,
)
