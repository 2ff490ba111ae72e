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
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from quantizer.calibration.output_search import OutputError, quantized
from quantizer.calibration.proxied import Proxied
from quantizer.calibration.replay import run_judged
from quantizer.common.batches import copied
from quantizer.common.distributed import all_gather_bytes, get_world_size
from quantizer.observe.replay_batches import Batch, ReplayBatches
from quantizer.observe.site_statistics import padding_mask, without_padding
from quantizer.observe.statistics import BiasShifts, Seen
from quantizer.plan.site_plan import Plan, SitePlan, summary
from quantizer.proxy.call_numbers import current_call
from quantizer.proxy.site import Site

logger = logging.getLogger(__name__)

_ROWS = 4096
"""The number of rows that are summed at once."""

_DONE = "bias corrected"
_NO_BIAS = "bias not corrected: it has none that holds it"
_UNREACHED = "bias not corrected: no batch that was kept reaches it"
_NO_BATCH = "bias not corrected: no batch of the calibration is kept, as in a folder"
_WORSE = "bias not corrected: the output of the model comes out better without"


def corrected(proxy: Proxied, plan: Plan, observation: Seen, error: OutputError, dtype: torch.dtype) -> Plan:
    """Return the plan with shifts of biases, and a note for each quantized site.

    The shifts are measured once, and again after more data.
    """
    kept = ReplayBatches() if observation.kept is None else observation.kept
    if not kept.everywhere:
        logger.warning(
            "biases are not corrected, as a folder keeps no batch to measure their errors on: calibrate again for them"
        )
        notes = {path: _NO_BATCH for path, entry in plan.items() if entry.quantized and entry.kind != "output"}
        return _with_shifts(plan, BiasShifts(shifts={}, notes=notes))
    known = observation.bias_shifts
    if known is None or known[0] != observation.batches:
        with torch.no_grad():
            known = observation.batches, _chosen(proxy, plan, kept.few(), error, dtype)
        observation.bias_shifts = known
    return _with_shifts(plan, known[1])


def _chosen(proxy: Proxied, plan: Plan, kept: ReplayBatches, error: OutputError, dtype: torch.dtype) -> BiasShifts:
    """Measure the shifts; return none if the output of the model is worse with them, on the batches of all ranks."""
    measured = _measured(proxy, plan, kept, dtype)
    if not measured.shifts:
        return measured
    before = error.of_all_ranks(plan, kept)
    if error.of_all_ranks(_with_shifts(plan, measured), kept, before) <= before:
        return measured
    notes = {path: _WORSE if path in measured.shifts else note for path, note in measured.notes.items()}
    return BiasShifts(shifts={}, notes=notes)


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


@dataclass(frozen=True, slots=True)
class _Expected:
    """A call in float: the weights of its rows, float64 [R], and the sum of w_r y_r, float64 [C]."""

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
    for start in range(0, len(rows), _ROWS):
        total += weights[start : start + _ROWS] @ rows[start : start + _ROWS].double()
    return total


_Errors = Mapping[str, _Sum | None]
"""The sums by site, and call where calls are told apart, see ``_key``; None: it has no bias and cannot be given one."""


def _measured(proxy: Proxied, plan: Plan, kept: ReplayBatches, dtype: torch.dtype) -> BiasShifts:
    """Return the mean error of each site's output, over the kept batches of all ranks.

    The batches run one after the other, each on the rank that keeps it, and each is corrected by the means of those
    before it and its own. So all ranks get the shifts of one process. In float a rank runs its next one while it waits
    for its turn.
    """
    sites = [site for site in proxy.planned(plan) if _may_hold_a_shift(site, plan[site.path])]
    mine = iter(kept.mine().values())
    ready: _Comparison | None = None
    errors: _Errors = {}
    for turn in kept.in_turns():
        if ready is None and (batch := next(mine, None)) is not None:
            ready = _Comparison(proxy, sites, batch, dtype, {site: plan[site.path].calls_apart for site in sites})
        if turn is None:
            errors = _told(None)
        else:
            assert ready is not None
            errors, ready = _told(ready.run(plan, errors)), None
    # A lookup adds nothing up, and what a result is of is corrected itself.
    none = ("embedding", "output")
    notes = {path: _NO_BIAS for path, entry in plan.items() if entry.quantized and entry.kind not in none}
    shifts: dict[str, Tensor] = {}
    for site in sites:
        calls = plan[site.path].calls_apart
        sums = [errors.get(_key(site.path, call, calls)) for call in range(max(calls, 1))]
        means = [error.mean(dtype) for error in sums if error is not None]
        if len(means) == len(sums):
            shifts[site.path] = torch.stack(means) if calls else means[0]
        elif _key(site.path, 0, calls) not in errors:
            notes[site.path] = _UNREACHED
    return BiasShifts(shifts=shifts, notes=notes | dict.fromkeys(shifts, _DONE))


def _key(path: str, call: int | None, calls: int) -> str:
    """Return the key of a call's errors; ``calls`` is the number of those that are told apart, 0 for none."""
    return path if not calls else f"{path} call {call if call is not None and call < calls else 'beyond'}"


def _may_hold_a_shift(site: Site, entry: SitePlan) -> bool:
    """Return whether a site is a quantized product with a weight, to which an argument may add a bias."""
    # As the first factor of a matrix product, the weight has its channels along another axis than a bias.
    weighted = any(operand.role == "weight" and operand.name != "lhs" for operand in entry.operands)
    return entry.quantized and weighted and site.operation.bias is not None and not site.source.in_place


class _Comparison:
    """One batch in float, and then rounded and corrected, call by call."""

    def __init__(
        self, proxy: Proxied, sites: Sequence[Site], batch: Batch, dtype: torch.dtype, calls: Mapping[Site, int]
    ) -> None:
        self._proxy, self._sites, self._batch, self._dtype, self._calls = proxy, sites, batch, dtype, calls
        self._mask = padding_mask(batch[1], batch[0])
        self._expected: dict[str, deque[_Expected]] = defaultdict(deque)
        self._unfit: dict[str, _Sum | None] = {}
        self._errors: dict[str, _Sum | None] = {}
        run_judged(proxy.module, sites, copied(*batch), self._in_float)

    def run(self, plan: Plan, errors: _Errors) -> _Errors:
        """Return the errors of the batches before, ``errors``, and of this one."""
        self._errors = {**errors, **self._unfit}
        with quantized(self._proxy, plan):
            run_judged(self._proxy.module, self._sites, copied(*self._batch), self._corrected)
        return self._errors

    def _in_float(self, site: Site, function: Callable[..., Any], args: list[Any], keywords: dict[str, Any]) -> Any:
        result = function(*args, **keywords)
        bias = site.bias_of(args, keywords)
        channels = (result.shape[site.operation.channels],)
        key = self._key(site)
        fits = site.holds_shift if bias is None else isinstance(bias, Tensor) and bias.shape == channels
        if fits and keywords.get("beta", 1) == 1:
            self._expected[key].append(_Expected.of(self._rows(site, result)))
        else:
            self._unfit[key] = None
        return result

    def _corrected(self, site: Site, function: Callable[..., Any], args: list[Any], keywords: dict[str, Any]) -> Any:
        result, path = site.rounded(function, args, keywords), self._key(site)
        if path in self._errors and self._errors[path] is None:
            return result
        # With other values a model may call a site less or more often, or with other rows: those calls tell nothing.
        expected = self._expected[path].popleft() if self._expected[path] else None
        rows = self._rows(site, result)
        known = self._errors.get(path)
        if expected is not None and len(expected.weights) == len(rows) > 0:
            found = expected.compared(rows)
            if known is not None:
                found = _Sum(known.error + found.error, known.weight + found.weight)
            known = self._errors[path] = found
        if known is None:
            return result
        shift = known.mean(self._dtype).to(result)
        return result + shift.reshape([-1] + [1] * (-1 - site.operation.channels))

    def _key(self, site: Site) -> str:
        return _key(site.path, current_call(site.path), self._calls[site])

    def _rows(self, site: Site, result: Tensor) -> Tensor:
        """Return a result as rows [R, C] without padding."""
        rows = without_padding(result.movedim(site.operation.channels, -1), self._mask, channels_last=True)
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
