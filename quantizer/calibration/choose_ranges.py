"""The step from statistics to a plan, after the choice of ranges and codes that need more passes of the model.

The calibrator ``auto``: the candidate for an operand's range that gives its site's output the smallest error.

The kept batches run through the proxy again. Every site tries all candidates on its real operands, one operand at a
time; ``replay.py`` defines the error. Operands that read one tensor share a range, so their errors are added.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from quantizer.calibration.bias_correction import corrected
from quantizer.calibration.output_search import OutputError, choose, leave_costly_attention
from quantizer.calibration.proxied import Proxied
from quantizer.calibration.replay import SiteCall, replay
from quantizer.calibration.rounding.block_passes import with_all_batches
from quantizer.calibration.rounding.equalize import equalize_where_better
from quantizer.calibration.rounding.reconstruct import reconstruct_blocks
from quantizer.calibration.rounding.scale_inputs import scale_inputs
from quantizer.calibration.settings import calibrator_of, estimates_of, plan_settings, replays_batches
from quantizer.calibration.smoothquant import ALPHAS, Smoothing
from quantizer.calibration.weight_rounding import round_weights
from quantizer.calibrators import estimates
from quantizer.common.distributed import all_reduce_sum, exact_sums, get_world_size
from quantizer.common.fingerprint import Fingerprint, tensors_digest
from quantizer.numerics.qtype import QType, qtype
from quantizer.observe.range_group import OperandRecord, RangeGroup
from quantizer.observe.replay_batches import Batch, Known
from quantizer.observe.snapshot import snapshot
from quantizer.observe.statistics import Seen
from quantizer.plan.apply import apply_factor
from quantizer.plan.decide_operands import PlanSettings, judged_as
from quantizer.plan.decide_sites import decide
from quantizer.plan.site_plan import OperandPlan, Plan, plan_digest
from quantizer.plan.weight_scales import scale_of
from quantizer.proxy.site import Site


def make_plan(proxy: Proxied, observation: Seen) -> Plan:
    """Return the plan of a calibrated proxy, after the choices on kept batches that the configuration asks for.

    Ranges and codes of weights are chosen once, and again after more data; so are the shifts of biases, with ranges and
    codes as they came out. This runs the proxy, so pause its observation first. What was chosen for another backend
    whose plans are alike is taken over.
    """
    known, settings = Known() if observation.kept is None else observation.kept.known, plan_settings(proxy)
    error = OutputError(proxy, known.errors)

    def decided() -> Plan:
        return decide(proxy.module, list(proxy.sites), observation, proxy.excluded, settings)

    digest = None
    if replays_batches(proxy.config) and observation.batches not in (0, observation.chosen_at):
        observation.forget_choices()
        plain = decided()
        digest = _digest(proxy, observation, plain)
        chosen = None if digest is None else known.choices.get(digest)
        if chosen is None:
            _choose(proxy, observation, error, plain, decided, settings)
        else:
            observation.take_choices(chosen)
        observation.chosen_at, observation.rounding = observation.batches, None
    plan = decided()
    if proxy.config.bias_correction:
        plan = corrected(proxy, plan, observation, error, settings.scale_dtype)
    if digest is not None and digest not in known.choices:
        known.keep(digest, observation)
    return plan


def _digest(proxy: Proxied, observation: Seen, plan: Plan) -> str | None:
    """Return the SHA-256 of all that choices by running batches depend on; None: they are of this quantizer alone."""
    config, kept, buffers = proxy.config, observation.kept, dict(proxy.module.named_buffers())
    if kept is None or get_world_size() > 1 or not all(map(_has_plain_values, buffers.values())):
        return None
    traits = {
        name: sorted(value) if isinstance(value, frozenset) else value
        for name, value in config.target.plan_traits.items()
    }
    parts = [
        config.model_dump_json(exclude={"backend", "candidates"}),
        repr(traits),
        plan_digest(plan),
        kept.digest,
        repr(Fingerprint.of(proxy.module).plain()),
        hashlib.sha256(snapshot(observation)).hexdigest(),
    ]
    return tensors_digest(buffers, "\0".join(parts))


def _has_plain_values(tensor: torch.Tensor) -> bool:
    """Return whether all values of a tensor lie in memory as they are, none left out and none in codes."""
    held = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    return held and not tensor.is_meta and not tensor.is_quantized


def _choose(
    proxy: Proxied,
    observation: Seen,
    error: OutputError,
    plain: Plan,
    decided: Callable[[], Plan],
    settings: PlanSettings,
) -> None:
    """Choose ranges, migrations of outliers and codes by running the kept batches; ``plain`` is the plan without."""
    config = proxy.config
    activations = config.activations
    with torch.no_grad():
        smoothing = None
        shares: tuple[float | None, ...] = (None,)
        if activations.smooth is not None:
            shares = (None, *ALPHAS) if activations.smooth == "auto" else (activations.smooth,)
            smoothing = Smoothing(
                proxy,
                observation,
                plain,
                shares=[share for share in shares if share is not None],
                make=partial(calibrator_of, config, histogram=False),
                scale_dtype=settings.scale_dtype,
            )
        estimates = estimates_of(activations)
        if not _has_static_range(plain):
            estimates = estimates[:1]
        if len(shares) > 1 or len(estimates) > 1:
            chooses = partial(
                choose, error, observation, decided, smoothing=smoothing, shares=shares, estimates=estimates
            )
            chosen = chooses()
            # The small numbers of a softmax want ranges that clip what others need.
            by_output = activations.calibrator == "output"
            if by_output and leave_costly_attention(error, observation, decided, searched=True):
                chooses(start=chosen)
        elif smoothing is not None:
            smoothing.take(shares[0])
            leave_costly_attention(error, observation, decided, searched=False)
        if activations.smooth is not None:
            equalize_where_better(
                proxy,
                observation,
                decided,
                error,
                make=partial(calibrator_of, config, histogram=False),
                settings=settings,
            )
        if activations.calibrator == "auto":
            assert observation.kept is not None
            choose_ranges(proxy.module, _trials(proxy, decided(), observation, settings), observation.kept.few())
        if config.weights.rounding != "nearest":
            assert observation.kept is not None
            with with_all_batches(config.weights.rounding, observation.kept):
                _round(proxy, observation, decided, settings)


def _round(proxy: Proxied, observation: Seen, decided: Callable[[], Plan], settings: PlanSettings) -> None:
    """Choose the codes of weights by data, as the configuration asks."""
    rounding = proxy.config.weights.rounding
    if rounding in ("gptq", "reconstruct"):
        round_weights(proxy, observation, decided(), settings)
    if rounding == "reconstruct":
        reconstruct_blocks(proxy, observation, decided(), settings)
    if rounding == "awq":
        scale_inputs(proxy, observation, decided(), settings)


def _has_static_range(plan: Plan) -> bool:
    """Return whether a range of calibration is used for any activation."""
    operands = (operand for entry in plan.values() for operand in entry.operands)
    return any(operand.role == "activation" and operand.scale is not None for operand in operands)


def _trials(proxy: Proxied, plan: Plan, observation: Seen, settings: PlanSettings) -> Iterator[Trial]:
    """Yield the activations that have a scale: quantized ones, and float ones that a better range may let quantize."""
    for site in proxy.planned(plan):
        for operand in plan[site.path].operands:
            seen = observation.records[site.path].operands[operand.name]
            group, dtype = seen.range, judged_as(qtype(operand.dtype))
            fixed = dtype.is_float and seen.softmax
            if group is not None and operand.scale is not None and not fixed:
                yield Trial(
                    site=site,
                    operand=operand.name,
                    seen=seen,
                    group=group,
                    dtype=dtype,
                    scale=partial(scale_of, dtype=dtype, scale_dtype=settings.scale_dtype),
                    planned=plan[site.path].operands,
                )


_SHARES = tuple(0.9**step for step in range(1, 17))
"""Shares of the largest value, as further candidates: down to 0.19, in steps that change the error by little."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """An operand whose range is to be chosen.

    Attributes:
        site: the site of the operand.
        operand: the operand's name.
        seen: the record of the operand.
        group: the operands that share its range.
        dtype: the format in which candidates are tried.
        scale: a function that gives the scale of an amax in the target's float type.
        planned: the plan of all operands of the site.
    """

    site: Site
    operand: str
    seen: OperandRecord
    group: RangeGroup
    dtype: QType
    scale: Callable[[Tensor], Tensor]
    planned: tuple[OperandPlan, ...]

    def of_call(self, number: int | None) -> RangeGroup:
        """Return the range of a call by its number in the pass."""
        return self.group.of_tensor(self.seen.tensor_of(number))


def choose_ranges(proxy: nn.Module, trials: Iterable[Trial], batches: Iterable[Batch]) -> None:
    """Set ``chosen`` of every range group among ``trials`` to the candidate with the smallest error of all ranks.

    If errors are equal, the larger range is chosen.
    """
    by_site: dict[str, list[Trial]] = defaultdict(list)
    errors: dict[RangeGroup, dict[tuple[float, str], list[float]]] = {}
    for trial in trials:
        by_site[trial.site.path].append(trial)
        for group in trial.group.ranges:
            if group not in errors:
                errors[group] = {candidate: [] for candidate in _candidates(group, trial.dtype)}

    def visit(call: SiteCall) -> None:
        if call.expected is None:
            return
        for trial in by_site[call.site.path]:
            with _migrated(trial):
                quantizer = trial.site.quantizer_of(trial.operand)
                # Any other call has the range of all of them.
                for group in {trial.group, trial.of_call(call.number)}:
                    for amax, name in errors[group]:
                        scale = trial.scale(torch.tensor(amax, dtype=torch.float32))
                        quantizer.set_scale(scale, trial.dtype.name, None)
                        errors[group][amax, name].append(call.error())

    replay(proxy, [trials[0].site for trials in by_site.values()], batches, visit, "choosing ranges")
    totals = iter(exact_sums([calls for of_group in errors.values() for calls in of_group.values()]))
    reached = iter(all_reduce_sum(len(next(iter(of_group.values()))) for of_group in errors.values()))
    for group, candidates in errors.items():
        of_group = {candidate: next(totals) for candidate in candidates}
        if next(reached) == 0:
            # No kept batch reaches the site: the calibrator's own estimate, or an earlier choice, stays.
            continue
        group.chosen = min(of_group, key=lambda candidate: (of_group[candidate], -candidate[0]))


@contextmanager
def _migrated(trial: Trial) -> Iterator[None]:
    """Apply the plan's migration of outliers to the site's operands, without rounding; undo it afterwards."""
    quantizers = [(trial.site.quantizer_of(planned.name), planned) for planned in trial.planned]
    try:
        for quantizer, planned in quantizers:
            apply_factor(quantizer, planned)
        yield
    finally:
        for quantizer, _ in quantizers:
            quantizer.reset()


def _candidates(group: RangeGroup, dtype: QType) -> list[tuple[float, str]]:
    found: dict[float, str] = {}
    for name, amax in estimates(group.calibrator, dtype):
        found.setdefault(amax, name)
    for share in _SHARES:
        found.setdefault(group.calibrator.largest * share, f"{share:.2f} of max")
    return list(found.items())
