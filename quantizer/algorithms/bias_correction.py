"""Bias correction: the mean error that rounding makes in a site's output, moved into the site's bias.

Legend: y [R, C] the float output of a site, as rows without padding; z [R, C] its output with the operands rounded and
with everything before it rounded and corrected; m the median over rows of |y_r|^2.

    shift = sum_r w_r (y_r - z_r) / sum_r w_r        w_r = m / (|y_r|^2 + m)

With equal weights this is E[y] - E[z] (Nagel et al. 2019, arXiv:1906.04721, section 4.2, from data). But a few rows of
huge values, such as the first tokens of a transformer, have errors as huge, and would decide for all others.

The sites are corrected in the order in which the model calls them: each call is compared with the same call of a float
pass, and its result goes on corrected. Corrected all at once, from the errors of one quantized pass, a site would take
away again what the correction of the sites before it already took away.

Calls with ranges of their own have a shift each, as their errors are as different as their ranges.

A shift takes away the errors of the sites before it too, so it belongs to one plan: after a fallback shifts are
measured again. Where one group is measured alone, the shifts are those of each site with float operands before it.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from quantizer.algorithms.algorithm import Algorithm, Proxied, Work
from quantizer.algorithms.replay import quantized, run
from quantizer.observe.replay_batches import Batch
from quantizer.observe.statistics import BiasShifts, padding_mask, without_padding
from quantizer.plan.apply import apply_plan
from quantizer.plan.site_plan import Plan, SitePlan, summary, with_fallback
from quantizer.proxy.call_numbers import current_call
from quantizer.proxy.site import Site
from quantizer.utils.distributed import all_gather_bytes, get_world_size

logger = logging.getLogger(__name__)

_AT_ONCE = 4096
"""The number of samples that are summed at once."""

_DONE = "bias corrected"
_NO_BIAS = "bias not corrected: it has none that holds it"
_UNREACHED = "bias not corrected: no batch that was kept reaches it"
_NO_BATCH = "bias not corrected: no batch of the calibration is kept, as in a folder"
_WORSE = "bias not corrected: the output of the model comes out better without"


def correct_biases(plan: Plan, work: Work) -> Plan:
    """Return the plan with shifts of biases, and a note for each quantized site."""
    observed = work.observed
    if observed.kept is None or not work.kept.everywhere:
        logger.warning(
            "biases are not corrected, as a folder keeps no batch to measure their errors on: calibrate again for them"
        )
        notes = {path: _NO_BATCH for path, entry in plan.items() if entry.quantized and entry.kind != "output"}
        return _with_shifts(plan, BiasShifts(shifts={}, notes=notes))
    if observed.bias_shifts is None or observed.bias_shifts[0] != observed.batches:
        observed.bias_shifts = observed.batches, BiasCorrection(work).shifts(plan)
    return _with_shifts(plan, observed.bias_shifts[1])


class BiasCorrection:
    """The correction of biases on some batches, for plans of one calibration; what is in float is computed once."""

    def __init__(self, work: Work) -> None:
        self._proxy, self._kept, self._error = work.proxy, work.kept.few(), work.error
        self._dtype = work.planned.scale_dtype
        self._in_float: dict[Hashable, _FloatPass] = {}

    def with_fallback(self, plan: Plan, groups: Mapping[str, str]) -> Plan:
        """Return a plan with the shifts for its sites where some groups are float; it is quantized as a whole still."""
        return _with_shifts(plan, self.shifts(_without_shifts(with_fallback(plan, groups)), plan))

    def of_single_sites(self, plan: Plan) -> Plan:
        """Return a plan with shifts that correct each site alone, all others being float, where it has shifts."""
        sites = [site for site in self._proxy.planned(plan) if plan[site.path].bias_shift is not None]
        plain = _without_shifts(plan)
        errors: _Errors = {}
        with torch.no_grad():
            apply_plan(self._proxy.module, plain)
            try:
                for turn in self._kept.in_turns():
                    errors = _told(None if turn is None else self._alone(plan, sites, turn, errors))
            finally:
                for site in self._proxy.sites:
                    site.reset()
        shifts = {site.path: shift for site in sites if (shift := self._shift(plan, site, errors)) is not None}
        return _with_shifts(plain, BiasShifts(shifts=shifts, notes=dict.fromkeys(shifts, _DONE)))

    def shifts(self, plan: Plan, whole: Plan | None = None) -> BiasShifts:
        """Measure the shifts; return none if the output of the model is worse with them, on batches of all ranks.

        ``whole`` is the plan before a fallback, whose sites in float serve other fallbacks too (None: ``plan``).
        """
        measured = self._measured(plan, plan if whole is None else whole)
        if not measured.shifts:
            return measured
        before = self._error.of_all_ranks(plan, self._kept)
        if self._error.of_all_ranks(_with_shifts(plan, measured), self._kept, before) <= before:
            return measured
        notes = {path: _WORSE if path in measured.shifts else note for path, note in measured.notes.items()}
        return BiasShifts(shifts={}, notes=notes)

    def _measured(self, plan: Plan, whole: Plan) -> BiasShifts:
        """Return the mean error of each site's output, over the kept batches of all ranks.

        The batches run one after the other, each on the rank that keeps it, and each is corrected by the means of those
        before it and its own. So all ranks get the shifts of one process. In float a rank runs its next one while it
        waits for its turn.
        """
        sites = [site for site in self._proxy.planned(plan) if _may_hold_a_shift(site, plan[site.path])]
        mine = iter(self._kept.mine().items())
        ready: _FloatPass | None = None
        errors: _Errors = {}
        for turn in self._kept.in_turns():
            if ready is None and (named := next(mine, None)) is not None:
                ready = self._float_pass(*named, whole)
            if turn is None:
                errors = _told(None)
            else:
                assert ready is not None
                errors, ready = _told(_Corrected(ready, errors, self._dtype).run(self._proxy, sites, plan)), None
        # A lookup adds nothing up, and what a result is of is corrected itself.
        none = ("embedding", "output")
        notes = {path: _NO_BIAS for path, entry in plan.items() if entry.quantized and entry.kind not in none}
        shifts: dict[str, Tensor] = {}
        for site in sites:
            shift = self._shift(plan, site, errors)
            if shift is not None:
                shifts[site.path] = shift
            elif _key(site.path, 0, plan[site.path].calls_apart) not in errors:
                notes[site.path] = _UNREACHED
        return BiasShifts(shifts=shifts, notes=notes | dict.fromkeys(shifts, _DONE))

    def _shift(self, plan: Plan, site: Site, errors: _Errors) -> Tensor | None:
        """Return the shift of a site, float32 [C] or [N, C]; None if errors of some call are not known."""
        calls = plan[site.path].calls_apart
        sums = [errors.get(_key(site.path, call, calls)) for call in range(max(calls, 1))]
        means = [error.mean(self._dtype) for error in sums if error is not None]
        if len(means) < len(sums):
            return None
        return torch.stack(means) if calls else means[0]

    def _float_pass(self, name: Hashable, batch: Batch, plan: Plan) -> _FloatPass:
        if name not in self._in_float:
            self._in_float[name] = _FloatPass(self._proxy, batch, plan)
        return self._in_float[name]

    def _alone(self, plan: Plan, sites: Sequence[Site], batch: Batch, errors: _Errors) -> _Errors:
        """Return the errors of the batches before and of this one, of each site with what is before it in float."""
        found, mask = dict(errors), padding_mask(batch[1], batch[0])

        def judge(site: Site, function: Callable[..., Any], args: list[Any], keywords: dict[str, Any]) -> Any:
            rounded, result = site.rounded(function, args, keywords), function(*args, **keywords)
            key = _key(site.path, current_call(site.path), plan[site.path].calls_apart)
            if len(rows := _rows(site, result, mask)):
                found[key] = _Expected.of(rows).compared(_rows(site, rounded, mask)).added_to(found.get(key))
            return result

        run(self._proxy.module, batch, judge, sites)
        return found


def _without_shifts(plan: Plan) -> Plan:
    return {path: replace(entry, bias_shift=None) for path, entry in plan.items()}


def _with_shifts(plan: Plan, found: BiasShifts) -> Plan:
    def with_shift(path: str, entry: SitePlan) -> SitePlan:
        if not entry.quantized or path not in found.notes:
            return entry
        note = found.notes[path]
        return replace(entry, bias_shift=found.shifts.get(path), bias_note=note, reason=summary(entry.operands, note))

    return {path: with_shift(path, entry) for path, entry in plan.items()}


@dataclass(frozen=True, slots=True)
class _Sum:
    """The sums of w_r (y_r - z_r), float64 [C], and of w_r."""

    error: Tensor
    weight: float

    def mean(self, dtype: torch.dtype) -> Tensor:
        """Return the mean, float32 [C], rounded to ``dtype``."""
        return (self.error / self.weight).to(dtype).float()

    def added_to(self, known: _Sum | None) -> _Sum:
        """Return the sums with those of other batches."""
        return self if known is None else _Sum(known.error + self.error, known.weight + self.weight)


@dataclass(frozen=True, slots=True)
class _Expected:
    """A call in float: the weights of its samples, float64 [R], and the sum of w_r y_r, float64 [C]."""

    weights: Tensor
    total: Tensor

    @classmethod
    def of(cls, y: Tensor) -> _Expected:
        """Return that of rows y [R, C]."""
        power = torch.linalg.vector_norm(y, dim=1, dtype=torch.float64).square()
        middle = power.median() if len(y) else power.new_zeros(())
        # If most rows are zeros, all count alike.
        weights = middle / (power + middle) if middle > 0 else torch.ones_like(power)
        return cls(weights, _weighted_sum(weights, y))

    def compared(self, z: Tensor) -> _Sum:
        """Return the sums of the errors of rows z [R, C]."""
        return _Sum(self.total - _weighted_sum(self.weights, z), float(self.weights.sum()))


def _weighted_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """Return the sum of w_r x_r, float64 [C], without a copy of all rows x [R, C] in float64."""
    total = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    for start in range(0, len(rows), _AT_ONCE):
        total += weights[start : start + _AT_ONCE] @ rows[start : start + _AT_ONCE].double()
    return total


_Errors = Mapping[str, _Sum | None]
"""The sums by site, and call where calls are told apart, see ``_key``; None: it has no bias and cannot be given one."""


def _key(path: str, call: int | None, calls: int) -> str:
    """Return the key of a call's errors; ``calls`` is the number of those that are told apart, 0 for none."""
    return path if not calls else f"{path} call {call if call is not None and call < calls else 'beyond'}"


def _may_hold_a_shift(site: Site, entry: SitePlan) -> bool:
    """Return whether a site is a quantized product with a weight, to which an argument may add a bias."""
    # As the first factor of a matrix product, the weight has its channels along another axis than a bias.
    weighted = any(operand.role == "weight" and operand.name != "lhs" for operand in entry.operands)
    return entry.quantized and weighted and site.operation.bias is not None and not site.source.in_place


class _FloatPass:
    """One batch in float.

    Attributes:
        batch: the batch.
        mask: the real tokens of the batch, [B, S]; None: all are real.
        expected: the calls of sites that may hold a shift, in order, by site (and call, see ``_key``).
        unfit: the keys of calls with no bias that could hold a shift.
    """

    def __init__(self, proxy: Proxied, batch: Batch, plan: Plan) -> None:
        self.batch, self.mask = batch, padding_mask(batch[1], batch[0])
        self.expected: dict[str, list[_Expected]] = defaultdict(list)
        self.unfit: set[str] = set()
        self._plan = plan
        sites = [site for site in proxy.planned(plan) if _may_hold_a_shift(site, plan[site.path])]
        run(proxy.module, batch, self._note, sites)

    def key(self, site: Site) -> str:
        """Return the key of the current call of a site."""
        return _key(site.path, current_call(site.path), self._plan[site.path].calls_apart)

    def _note(self, site: Site, function: Callable[..., Any], args: list[Any], keywords: dict[str, Any]) -> Any:
        result = function(*args, **keywords)
        bias = site.bias_of(args, keywords)
        channels = (result.shape[site.operation.channels],)
        fits = site.holds_shift if bias is None else isinstance(bias, Tensor) and bias.shape == channels
        if fits and keywords.get("beta", 1) == 1:
            self.expected[self.key(site)].append(_Expected.of(_rows(site, result, self.mask)))
        else:
            self.unfit.add(self.key(site))
        return result


class _Corrected:
    """A batch rounded and corrected, call by call."""

    def __init__(self, in_float: _FloatPass, errors: _Errors, dtype: torch.dtype) -> None:
        self._in_float, self._dtype = in_float, dtype
        self._expected = {key: deque(calls) for key, calls in in_float.expected.items()}
        self._errors: dict[str, _Sum | None] = {**errors, **dict.fromkeys(in_float.unfit)}

    def run(self, proxy: Proxied, sites: Sequence[Site], plan: Plan) -> _Errors:
        """Return the errors of the batches before and of this one."""
        with quantized(proxy, plan):
            run(proxy.module, self._in_float.batch, self._call, sites)
        return self._errors

    def _call(self, site: Site, function: Callable[..., Any], args: list[Any], keywords: dict[str, Any]) -> Any:
        result, key = site.rounded(function, args, keywords), self._in_float.key(site)
        if key in self._errors and self._errors[key] is None:
            return result
        # With other values a model may call a site less or more often, or with other samples: those calls tell nothing.
        calls = self._expected.get(key)
        expected = calls.popleft() if calls else None
        rows = _rows(site, result, self._in_float.mask)
        known = self._errors.get(key)
        if expected is not None and len(expected.weights) == len(rows) > 0:
            known = self._errors[key] = expected.compared(rows).added_to(known)
        if known is None:
            return result
        shift = known.mean(self._dtype).to(result)
        return result + shift.reshape([-1] + [1] * (-1 - site.operation.channels))


def _rows(site: Site, result: Tensor, mask: Tensor | None) -> Tensor:
    """Return a result as rows [R, C] without padding."""
    rows = without_padding(result.movedim(site.operation.channels, -1), mask, channels_last=True)
    return rows.reshape(-1, rows.shape[-1])


def _told(mine: _Errors | None) -> _Errors:
    """Return the errors that the rank of the batch has, on all ranks; ``mine`` is None on the others."""
    if get_world_size() == 1:
        assert mine is not None
        return mine
    packed = {} if mine is None else {path: _packed(error) for path, error in mine.items()}
    told = all_gather_bytes(b"" if mine is None else save(packed))
    return {path: _unpacked(error) for data in told if data for path, error in load(data).items()}


def _packed(error: _Sum | None) -> Tensor:
    """Return both sums as float64 [C + 1], the last of them that of weights; [0] for None."""
    if error is None:
        return torch.zeros(0)
    return torch.cat([error.error.cpu(), torch.tensor([error.weight], dtype=torch.float64)])


def _unpacked(packed: Tensor) -> _Sum | None:
    return _Sum(packed[:-1], float(packed[-1])) if packed.numel() else None


ALGORITHM = Algorithm(wanted=lambda settings: settings.bias_correction, run=correct_biases)
