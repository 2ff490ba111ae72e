"""Bias correction: move the mean error that quantization causes in a site's output into the site's bias.

Legend: y [R, C] the float output of a site, as rows without padding; z [R, C] its output with the operands, and
everything before it, quantized and corrected; m the median over rows of |y_r|^2.

    shift = sum_r w_r (y_r - z_r) / sum_r w_r        w_r = m / (|y_r|^2 + m)

With equal weights this is E[y] - E[z] (Nagel et al. 2019, arXiv:1906.04721, section 4.2, from data). But a few rows of
huge values, such as the first tokens of a transformer, have errors as huge, and would decide for all others.

Sites are corrected in the order in which the model calls them: each call is compared with the same call of a float
pass, and its corrected result continues. If all sites were corrected at once, from the errors of one quantized pass,
each would correct errors that the preceding sites already corrected. Calls with ranges of their own have separate
shifts.

A shift also cancels errors of the preceding sites, so it is valid for one plan only: after a fallback shifts are
measured again. If one group is measured alone, each site's shift is measured with float operands before it.
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
"""The number of rows that are summed at once."""

_DONE = "bias corrected"
_NO_BIAS = "bias not corrected: this call has no bias that can be changed"
_UNREACHED = "bias not corrected: no stored batch reaches it"
_NO_BATCH = "bias not corrected: no calibration batch is stored, as in a saved folder"
_WORSE = "bias not corrected: the error of the model's output is smaller without"


def correct_biases(plan: Plan, work: Work) -> Plan:
    """Return the plan with shifts of biases, and a note for each quantized site."""
    observed = work.observed
    if observed.kept is None or not work.kept.everywhere:
        logger.warning(
            "biases are not corrected, because a saved folder has no batches to measure errors on; calibrate again"
        )
        notes = dict.fromkeys(_with_bias(work.proxy, plan), _NO_BATCH)
        return _with_shifts(plan, BiasShifts(shifts={}, notes=notes))
    if observed.bias_shifts is None or observed.bias_shifts[0] != observed.batches:
        observed.bias_shifts = observed.batches, BiasCorrection(work).shifts(plan)
    return _with_shifts(plan, observed.bias_shifts[1])


class BiasCorrection:
    """Bias correction on some batches, for plans of one calibration; float passes are computed once."""

    def __init__(self, work: Work) -> None:
        self._proxy, self._kept, self._error = work.proxy, work.kept.few(), work.error
        self._dtype = work.planned.scale_dtype
        self._in_float: dict[Hashable, _FloatPass] = {}

    def with_fallback(self, plan: Plan, groups: Mapping[str, str]) -> Plan:
        """Return a fully quantized plan with the shifts measured while ``groups`` are in float."""
        return _with_shifts(plan, self.shifts(_without_shifts(with_fallback(plan, groups)), plan))

    def of_single_sites(self, plan: Plan) -> Plan:
        """Return a plan with shifts that correct each site alone, with all other sites in float."""
        sites = [site for site in self._proxy.planned(plan) if plan[site.path].bias_shift is not None]
        plain = _without_shifts(plan)
        errors: _Errors = {}
        with torch.no_grad():
            apply_plan(self._proxy.module, plain)
            try:
                for batch in self._kept.in_turns():
                    errors = _shared_errors(None if batch is None else self._alone(plan, sites, batch, errors))
            finally:
                for site in self._proxy.sites:
                    site.reset()
        shifts = {site.path: shift for site in sites if (shift := self._shift(plan, site, errors)) is not None}
        return _with_shifts(plain, BiasShifts(shifts=shifts, notes=dict.fromkeys(shifts, _DONE)))

    def shifts(self, plan: Plan, whole: Plan | None = None) -> BiasShifts:
        """Measure the shifts; return none if they increase the error of the model's output, over the batches of all
        ranks.

        ``whole`` is the plan before a fallback; its float passes serve other fallbacks too (None: ``plan``).
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
        """Return the mean error of each site's output, over the stored batches of all ranks.

        Batches run one after the other, each on the rank that stores it. Each is corrected by the means of those before
        it and its own, so all ranks get the shifts of one process. A rank runs its next float pass while it waits.
        """
        sites = [site for site in self._proxy.planned(plan) if _may_have_shift(site, plan[site.path])]
        mine = iter(self._kept.mine().items())
        ready: _FloatPass | None = None
        errors: _Errors = {}
        for batch in self._kept.in_turns():
            if ready is None and (named := next(mine, None)) is not None:
                ready = self._float_pass(*named, whole)
            if batch is None:
                errors = _shared_errors(None)
            else:
                assert ready is not None
                errors, ready = (
                    _shared_errors(_Corrected(ready, errors, self._dtype).run(self._proxy, sites, plan)),
                    None,
                )
        notes = dict.fromkeys(_with_bias(self._proxy, plan), _NO_BIAS)
        shifts: dict[str, Tensor] = {}
        for site in sites:
            shift = self._shift(plan, site, errors)
            if shift is not None:
                shifts[site.path] = shift
            elif _key(site.path, 0, plan[site.path].calls_apart) not in errors:
                notes[site.path] = _UNREACHED
        return BiasShifts(shifts=shifts, notes=notes | dict.fromkeys(shifts, _DONE))

    def _shift(self, plan: Plan, site: Site, errors: _Errors) -> Tensor | None:
        """Return the shift of a site, float32 [C] or [N, C]; None if errors of some calls are unknown."""
        calls = plan[site.path].calls_apart
        sums = [errors.get(_key(site.path, call, calls)) for call in range(max(calls, 1))]
        means = [error.mean(self._dtype) for error in sums if error is not None]
        if len(means) < len(sums):
            return None
        return torch.stack(means) if calls else means[0]

    def _float_pass(self, name: Hashable, batch: Batch, plan: Plan) -> _FloatPass:
        if name not in self._in_float:
            self._in_float[name] = _FloatPass(self._proxy, self._error.quick(batch), plan)
        return self._in_float[name]

    def _alone(self, plan: Plan, sites: Sequence[Site], batch: Batch, errors: _Errors) -> _Errors:
        """Return the errors so far plus the errors of each site in this batch, with float operands before it."""
        sums, mask = dict(errors), padding_mask(batch[1], batch[0])

        def judge(site: Site, function: Callable[..., Any], args: list[Any], keywords: dict[str, Any]) -> Any:
            rounded, result = site.rounded(function, args, keywords), function(*args, **keywords)
            key = _key(site.path, current_call(site.path), plan[site.path].calls_apart)
            if len(rows := _rows(site, result, mask)):
                sums[key] = _Expected.of(rows).compared(_rows(site, rounded, mask)).added_to(sums.get(key))
            return result

        run(self._proxy.module, batch, judge, sites)
        return sums


def _without_shifts(plan: Plan) -> Plan:
    return {path: replace(entry, bias_shift=None) for path, entry in plan.items()}


def _with_shifts(plan: Plan, shifts: BiasShifts) -> Plan:
    def with_shift(path: str, entry: SitePlan) -> SitePlan:
        if not entry.quantized or path not in shifts.notes:
            return entry
        note = shifts.notes[path]
        return replace(entry, bias_shift=shifts.shifts.get(path), bias_note=note, reason=summary(entry.operands, note))

    return {path: with_shift(path, entry) for path, entry in plan.items()}


@dataclass(frozen=True, slots=True)
class _Sum:
    """The sums of w_r (y_r - z_r), float64 [C], and of w_r, float64 []."""

    error: Tensor
    weight: Tensor

    def mean(self, dtype: torch.dtype) -> Tensor:
        """Return the mean, float32 [C], rounded to ``dtype``."""
        return (self.error / self.weight).to(dtype).float()

    def added_to(self, known: _Sum | None) -> _Sum:
        return self if known is None else _Sum(known.error + self.error, known.weight + self.weight)


@dataclass(frozen=True, slots=True)
class _Expected:
    """A call in float: the weights of its rows, float64 [R], and the sum of w_r y_r, float64 [C]."""

    weights: Tensor
    total: Tensor

    @classmethod
    def of(cls, y: Tensor) -> _Expected:
        """Return the weights and the sum of rows y [R, C]."""
        power = torch.linalg.vector_norm(y, dim=1, dtype=torch.float64).square()
        middle = power.median() if len(y) else power.new_zeros(())
        # If most rows are zeros, all rows have equal weights.
        weights = torch.where(middle > 0, middle / (power + middle), 1.0)
        return cls(weights, _weighted_sum(weights, y))

    def compared(self, z: Tensor) -> _Sum:
        """Return the sums of the errors of rows z [R, C]."""
        return _Sum(self.total - _weighted_sum(self.weights, z), self.weights.sum())


def _weighted_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """Return the sum of w_r x_r, float64 [C], without a copy of all rows x [R, C] in float64."""
    total = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    for start in range(0, len(rows), _AT_ONCE):
        total += weights[start : start + _AT_ONCE] @ rows[start : start + _AT_ONCE].double()
    return total


_Errors = Mapping[str, _Sum | None]
"""The sums by site and call, see ``_key``; None: the site has no bias and cannot have one."""


def _key(path: str, call: int | None, calls: int) -> str:
    """Return the key of a call's errors; ``calls`` is the number of calls with ranges of their own, 0 for none."""
    return path if not calls else f"{path} call {call if call is not None and call < calls else 'beyond'}"


def _with_bias(proxy: Proxied, plan: Plan) -> list[str]:
    """Return the quantized sites whose operation can have a bias; additions, for example, have none."""
    return [site.path for site in proxy.planned(plan) if plan[site.path].quantized and site.operation.bias is not None]


def _may_have_shift(site: Site, entry: SitePlan) -> bool:
    # A weight as the left operand of a MatMul has its channels along another axis than a bias.
    weighted = any(operand.role == "weight" and operand.name != "lhs" for operand in entry.operands)
    return entry.quantized and weighted and site.operation.bias is not None and not site.source.in_place


class _FloatPass:
    """The float pass of one batch.

    Attributes:
        batch: the batch.
        mask: the real tokens of the batch, [B, S]; None: all are real.
        expected: the calls of sites that may have a shift, in order, by site (and call, see ``_key``).
        unfit: the keys of calls without a bias that could take a shift.
    """

    def __init__(self, proxy: Proxied, batch: Batch, plan: Plan) -> None:
        self.batch, self.mask = batch, padding_mask(batch[1], batch[0])
        self.expected: dict[str, list[_Expected]] = defaultdict(list)
        self.unfit: set[str] = set()
        self._plan = plan
        sites = [site for site in proxy.planned(plan) if _may_have_shift(site, plan[site.path])]
        run(proxy.module, batch, self._note, sites)

    def key(self, site: Site) -> str:
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
    """A pass of a batch, quantized and corrected call by call."""

    def __init__(self, in_float: _FloatPass, errors: _Errors, dtype: torch.dtype) -> None:
        self._in_float, self._dtype = in_float, dtype
        self._expected = {key: deque(calls) for key, calls in in_float.expected.items()}
        self._errors: dict[str, _Sum | None] = {**errors, **dict.fromkeys(in_float.unfit)}

    def run(self, proxy: Proxied, sites: Sequence[Site], plan: Plan) -> _Errors:
        """Return the errors so far plus the errors of this batch."""
        with quantized(proxy, plan):
            run(proxy.module, self._in_float.batch, self._call, sites)
        return self._errors

    def _call(self, site: Site, function: Callable[..., Any], args: list[Any], keywords: dict[str, Any]) -> Any:
        result, key = site.rounded(function, args, keywords), self._in_float.key(site)
        if key in self._errors and self._errors[key] is None:
            return result
        # With other values a model may call a site more or less often, or with other rows; such calls do not count.
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


def _shared_errors(mine: _Errors | None) -> _Errors:
    """Return the errors of the rank that ran the batch, on all ranks; ``mine`` is None on the others."""
    if get_world_size() == 1:
        assert mine is not None
        return mine
    packed = {} if mine is None else {path: _packed(error) for path, error in mine.items()}
    gathered = all_gather_bytes(b"" if mine is None else save(packed))
    return {path: _unpacked(error) for data in gathered if data for path, error in load(data).items()}


def _packed(error: _Sum | None) -> Tensor:
    """Return both sums as float64 [C + 1], the weight last; [0] for None."""
    if error is None:
        return torch.zeros(0)
    return torch.cat([error.error, error.weight[None]]).cpu()


def _unpacked(packed: Tensor) -> _Sum | None:
    return _Sum(packed[:-1], packed[-1]) if packed.numel() else None


ALGORITHM = Algorithm(wanted=lambda settings: settings.bias_correction, run=correct_biases)
